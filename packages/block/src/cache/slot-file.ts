import { closeSync, fstatSync, ftruncateSync, mkdirSync, openSync, readSync, writeSync } from "node:fs";
import { read as readCallback, write as writeCallback } from "node:fs";
import { join } from "node:path";
import { promisify } from "node:util";
import { crc32c } from "@node-rs/crc32";
import { SLOT_BYTES } from "./slots.ts";

const read = promisify(readCallback);
const write = promisify(writeCallback);

/**
 * What each slot holds, 64 bytes each: SHA-256 of the blob 32 | piece u32 | length u32 | sum of the content u32 | sum of
 * the above u32 | zeros. A slot's entry is cleared before its content changes and written after, and the content has a
 * sum: whatever a crash or a loss of power leaves, nothing wrong is taken for a piece.
 */
const ENTRY_BYTES = 64;
const SUMMED_BYTES = 44;

export interface SlotEntry {
  /** Hexadecimal. */
  sha256: string;
  piece: number;
  length: number;
  sum: number;
}

/** The two files of a cache: contents in slots of equal size, and what they are. */
export class SlotFile implements Disposable {
  readonly count: number;
  readonly fd: number;
  readonly #indexFd: number;

  constructor(dir: string, count: number) {
    mkdirSync(dir, { recursive: true, mode: 0o700 });
    this.count = count;
    using undo = new DisposableStack();
    this.fd = undo.adopt(open(join(dir, "slots.data")), closeSync);
    this.#indexFd = undo.adopt(open(join(dir, "slots.index")), closeSync);
    // A bound that was lowered holds at once.
    if (fstatSync(this.fd).size > count * SLOT_BYTES) ftruncateSync(this.fd, count * SLOT_BYTES);
    if (fstatSync(this.#indexFd).size > count * ENTRY_BYTES) ftruncateSync(this.#indexFd, count * ENTRY_BYTES);
    undo.move();
  }

  /** What the slots hold, by their entries; the contents are not checked here. */
  entries(): (SlotEntry | undefined)[] {
    const b = Buffer.alloc(this.count * ENTRY_BYTES);
    for (let done = 0; done < b.length; ) {
      const n = readSync(this.#indexFd, b, done, b.length - done, done);
      if (n === 0) break;
      done += n;
    }
    return Array.from({ length: this.count }, (_, slot) => {
      const e = b.subarray(slot * ENTRY_BYTES, (slot + 1) * ENTRY_BYTES);
      if (crc32c(e.subarray(0, SUMMED_BYTES)) !== e.readUInt32LE(SUMMED_BYTES)) return undefined;
      const length = e.readUInt32LE(36);
      if (length === 0 || length > SLOT_BYTES) return undefined;
      return { sha256: e.toString("hex", 0, 32), piece: e.readUInt32LE(32), length, sum: e.readUInt32LE(40) };
    });
  }

  clear(slot: number): void {
    writeSync(this.#indexFd, CLEARED, 0, ENTRY_BYTES, slot * ENTRY_BYTES);
  }

  /** The slot must have been cleared. */
  async fill(slot: number, sha256: string, piece: number, data: Buffer): Promise<void> {
    for (let done = 0; done < data.length; ) {
      done += (await write(this.fd, data, done, data.length - done, slot * SLOT_BYTES + done)).bytesWritten;
    }
    const e = Buffer.alloc(ENTRY_BYTES);
    e.write(sha256, 0, 32, "hex");
    e.writeUInt32LE(piece, 32);
    e.writeUInt32LE(data.length, 36);
    e.writeUInt32LE(crc32c(data), 40);
    e.writeUInt32LE(crc32c(e.subarray(0, SUMMED_BYTES)), SUMMED_BYTES);
    writeSync(this.#indexFd, e, 0, ENTRY_BYTES, slot * ENTRY_BYTES);
  }

  /** The content of the slot is what its entry says. */
  async check(slot: number, entry: SlotEntry): Promise<boolean> {
    const b = Buffer.allocUnsafe(entry.length);
    for (let done = 0; done < b.length; ) {
      const { bytesRead } = await read(this.fd, b, done, b.length - done, slot * SLOT_BYTES + done);
      if (bytesRead === 0) return false;
      done += bytesRead;
    }
    return crc32c(b) === entry.sum;
  }

  [Symbol.dispose](): void {
    closeSync(this.fd);
    closeSync(this.#indexFd);
  }
}

const CLEARED = Buffer.alloc(ENTRY_BYTES);
/** An entry of zeros has the sum of zeros only where that is not zero. */
CLEARED.writeUInt32LE(0xffffffff, SUMMED_BYTES);

function open(path: string): number {
  try {
    return openSync(path, "r+");
  } catch {
    return openSync(path, "wx+", 0o600);
  }
}
