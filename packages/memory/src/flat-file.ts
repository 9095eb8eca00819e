import {
  chmodSync,
  closeSync,
  constants,
  copyFileSync,
  fchmodSync,
  fchownSync,
  fdatasync,
  ftruncateSync,
  openSync,
  rmSync,
  writeSync,
} from "node:fs";
import { promisify } from "node:util";
import { isZeroPage, type DeltaPiece } from "./delta.ts";
import { PAGE_BYTES } from "./guest-memory.ts";

const sync = promisify(fdatasync);

/** Who may read a flat file: VMMs get its group, and nobody may write it. */
export interface FlatOwner {
  uid: number;
  gid: number;
}

/** A new memory file, sparse where it is zero. */
export class FlatWriter implements Disposable {
  readonly #path: string;
  readonly #fd: number;
  #bytes = 0;
  #state: "open" | "sealed" | "closed" = "open";

  private constructor(path: string, fd: number) {
    this.#path = path;
    this.#fd = fd;
  }

  static create(path: string, memoryBytes: number): FlatWriter {
    const fd = openSync(path, "wx", 0o600);
    ftruncateSync(fd, memoryBytes);
    return new FlatWriter(path, fd);
  }

  /** A copy that shares its blocks with the original; undefined where the file system cannot. */
  static clone(from: string, path: string): FlatWriter | undefined {
    try {
      copyFileSync(from, path, constants.COPYFILE_EXCL | constants.COPYFILE_FICLONE_FORCE);
    } catch {
      rmSync(path, { force: true });
      return undefined;
    }
    chmodSync(path, 0o600);
    return new FlatWriter(path, openSync(path, "r+"));
  }

  /** Bytes written so far. */
  get bytes(): number {
    return this.#bytes;
  }

  /** Content of a file that is zero there so far. */
  fill(offset: number, data: Buffer): void {
    for (let at = 0; at < data.length; ) {
      let end = at;
      while (end < data.length && !isZeroPage(data, end)) end += PAGE_BYTES;
      if (end > at) this.#write(offset + at, data.subarray(at, end));
      at = end + PAGE_BYTES;
    }
  }

  /** Over whatever is there. */
  put(piece: DeltaPiece): void {
    this.#write(piece.offset, piece.data ?? Buffer.alloc(piece.length));
  }

  async seal(owner: FlatOwner, durable: boolean): Promise<void> {
    fchownSync(this.#fd, owner.uid, owner.gid);
    fchmodSync(this.#fd, 0o440);
    if (durable) await sync(this.#fd);
    this.#state = "sealed";
    closeSync(this.#fd);
  }

  /** Without a seal the file goes. */
  [Symbol.dispose](): void {
    if (this.#state !== "open") return;
    this.#state = "closed";
    closeSync(this.#fd);
    rmSync(this.#path, { force: true });
  }

  #write(offset: number, data: Buffer): void {
    for (let done = 0; done < data.length; ) done += writeSync(this.#fd, data, done, data.length - done, offset + done);
    this.#bytes += data.length;
  }
}
