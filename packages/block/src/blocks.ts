import { AenvError } from "@aenv/base";

/** The upper maps whole blocks of this size; smaller writes to a block it does not hold yet copy the block up first. */
export const BLOCK_BYTES = 4096;
export const BLOCK_SECTORS = 8;
const CHUNK_BLOCKS = 1024;
/** Disks are smaller: places are 31 bits of blocks. */
const MAX_BLOCKS = 2 ** 31;

/** What the upper says of a block: nothing. */
export const UNMAPPED = 0;
/** Bit 0 of a value: reads as zeros. The other bits are the block's place in the data file, 0 for none. */
export const ZERO_BIT = 1;

/**
 * Block -> place in the upper's data file, as a table of chunks that cover 4 MiB each and exist once touched. A block
 * keeps its place for the life of the upper, also while it is zeroed, so the file never outgrows the disk.
 */
export class BlockTable {
  readonly blocks: number;
  readonly #chunks: (Uint32Array | undefined)[];
  #mapped = 0;

  constructor(blocks: number) {
    if (blocks >= MAX_BLOCKS) throw new AenvError("INVALID_ARGUMENT", `a disk of ${blocks} blocks is too large`);
    this.blocks = blocks;
    this.#chunks = Array.from({ length: Math.ceil(blocks / CHUNK_BLOCKS) }, () => undefined);
  }

  /** Number of blocks with a value. */
  get mapped(): number {
    return this.#mapped;
  }

  get(block: number): number {
    return this.#chunks[Math.floor(block / CHUNK_BLOCKS)]?.[block % CHUNK_BLOCKS] ?? UNMAPPED;
  }

  set(block: number, value: number): void {
    const at = Math.floor(block / CHUNK_BLOCKS);
    let chunk = this.#chunks[at];
    if (!chunk) {
      chunk = new Uint32Array(CHUNK_BLOCKS);
      this.#chunks[at] = chunk;
    }
    if (chunk[block % CHUNK_BLOCKS] === UNMAPPED) this.#mapped++;
    chunk[block % CHUNK_BLOCKS] = value;
  }

  /** First block at or behind `from` and below `to` that may be mapped: whole untouched chunks are passed over. */
  skipUntouched(from: number, to: number): number {
    let block = from;
    while (block < to && !this.#chunks[Math.floor(block / CHUNK_BLOCKS)]) {
      block = (Math.floor(block / CHUNK_BLOCKS) + 1) * CHUNK_BLOCKS;
    }
    return Math.min(block, to);
  }

  /**
   * Calls `fn` for every run of mapped blocks, in order: equal kind, and for data and for zeroed blocks with a place,
   * places that follow each other.
   */
  runs(fn: (block: number, count: number, value: number) => void): void {
    let start = 0;
    let count = 0;
    let first = UNMAPPED;
    // What the next block has if it goes on with the run: `follower` step by step, as a scan of a full table is hot.
    let next = UNMAPPED;
    let step = 0;
    for (let c = 0; c < this.#chunks.length; c++) {
      const chunk = this.#chunks[c];
      if (!chunk) {
        if (count > 0) fn(start, count, first);
        count = 0;
        continue;
      }
      for (let i = 0; i < CHUNK_BLOCKS; i++) {
        const value = chunk[i] as number;
        if (count > 0) {
          if (value === next) {
            count++;
            next += step;
            continue;
          }
          fn(start, count, first);
          count = 0;
        }
        if (value === UNMAPPED) continue;
        start = c * CHUNK_BLOCKS + i;
        first = value;
        step = follower(value, 1) - value;
        next = value + step;
        count = 1;
      }
    }
    if (count > 0) fn(start, count, first);
  }
}

/** Value of the `n`th block of a run that starts with `first`. */
export function follower(first: number, n: number): number {
  return first === ZERO_BIT ? ZERO_BIT : first + n * 2;
}
