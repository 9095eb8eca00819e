import { corrupt } from "./format.ts";
import { type Reads, type Wanted, wanted } from "./reads.ts";
import type { Sink } from "./sink.ts";
import {
  BLOCK_SEED,
  compressBlock,
  type Compression,
  decompressBlock,
  LENGTH_BYTES,
  rawCrc32c,
  storedBound,
} from "./zfile-codec.ts";

/**
 * ZFile: a file cut into blocks, each compressed alone, so that any part of it can be read. Header 512 | dictionary |
 * blocks, each followed by its sum | jump table of u32 stored lengths | trailer 512. All little-endian.
 */
export const ZFILE_HEADER_BYTES = 512;
const MAGIC = Buffer.concat([Buffer.from("5a46696c65000100", "hex"), Buffer.from("tuji.yyf@Alibaba", "latin1")]);
const STRUCT_BYTES = 96;
const SUM_BYTES = 4;
const ALGORITHMS: readonly (Compression | undefined)[] = [undefined, "lz4", "zstd"];
const MAX_BLOCK_BYTES = 65536;
/** Larger stored blocks of incompressible data are not read back by upstream. */
const MAX_WRITTEN_BLOCK_BYTES = 32768;
const DEFAULT_BLOCK_BYTES = 4096;
/** A jump table longer than this is refused before memory is taken for it: 256 GiB in blocks of 4 KiB. */
const MAX_BLOCKS = 64 * 1024 * 1024;
const TABLE_STEP_BYTES = 1024 * 1024;

const FLAG_HEADER = 1;
const FLAG_DATA = 2;
const FLAG_SEALED = 4;
/** The header has the final fields: the trailer need not be read. */
const FLAG_OVERWRITTEN = 8;
const FLAG_SUMS = 16;
const FLAGS = { header: FLAG_HEADER | FLAG_DATA | FLAG_SUMS, trailer: FLAG_DATA | FLAG_SEALED | FLAG_SUMS };

/** Blocks that share one base of the offsets below. */
const GROUP_BLOCKS = 1024;

/** The jump table of a file, over shared memory. */
export interface ZFileIndex {
  compression: Compression;
  blockBytes: number;
  /** Every block is followed by its sum. */
  sums: boolean;
  /** Of the content. */
  bytes: number;
  blocks: number;
  /** Byte of the file at which the first block of each group is stored. */
  base: Float64Array;
  /** What a block's place adds to that; one more than there are blocks. */
  delta: Uint32Array;
}

export interface ZFileHeader {
  flags: number;
  indexOffset: number;
  blocks: number;
  bytes: number;
  indexSum: number;
  blockBytes: number;
  algorithm: number;
  dictBytes: number;
  sums: boolean;
}

export function encodeZFileHeader(h: ZFileHeader): Buffer {
  const b = Buffer.alloc(ZFILE_HEADER_BYTES);
  MAGIC.copy(b);
  b.writeUInt32LE(STRUCT_BYTES, 24);
  b.writeBigUInt64LE(BigInt(h.flags), 32);
  b.writeBigUInt64LE(BigInt(h.indexOffset), 40);
  b.writeBigUInt64LE(BigInt(h.blocks), 48);
  b.writeBigUInt64LE(BigInt(h.bytes), 56);
  b.writeUInt32LE(h.indexSum, 64);
  b.writeUInt32LE(h.blockBytes, 72);
  b.writeUInt8(h.algorithm, 76);
  b.writeUInt32LE(h.dictBytes, 84);
  b.writeUInt8(h.sums ? 1 : 0, 88);
  b.writeUInt32LE(rawCrc32c(0, b), 28);
  return b;
}

export function decodeZFileHeader(b: Buffer, name: string): ZFileHeader {
  const flags = b.readUInt32LE(32);
  if ((flags & FLAG_SUMS) !== 0) {
    const copy = Buffer.from(b.subarray(0, ZFILE_HEADER_BYTES));
    copy.writeUInt32LE(0, 28);
    if (rawCrc32c(0, copy) !== b.readUInt32LE(28)) throw corrupt(name, "has a compressed header with a wrong sum");
  }
  const u64 = (at: number): number => b.readUInt32LE(at) + b.readUInt32LE(at + 4) * 2 ** 32;
  return {
    flags,
    indexOffset: u64(40),
    blocks: u64(48),
    bytes: u64(56),
    indexSum: b.readUInt32LE(64),
    blockBytes: b.readUInt32LE(72),
    algorithm: b.readUInt8(76),
    dictBytes: b.readUInt32LE(84),
    sums: b.readUInt8(88) !== 0,
  };
}

function hasMagic(b: Buffer): boolean {
  return MAGIC.compare(b, 0, MAGIC.length) === 0;
}

