import type { FileHandle } from "node:fs/promises";

/** Takes the bytes of a file from its start to its end. The buffer is the caller's again once `write` resolves. */
export interface Sink {
  write(data: Buffer): Promise<void>;
  /** Replaces the first bytes; absent where what was written cannot be changed any more (an upload). */
  rewriteStart?(data: Buffer): Promise<void>;
}

/** Writes a file from `position` on. */
export function fileSink(file: FileHandle, position = 0): Sink & { readonly bytes: number } {
  let at = position;
  return {
    get bytes() {
      return at - position;
    },
    async write(data) {
      await writeAll(file, data, at);
      at += data.length;
    },
    rewriteStart: (data) => writeAll(file, data, position),
  };
}

async function writeAll(file: FileHandle, data: Buffer, at: number): Promise<void> {
  let done = 0;
  while (done < data.length) {
    done += (await file.write(data, done, data.length - done, at + done)).bytesWritten;
  }
}
