import {
  CHUNK,
  CHUNK_HEADER_BYTES,
  ERRNO,
  type Errno,
  REPLY_FLAG_DONE,
  SIMPLE_REPLY_BYTES,
  SIMPLE_REPLY_MAGIC,
  STATE_HOLE,
  STATE_ZERO,
  STRUCTURED_REPLY_MAGIC,
} from "./protocol.ts";
import type { Extent } from "./target.ts";

/** magic u32 | error u32 | cookie u64 */
export function putSimpleReply(b: Buffer, at: number, high: number, low: number, error: number): number {
  b.writeUInt32BE(SIMPLE_REPLY_MAGIC, at);
  b.writeUInt32BE(error, at + 4);
  b.writeUInt32BE(high, at + 8);
  b.writeUInt32BE(low, at + 12);
  return at + SIMPLE_REPLY_BYTES;
}

/** magic u32 | flags u16 | type u16 | cookie u64 | length u32. Every reply of ours is one chunk, so DONE is always set. */
export function putChunkHeader(b: Buffer, at: number, type: number, high: number, low: number, length: number): number {
  b.writeUInt32BE(STRUCTURED_REPLY_MAGIC, at);
  b.writeUInt16BE(REPLY_FLAG_DONE, at + 4);
  b.writeUInt16BE(type, at + 6);
  b.writeUInt32BE(high, at + 8);
  b.writeUInt32BE(low, at + 12);
  b.writeUInt32BE(length, at + 16);
  return at + CHUNK_HEADER_BYTES;
}

export const HOLE_CHUNK_BYTES = CHUNK_HEADER_BYTES + 12;
/** A range that reads as zeros, without sending the zeros: offset u64 | length u32. */
export function putHoleChunk(b: Buffer, at: number, high: number, low: number, offset: number, length: number): number {
  const body = putChunkHeader(b, at, CHUNK.OFFSET_HOLE, high, low, 12);
  putU64(b, body, offset);
  b.writeUInt32BE(length, body + 8);
  return body + 12;
}

export const ERROR_CHUNK_BYTES = CHUNK_HEADER_BYTES + 6;
/** error u32 | message length u16 (we send none: the log has the details) */
export function putErrorChunk(b: Buffer, at: number, high: number, low: number, errno: Errno): number {
  const body = putChunkHeader(b, at, CHUNK.ERROR, high, low, 6);
  b.writeUInt32BE(ERRNO[errno], body);
  b.writeUInt16BE(0, body + 4);
  return body + 6;
}

export const statusChunkBytes = (extents: number): number => CHUNK_HEADER_BYTES + 4 + extents * 8;
/** context id u32 | extents: length u32 + flags u32 each */
export function putStatusChunk(
  b: Buffer,
  at: number,
  high: number,
  low: number,
  context: number,
  extents: readonly Extent[],
): number {
  let p = putChunkHeader(b, at, CHUNK.BLOCK_STATUS, high, low, 4 + extents.length * 8);
  b.writeUInt32BE(context, p);
  p += 4;
  for (const e of extents) {
    b.writeUInt32BE(e.length, p);
    b.writeUInt32BE((e.hole ? STATE_HOLE : 0) | (e.zero ? STATE_ZERO : 0), p + 4);
    p += 8;
  }
  return p;
}

export function putU64(b: Buffer, at: number, value: number): void {
  b.writeUInt32BE(Math.floor(value / 0x100000000), at);
  b.writeUInt32BE(value % 0x100000000, at + 4);
}