/** The jump table of a file of `size` bytes; undefined when it is no ZFile. Throws CORRUPT naming the file. */
export function* readZFile(size: number, name: string): Reads<ZFileIndex | undefined> {
  if (size < 2 * ZFILE_HEADER_BYTES) return undefined;
  const first = yield* wanted(0, ZFILE_HEADER_BYTES);
  if (!hasMagic(first)) return undefined;
  let h = decodeZFileHeader(first, name);
  if ((h.flags & FLAG_HEADER) === 0) throw corrupt(name, "does not start with the header of a compressed file");
  let end = size;
  if ((h.flags & FLAG_OVERWRITTEN) === 0) {
    end = size - ZFILE_HEADER_BYTES;
    const last = yield* wanted(end, ZFILE_HEADER_BYTES);
    if (!hasMagic(last)) throw corrupt(name, "does not end with the trailer of a compressed file");
    h = decodeZFileHeader(last, name);
    if ((h.flags & (FLAG_HEADER | FLAG_DATA | FLAG_SEALED)) !== (FLAG_DATA | FLAG_SEALED)) {
      throw corrupt(name, "ends with something else than a trailer");
    }
  }
  return yield* readTable(h, end, name);
}

function* readTable(h: ZFileHeader, end: number, name: string): Reads<ZFileIndex> {
  const compression = ALGORITHMS[h.algorithm];
  if (!compression) throw corrupt(name, `is compressed with algorithm ${h.algorithm}; lz4 and zstd are supported`);
  const { blockBytes, blocks, bytes } = h;
  if (blockBytes < 512 || blockBytes > MAX_BLOCK_BYTES || (blockBytes & (blockBytes - 1)) !== 0) {
    throw corrupt(name, `has compressed blocks of ${blockBytes} bytes`);
  }
  if (h.dictBytes !== 0) throw corrupt(name, "needs a dictionary, which is not supported");
  if (!(blocks > 0 && blocks <= MAX_BLOCKS) || Math.ceil(bytes / blockBytes) !== blocks) {
    throw corrupt(name, `has ${blocks} compressed blocks for ${bytes} bytes`);
  }
  if (!(h.indexOffset >= ZFILE_HEADER_BYTES) || h.indexOffset + blocks * 4 > end) {
    throw corrupt(name, "has a jump table outside of the file");
  }
  const base = new Float64Array(new SharedArrayBuffer((Math.floor(blocks / GROUP_BLOCKS) + 1) * 8));
  const delta = new Uint32Array(new SharedArrayBuffer((blocks + 1) * 4));
  const least = h.sums ? SUM_BYTES + 1 : 1;
  const most = storedBound(blockBytes) + (h.sums ? SUM_BYTES : 0);
  let at = ZFILE_HEADER_BYTES;
  let sum = 0;
  const place = (block: number): void => {
    if (block % GROUP_BLOCKS === 0) base[block / GROUP_BLOCKS] = at;
    delta[block] = at - (base[Math.floor(block / GROUP_BLOCKS)] as number);
  };
  for (let done = 0; done < blocks * 4; done += TABLE_STEP_BYTES) {
    const table = yield* wanted(h.indexOffset + done, Math.min(TABLE_STEP_BYTES, blocks * 4 - done));
    sum = rawCrc32c(sum, table);
    for (let i = 0; i < table.length; i += 4) {
      place((done + i) / 4);
      const stored = table.readUInt32LE(i);
      if (stored < least || stored > most) throw corrupt(name, `has a compressed block of ${stored} bytes`);
      at += stored;
    }
  }
  place(blocks);
  if ((h.flags & FLAG_SUMS) !== 0 && sum !== h.indexSum) throw corrupt(name, "has a jump table with a wrong sum");
  if (at > h.indexOffset) throw corrupt(name, "has compressed blocks behind its jump table");
  return { compression, blockBytes, sums: h.sums, bytes, blocks, base, delta };
}

/** Byte of the file at which a block is stored; for the number of blocks, where the last ends. */
export function blockAt(z: ZFileIndex, block: number): number {
  return (z.base[Math.floor(block / GROUP_BLOCKS)] as number) + (z.delta[block] as number);
}

/** Where the blocks `from` to `to` (exclusive) are stored. */
export function storedRange(z: ZFileIndex, from: number, to: number): Wanted {
  const position = blockAt(z, from);
  return { position, length: blockAt(z, to) - position };
}

/**
 * The content of one block of those stored in `b` behind `LENGTH_BYTES` free bytes, the first of them being `first`.
 * Blocks must be taken in order: the end of each is overwritten by the next. Throws CORRUPT.
 */
export function blockContent(z: ZFileIndex, b: Buffer, first: number, block: number, name: string): Buffer {
  const start = blockAt(z, first);
  const from = LENGTH_BYTES + blockAt(z, block) - start;
  const end = LENGTH_BYTES + blockAt(z, block + 1) - start;
  const to = z.sums ? end - SUM_BYTES : end;
  if (z.sums && rawCrc32c(BLOCK_SEED, b.subarray(from, to)) !== b.readUInt32LE(to)) {
    throw corrupt(name, `has a compressed block with a wrong sum at byte ${blockAt(z, block)}`);
  }
  const length = Math.min(z.blockBytes, z.bytes - block * z.blockBytes);
  const content = decompressBlock(z.compression, b, from, to, length);
  if (!content) throw corrupt(name, `has a compressed block that cannot be read at byte ${blockAt(z, block)}`);
  return content;
}

