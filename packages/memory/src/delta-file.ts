/**
 * A memory delta on the disk: what of a guest's memory differs from one flat memory file. Our own form:
 * data of the pieces one after the other, then the index, then a footer of fixed size; all numbers little endian.
 * A file without a right footer is no delta: it was cut short or is of something else.
 */
import { closeSync, fstatSync, openSync, readSync, writeSync } from "node:fs";
import { crc32 } from "node:zlib";
import { AenvError } from "@aenv/base";
import type { DeltaPiece } from "./delta.ts";

const MAGIC = "AENVMEM1";
const FOOTER_BYTES = 40;
const ENTRY_BYTES = 24;
/** In place of a data offset: the piece is all zeros. */
const ZEROS = 0xffff_ffff_ffff_ffffn;
/** Pieces are read back in parts of at most so many bytes. */
const MAX_PART_BYTES = 4 << 20;

/** Writes a new file; nothing is readable before `seal`. */
export class DeltaWriter implements Disposable {
  readonly #fd: number;
  readonly #memoryBytes: number;
  readonly #index: { offset: number; length: number; at: bigint }[] = [];
  #at = 0;
  #dataBytes = 0;
  #crc = 0;
  #closed = false;

  constructor(path: string, memoryBytes: number) {
    this.#fd = openSync(path, "wx", 0o600);
    this.#memoryBytes = memoryBytes;
  }

  /** Bytes of data so far, zeros not counted. */
  get bytes(): number {
    return this.#dataBytes;
  }

  add(piece: DeltaPiece): void {
    const { data, offset, length } = piece;
    this.#index.push({ offset, length, at: data ? BigInt(this.#at) : ZEROS });
    if (!data) return;
    this.#crc = crc32(data, this.#crc);
    this.#write(data);
    this.#dataBytes = this.#at;
  }

  /** Index and footer. The caller makes it durable. */
  seal(): void {
    const dataBytes = this.#at;
    const index = Buffer.alloc(this.#index.length * ENTRY_BYTES);
    for (const [i, e] of this.#index.entries()) {
      index.writeBigUInt64LE(BigInt(e.offset), i * ENTRY_BYTES);
      index.writeBigUInt64LE(BigInt(e.length), i * ENTRY_BYTES + 8);
      index.writeBigUInt64LE(e.at, i * ENTRY_BYTES + 16);
    }
    const footer = Buffer.alloc(FOOTER_BYTES);
    footer.writeBigUInt64LE(BigInt(this.#memoryBytes), 0);
    footer.writeBigUInt64LE(BigInt(dataBytes), 8);
    footer.writeUInt32LE(this.#index.length, 16);
    footer.writeUInt32LE(this.#crc, 20);
    footer.writeUInt32LE(crc32(index), 24);
    footer.writeUInt32LE(crc32(footer.subarray(0, 28)), 28);
    footer.write(MAGIC, 32, "latin1");
    this.#write(index);
    this.#write(footer);
    this[Symbol.dispose]();
  }

  [Symbol.dispose](): void {
    if (this.#closed) return;
    this.#closed = true;
    closeSync(this.#fd);
  }

  #write(data: Buffer): void {
    for (let done = 0; done < data.length; ) {
      const wrote = writeSync(this.#fd, data, done, data.length - done, this.#at);
      done += wrote;
      this.#at += wrote;
    }
  }
}

/** The pieces of a delta. The whole file is checked against its sums before the first piece is given. CORRUPT names the file. */
export function* readDelta(path: string, memoryBytes: number): Generator<DeltaPiece> {
  const corrupt = (why: string): AenvError =>
    new AenvError("CORRUPT", `the memory delta ${path} is damaged: ${why}`, {
      hint: "What was captured with it cannot be launched; an earlier snapshot may.",
    });
  const fd = openSync(path, "r");
  try {
    const { size } = fstatSync(fd);
    const footer = Buffer.alloc(FOOTER_BYTES);
    if (size < FOOTER_BYTES || !readFully(fd, footer, size - FOOTER_BYTES)) throw corrupt("it is too short");
    if (footer.toString("latin1", 32) !== MAGIC || footer.readUInt32LE(28) !== crc32(footer.subarray(0, 28)))
      throw corrupt("its end is not that of a delta");
    const dataBytes = Number(footer.readBigUInt64LE(8));
    const count = footer.readUInt32LE(16);
    if (Number(footer.readBigUInt64LE(0)) !== memoryBytes) throw corrupt("it is of a machine with other memory");
    if (dataBytes + count * ENTRY_BYTES + FOOTER_BYTES !== size) throw corrupt(`it has ${size} bytes`);
    const index = Buffer.alloc(count * ENTRY_BYTES);
    if (!readFully(fd, index, dataBytes) || crc32(index) !== footer.readUInt32LE(24)) throw corrupt("its index");
    let sum = 0;
    for (let at = 0; at < dataBytes; at += MAX_PART_BYTES) {
      const part = Buffer.allocUnsafe(Math.min(MAX_PART_BYTES, dataBytes - at));
      if (!readFully(fd, part, at)) throw corrupt("it ends early");
      sum = crc32(part, sum);
    }
    if (sum !== footer.readUInt32LE(20)) throw corrupt("its data");
    for (let i = 0; i < count; i++) {
      const offset = Number(index.readBigUInt64LE(i * ENTRY_BYTES));
      const length = Number(index.readBigUInt64LE(i * ENTRY_BYTES + 8));
      const at = index.readBigUInt64LE(i * ENTRY_BYTES + 16);
      if (at === ZEROS) {
        yield { offset, length, data: undefined };
        continue;
      }
      for (let done = 0; done < length; done += MAX_PART_BYTES) {
        const data = Buffer.allocUnsafe(Math.min(MAX_PART_BYTES, length - done));
        if (!readFully(fd, data, Number(at) + done)) throw corrupt("it ends early");
        yield { offset: offset + done, length: data.length, data };
      }
    }
  } finally {
    closeSync(fd);
  }
}

function readFully(fd: number, into: Buffer, position: number): boolean {
  for (let done = 0; done < into.length; ) {
    const got = readSync(fd, into, done, into.length - done, position + done);
    if (got === 0) return false;
    done += got;
  }
  return true;
}
