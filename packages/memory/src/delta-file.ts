/**
 * A memory delta on the disk: what of a guest's memory differs from the state before. Our own form: data of the pieces
 * one after the other, then the index, then a footer of fixed size; all numbers little endian. A file without a right
 * footer is no delta: it was cut short or is of something else. Each piece has a sum of its own, so that a reader
 * checks what it uses and nothing else.
 */
import { closeSync, fdatasync, fstatSync, openSync, readSync, rmSync, writeSync } from "node:fs";
import { promisify } from "node:util";
import { crc32 } from "node:zlib";
import { AenvError, errnoOf } from "@aenv/base";
import type { DeltaPiece } from "./delta.ts";
import { MAX_PIECE_BYTES, PAGE_BYTES } from "./guest-memory.ts";

const sync = promisify(fdatasync);
const MAGIC = "AENVMEM1";
const FOOTER_BYTES = 40;
const ENTRY_BYTES = 24;
/** In place of a data offset: the piece is all zeros. */
const ZEROS = 0xffff_ffff_ffff_ffffn;
/** Small pieces are written together. */
const STAGE_BYTES = 1 << 20;

/** Writes a new file; nothing is readable before `seal`. */
export class DeltaWriter implements Disposable {
  readonly #path: string;
  readonly #fd: number;
  readonly #memoryBytes: number;
  readonly #index: { offset: number; length: number; at: bigint; crc: number }[] = [];
  readonly #stage = Buffer.allocUnsafe(STAGE_BYTES);
  #staged = 0;
  /** End of the data, what is staged included. */
  #end = 0;
  #closed = false;
  readonly #syncs: Promise<void>[] = [];

  constructor(path: string, memoryBytes: number) {
    this.#path = path;
    this.#fd = openSync(path, "wx", 0o600);
    this.#memoryBytes = memoryBytes;
  }

  /** Bytes of data so far, zeros not counted. */
  get bytes(): number {
    return this.#end;
  }

  add({ data, offset, length }: DeltaPiece): void {
    if (!data) {
      this.#index.push({ offset, length, at: ZEROS, crc: 0 });
      return;
    }
    for (let done = 0; done < length; done += MAX_PIECE_BYTES) {
      const part = data.subarray(done, done + MAX_PIECE_BYTES);
      this.#index.push({ offset: offset + done, length: part.length, at: BigInt(this.#end), crc: crc32(part) });
      this.#append(part);
      this.#end += part.length;
    }
  }

  /** What was added goes to the device from now on, while more is added: the last sync then has little left to do. */
  flushAhead(): void {
    this.#flush();
    this.#syncs.push(sync(this.#fd));
  }