/** The parser sees the content of the compressed file. */
export function* readsThrough<T>(parser: Reads<T>, z: ZFileIndex, name: string): Reads<T> {
  let step = parser.next();
  while (!step.done) {
    const { position, length } = step.value;
    if (position + length > z.bytes) throw corrupt(name, `ends at byte ${z.bytes}, in the middle of its data`);
    const from = Math.floor(position / z.blockBytes);
    const to = Math.ceil((position + length) / z.blockBytes);
    const range = storedRange(z, from, to);
    const stored = Buffer.concat([Buffer.alloc(LENGTH_BYTES), yield* wanted(range.position, range.length)]);
    const parts: Buffer[] = [];
    for (let block = from; block < to; block++) parts.push(blockContent(z, stored, from, block, name));
    const skip = position - from * z.blockBytes;
    step = parser.next(Buffer.concat(parts).subarray(skip, skip + length));
  }
  return step.value;
}

export interface ZFileOptions {
  compression: Compression;
  /** A power of two, 4096 (the default) to 32768. */
  blockBytes?: number;
}

/** Compresses what is written, block by block; `finish` completes the file. */
export class ZFileWriter implements Sink {
  readonly #sink: Sink;
  readonly #compression: Compression;
  readonly #blockBytes: number;
  readonly #block: Buffer;
  #filled = 0;
  #bytes = 0;
  #stored = ZFILE_HEADER_BYTES;
  #table = Buffer.alloc(4096);
  #blocks = 0;
  #started = false;

  constructor(sink: Sink, { compression, blockBytes = DEFAULT_BLOCK_BYTES }: ZFileOptions) {
    if (blockBytes < 4096 || blockBytes > MAX_WRITTEN_BLOCK_BYTES || (blockBytes & (blockBytes - 1)) !== 0) {
      throw new RangeError(`compressed blocks cannot have ${blockBytes} bytes`);
    }
    this.#sink = sink;
    this.#compression = compression;
    this.#blockBytes = blockBytes;
    this.#block = Buffer.alloc(blockBytes);
  }

  async write(data: Buffer): Promise<void> {
    await this.#start();
    const out: Buffer[] = [];
    for (let at = 0; at < data.length; ) {
      const take = Math.min(data.length - at, this.#blockBytes - this.#filled);
      data.copy(this.#block, this.#filled, at, at + take);
      this.#filled += take;
      at += take;
      if (this.#filled === this.#blockBytes) this.#endBlock(out);
    }
    this.#bytes += data.length;
    if (out.length > 0) await this.#sink.write(Buffer.concat(out));
  }

  /** Returns the size of the file. */
  async finish(): Promise<number> {
    await this.#start();
    const out: Buffer[] = [];
    if (this.#filled > 0) this.#endBlock(out);
    if (this.#blocks === 0) throw new RangeError("a compressed file cannot be empty");
    const table = this.#table.subarray(0, this.#blocks * 4);
    const header = this.#header({
      flags: FLAGS.trailer,
      indexOffset: this.#stored,
      blocks: this.#blocks,
      bytes: this.#bytes,
      indexSum: rawCrc32c(0, table),
    });
    await this.#sink.write(Buffer.concat([...out, table, encodeZFileHeader(header)]));
    await this.#sink.rewriteStart?.(encodeZFileHeader({ ...header, flags: FLAGS.header | FLAG_OVERWRITTEN }));
    return this.#stored + table.length + ZFILE_HEADER_BYTES;
  }

  #header(fields: Pick<ZFileHeader, "flags" | "indexOffset" | "blocks" | "bytes" | "indexSum">): ZFileHeader {
    const algorithm = ALGORITHMS.indexOf(this.#compression);
    return { ...fields, blockBytes: this.#blockBytes, algorithm, dictBytes: 0, sums: true };
  }

  async #start(): Promise<void> {
    if (this.#started) return;
    this.#started = true;
    const empty = { flags: FLAGS.header, indexOffset: 0, blocks: 0, bytes: 0, indexSum: 0 };
    await this.#sink.write(encodeZFileHeader(this.#header(empty)));
  }

  #endBlock(out: Buffer[]): void {
    const stored = compressBlock(this.#compression, this.#block.subarray(0, this.#filled));
    const sum = Buffer.alloc(SUM_BYTES);
    sum.writeUInt32LE(rawCrc32c(BLOCK_SEED, stored));
    out.push(stored, sum);
    if (this.#table.length < (this.#blocks + 1) * 4) {
      this.#table = Buffer.concat([this.#table, Buffer.alloc(this.#table.length)]);
    }
    const length = stored.length + SUM_BYTES;
    this.#table.writeUInt32LE(length, this.#blocks++ * 4);
    this.#stored += length;
    this.#filled = 0;
  }
}
