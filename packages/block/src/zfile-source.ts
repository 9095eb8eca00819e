import type { Source } from "./source.ts";
import { blockContent, storedRange, type ZFileIndex } from "./zfile.ts";
import { LENGTH_BYTES } from "./zfile-codec.ts";

/** Content that was decompressed, for all files of this thread. */
const CACHE_BYTES = 16 * 1024 * 1024;
/** Decompressed from one read of the file. */
const STEP_BYTES = 256 * 1024;

/** The newest blocks, bounded by their bytes. A key is a file's number and a block's. */
class ContentCache {
  readonly #blocks = new Map<number, Buffer>();
  #bytes = 0;

  get(key: number): Buffer | undefined {
    return this.#blocks.get(key);
  }

  put(key: number, content: Buffer): void {
    if (this.#blocks.has(key)) return;
    this.#blocks.set(key, content);
    this.#bytes += content.length;
    for (const [oldest, b] of this.#blocks) {
      if (this.#bytes <= CACHE_BYTES) break;
      this.#blocks.delete(oldest);
      this.#bytes -= b.length;
    }
  }
}

const cache = new ContentCache();
/** Blocks of one file are fewer. */
const KEYS_PER_FILE = 2 ** 27;
let files = 0;
let scratch = Buffer.alloc(0);

/** The content of a ZFile. Positions are those of the content. */
export class ZFileSource implements Source {
  readonly path: string;
  readonly local: boolean;
  readonly #stored: Source;
  readonly #index: ZFileIndex;
  readonly #key = files++ * KEYS_PER_FILE;

  constructor(stored: Source, index: ZFileIndex) {
    this.path = stored.path;
    this.local = stored.local;
    this.#stored = stored;
    this.#index = index;
  }

  isWarm(position: number, length: number): boolean {
    const range = this.#range(position, length);
    return this.#stored.isWarm(range.position, range.length);
  }

  async load(position: number, length: number): Promise<void> {
    const range = this.#range(position, length);
    await this.#stored.load(range.position, range.length);
  }

  read(into: Buffer, at: number, length: number, position: number): boolean {
    const part = new Part(into, at, position, length);
    const z = this.#index;
    const last = Math.ceil(part.end / z.blockBytes);
    let block = Math.floor(position / z.blockBytes);
    while (block < last) {
      const held = cache.get(this.#key + block);
      if (held) part.copy(held, block++ * z.blockBytes);
      else {
        const to = this.#runEnd(block, last);
        const range = storedRange(z, block, to);
        if (scratch.length < LENGTH_BYTES + range.length) {
          scratch = Buffer.allocUnsafeSlow(2 * (LENGTH_BYTES + range.length));
        }
        if (!this.#stored.read(scratch, LENGTH_BYTES, range.length, range.position)) return false;
        this.#decompress(scratch, block, to, part);
        block = to;
      }
    }
    return true;
  }

  async fetch(into: Buffer, at: number, length: number, position: number): Promise<void> {
    const part = new Part(into, at, position, length);
    const z = this.#index;
    const last = Math.ceil(part.end / z.blockBytes);
    for (let block = Math.floor(position / z.blockBytes); block < last; ) {
      const to = Math.min(last, block + Math.max(1, STEP_BYTES / z.blockBytes));
      const range = storedRange(z, block, to);
      const stored = Buffer.allocUnsafeSlow(LENGTH_BYTES + range.length);
      await this.#stored.fetch(stored, LENGTH_BYTES, range.length, range.position);
      this.#decompress(stored, block, to, part);
      block = to;
    }
  }

  /** End of the blocks that are not held already and that one read of the file gives. */
  #runEnd(first: number, last: number): number {
    const most = Math.min(last, first + Math.max(1, STEP_BYTES / this.#index.blockBytes));
    let to = first + 1;
    while (to < most && !cache.get(this.#key + to)) to++;
    return to;
  }

  #decompress(stored: Buffer, first: number, to: number, part: Part): void {
    const { blockBytes } = this.#index;
    for (let block = first; block < to; block++) {
      const content = blockContent(this.#index, stored, first, block, this.path);
      // Kept is what only a part was wanted of: the rest comes next, while whole blocks come one after the other.
      if (!part.copy(content, block * blockBytes)) cache.put(this.#key + block, content);
    }
  }

  #range(position: number, length: number): { position: number; length: number } {
    const { blockBytes } = this.#index;
    return storedRange(this.#index, Math.floor(position / blockBytes), Math.ceil((position + length) / blockBytes));
  }
}

/** Where what is read goes. */
class Part {
  readonly end: number;
  readonly #into: Buffer;
  readonly #at: number;
  readonly #position: number;

  constructor(into: Buffer, at: number, position: number, length: number) {
    this.#into = into;
    this.#at = at;
    this.#position = position;
    this.end = position + length;
  }

  /** Takes what lies in the range of the content that starts at `start`. False when that is not all of it. */
  copy(content: Buffer, start: number): boolean {
    const from = Math.max(this.#position, start);
    const to = Math.min(this.end, start + content.length);
    content.copy(this.#into, this.#at + from - this.#position, from - start, to - start);
    return to - from === content.length;
  }
}