  /** Index and footer; then the file is complete. `durable`: it also survives a loss of power. */
  async seal(durable: boolean): Promise<void> {
    const index = Buffer.alloc(this.#index.length * ENTRY_BYTES);
    for (const [i, e] of this.#index.entries()) {
      index.writeBigUInt64LE(BigInt(e.offset), i * ENTRY_BYTES);
      index.writeUInt32LE(e.length / PAGE_BYTES, i * ENTRY_BYTES + 8);
      index.writeUInt32LE(e.crc, i * ENTRY_BYTES + 12);
      index.writeBigUInt64LE(e.at, i * ENTRY_BYTES + 16);
    }
    const footer = Buffer.alloc(FOOTER_BYTES);
    footer.writeBigUInt64LE(BigInt(this.#memoryBytes), 0);
    footer.writeBigUInt64LE(BigInt(this.#end), 8);
    footer.writeUInt32LE(this.#index.length, 16);
    footer.writeUInt32LE(crc32(index), 24);
    footer.writeUInt32LE(crc32(footer.subarray(0, 28)), 28);
    footer.write(MAGIC, 32, "latin1");
    this.#append(index);
    this.#append(footer);
    this.#flush();
    // The kernel tells a failed write to one sync only: each has to be heard.
    await Promise.all(this.#syncs);
    if (durable) await sync(this.#fd);
    this.#closed = true;
    closeSync(this.#fd);
  }

  /** Without a seal the file goes. */
  [Symbol.dispose](): void {
    if (this.#closed) return;
    this.#closed = true;
    // Not before the syncs that run: the number of the file may be another's then.
    void Promise.allSettled(this.#syncs).then(() => closeSync(this.#fd));
    rmSync(this.#path, { force: true });
  }

  #append(data: Buffer): void {
    if (this.#staged + data.length > STAGE_BYTES) this.#flush();
    if (data.length >= STAGE_BYTES) return writeFully(this.#fd, data);
    data.copy(this.#stage, this.#staged);
    this.#staged += data.length;
  }

  #flush(): void {
    writeFully(this.#fd, this.#stage.subarray(0, this.#staged));
    this.#staged = 0;
  }
}

function writeFully(fd: number, data: Buffer): void {
  for (let done = 0; done < data.length; ) done += writeSync(fd, data, done, data.length - done);
}

/**
 * Which entries of a delta were found right already, by what changes when somebody changes the file: sixteen children of
 * a fork are given the same data, and its sums are most of the work.
 */
const checked = new Map<string, Uint8Array>();
const MAX_CHECKED = 256;

function checkedOf(fd: number, count: number): Uint8Array {
  const { dev, ino, size, mtimeNs, ctimeNs } = fstatSync(fd, { bigint: true });
  const key = [dev, ino, size, mtimeNs, ctimeNs].join(" ");
  const known = checked.get(key) ?? new Uint8Array(count);
  checked.delete(key);
  checked.set(key, known);
  const oldest = checked.keys().next();
  if (checked.size > MAX_CHECKED && oldest.done !== true) checked.delete(oldest.value);
  return known;
}

/** One entry of a delta's index. */
export interface DeltaEntry {
  /** Its place in the index. */
  number: number;
  offset: number;
  length: number;
  /** Where its data is in the file; undefined for zeros. */
  at: number | undefined;
  crc: number;
}

/** An open delta whose end and index are right; its data is checked piece by piece. CORRUPT names the file. */
export class DeltaFile implements Disposable {
  readonly path: string;
  readonly entries: readonly DeltaEntry[];
  readonly #fd: number;
  readonly #checked: Uint8Array;

  private constructor(path: string, fd: number, entries: readonly DeltaEntry[]) {
    this.path = path;
    this.#checked = checkedOf(fd, entries.length);
    this.#fd = fd;
    this.entries = entries;
  }

  static open(path: string, memoryBytes: number): DeltaFile {
    let fd: number;
    try {
      fd = openSync(path, "r");
    } catch (e) {
      if (errnoOf(e) === "ENOENT") throw corrupt(path, "it is missing");
      throw AenvError.from(e, `open the memory delta ${path}`);
    }
    try {
      return new DeltaFile(path, fd, readIndex(path, fd, memoryBytes));
    } catch (e) {
      closeSync(fd);
      throw e;
    }
  }

  /** The whole data of an entry, checked when it is first read. */
  read(e: DeltaEntry): Buffer | undefined {
    if (e.at === undefined) return undefined;
    const data = Buffer.allocUnsafe(e.length);
    if (!readFully(this.#fd, data, e.at)) throw corrupt(this.path, "it ends early");
    if (this.#checked[e.number] !== 1) {
      if (crc32(data) !== e.crc) throw corrupt(this.path, `its data at ${e.at}`);
      this.#checked[e.number] = 1;
    }
    return data;
  }

  /** A part of an entry's data, unchecked. */
  readPart(position: number, into: Buffer): void {
    if (!readFully(this.#fd, into, position)) throw corrupt(this.path, "it ends early");
  }

  [Symbol.dispose](): void {
    closeSync(this.#fd);
  }
}

const corrupt = (path: string, why: string): AenvError =>
  new AenvError("CORRUPT", `the memory delta ${path} is damaged: ${why}`, {
    hint: "What was captured with it cannot be launched; an earlier snapshot may.",
    data: { path },
  });

function readIndex(path: string, fd: number, memoryBytes: number): DeltaEntry[] {
  const { size } = fstatSync(fd);
  const footer = Buffer.alloc(FOOTER_BYTES);
  if (size < FOOTER_BYTES || !readFully(fd, footer, size - FOOTER_BYTES)) throw corrupt(path, "it is too short");
  if (footer.toString("latin1", 32) !== MAGIC || footer.readUInt32LE(28) !== crc32(footer.subarray(0, 28)))
    throw corrupt(path, "its end is not that of a delta");
  const dataBytes = Number(footer.readBigUInt64LE(8));
  const count = footer.readUInt32LE(16);
  if (Number(footer.readBigUInt64LE(0)) !== memoryBytes) throw corrupt(path, "it is of a machine with other memory");
  if (dataBytes + count * ENTRY_BYTES + FOOTER_BYTES !== size) throw corrupt(path, `it has ${size} bytes`);
  const index = Buffer.alloc(count * ENTRY_BYTES);
  if (!readFully(fd, index, dataBytes) || crc32(index) !== footer.readUInt32LE(24)) throw corrupt(path, "its index");
  return Array.from({ length: count }, (_, i) => {
    const at = index.readBigUInt64LE(i * ENTRY_BYTES + 16);
    return {
      number: i,
      offset: Number(index.readBigUInt64LE(i * ENTRY_BYTES)),
      length: index.readUInt32LE(i * ENTRY_BYTES + 8) * PAGE_BYTES,
      at: at === ZEROS ? undefined : Number(at),
      crc: index.readUInt32LE(i * ENTRY_BYTES + 12),
    };
  });
}

export function readFully(fd: number, into: Buffer, position: number): boolean {
  for (let done = 0; done < into.length; ) {
    const got = readSync(fd, into, done, into.length - done, position + done);
    if (got === 0) return false;
    done += got;
  }
  return true;
}
