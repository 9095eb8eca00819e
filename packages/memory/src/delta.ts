import { PAGE_BYTES, type PageData } from "./guest-memory.ts";

const ZERO_PAGE = Buffer.alloc(PAGE_BYTES);

/** A piece of guest memory that differs from the parent's: its content, or zeros where `data` is absent. */
export interface DeltaPiece {
  offset: number;
  length: number;
  data: Buffer | undefined;
}

/** Holds a parent's content for the length of one call: fresh memory for each would cost more than the comparison. */
let scratch = Buffer.alloc(0);

/** The parent's content of `[offset, offset + length)` into `into`. */
export type ReadParent = (offset: number, into: Buffer) => void;

export const isZeroPage = (data: Buffer, at: number): boolean =>
  data.compare(ZERO_PAGE, 0, PAGE_BYTES, at, at + PAGE_BYTES) === 0;

/**
 * What of a piece must be stored: pages equal to the parent's are dropped, pages of zeros become holes.
 * Neighbours of one kind are merged; `data` of the result are views of the piece's buffer.
 */
export function narrow(piece: PageData, readParent: ReadParent): DeltaPiece[] {
  if (scratch.length < piece.length) scratch = Buffer.allocUnsafeSlow(piece.length);
  const parent = scratch.subarray(0, piece.length);
  readParent(piece.offset, parent);
  const out: DeltaPiece[] = [];
  for (let at = 0; at < piece.length; at += PAGE_BYTES) {
    const end = at + PAGE_BYTES;
    if (piece.data.compare(parent, at, end, at, end) === 0) continue;
    const zero = isZeroPage(piece.data, at);
    const last = out.at(-1);
    const offset = piece.offset + at;
    if (last && last.offset + last.length === offset && (last.data === undefined) === zero) {
      last.length += PAGE_BYTES;
      if (!zero) last.data = piece.data.subarray(last.offset - piece.offset, end);
    } else out.push({ offset, length: PAGE_BYTES, data: zero ? undefined : piece.data.subarray(at, end) });
  }
  return out;
}
