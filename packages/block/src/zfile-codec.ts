/** What ZFile compresses and checks its blocks with. */
import { zstdCompressSync, zstdDecompressSync } from "node:zlib";
import { crc32c } from "@node-rs/crc32";
import { compressSync, uncompressSync } from "lz4-napi";

export type Compression = "lz4" | "zstd";

/** The sum of a block starts from here. */
export const BLOCK_SEED = 100_007;
/** The library puts the length of the content, 32 bits, before the bare LZ4 block. */
export const LENGTH_BYTES = 4;

/** CRC-32C without the inversion at its start and end. */
export function rawCrc32c(seed: number, data: Uint8Array): number {
  return ~crc32c(data, ~seed >>> 0) >>> 0;
}

/** At most so many stored bytes come of a block, its sum not counted: the bounds of both codecs, generously. */
export function storedBound(blockBytes: number): number {
  return blockBytes + Math.ceil(blockBytes / 128) + 512;
}

export function compressBlock(compression: Compression, data: Buffer): Buffer {
  return compression === "lz4" ? compressSync(data).subarray(LENGTH_BYTES) : zstdCompressSync(data);
}

/**
 * The content of the block at `from` of `b`, exactly `length` bytes, or undefined when it is not that. Overwrites the
 * four bytes of `b` before the block. Takes no more memory than `length` asks for.
 */
export function decompressBlock(
  compression: Compression,
  b: Buffer,
  from: number,
  to: number,
  length: number,
): Buffer | undefined {
  let content: Buffer;
  try {
    if (compression === "zstd") content = zstdDecompressSync(b.subarray(from, to), { maxOutputLength: length });
    else {
      b.writeUInt32LE(length, from - LENGTH_BYTES);
      content = uncompressSync(b.subarray(from - LENGTH_BYTES, to));
    }
  } catch {
    return undefined;
  }
  return content.length === length ? content : undefined;
}
