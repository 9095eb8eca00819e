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
  readonly #stored: Source;
  readonly #index: ZFileIndex;
  readonly #key = files++ * KEYS_PER_FILE;

  constructor(stored: Source, index: ZFileIndex) {
    this.path = stored.path;
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

  read(into: Buffer, at: number, length: number, position: number): void {
    const z = this.#index;
    const end = position + length;
    const last = Math.ceil(end / z.blockBytes);
    let block = Math.floor(position / z.blockBytes);
    while (block < last) {
      const held = cache.get(this.#key + block);
      if (held) this.#copy(held, block++, into, at, position, end);
      else block = this.#decompress(block, last, into, at, position, end);
    }
  }

  /** Decompresses from `first` on, up to a block that is held already; returns the next block. */
  #decompress(first: number, last: number, into: Buffer, at: number, position: number, end: number): number {
    const z = this.#index;
    const most = Math.min(last, first + Math.max(1, STEP_BYTES / z.blockBytes));
    let to = first + 1;
    while (to < most && !cache.get(this.#key + to)) to++;
    const range = storedRange(z, first, to);
    if (scratch.length < LENGTH_BYTES + range.length)
      scratch = Buffer.allocUnsafeSlow(2 * (LENGTH_BYTES + range.length));
    this.#stored.read(scratch, LENGTH_BYTES, range.length, range.position);
    for (let block = first; block < to; block++) {
      const content = blockContent(z, scratch, first, block, this.path);
      this.#copy(content, block, into, at, position, end);
      // Kept is what only a part was wanted of: the rest comes next, while whole blocks come one after the other.
      const start = block * z.blockBytes;
      if (start < position || start + content.length > end) cache.put(this.#key + block, content);
    }
    return to;
  }

  /** What of a block lies in the range from `position` to `end`. */
  #copy(content: Buffer, block: number, into: Buffer, at: number, position: number, end: number): void {
    const start = block * this.#index.blockBytes;
    const from = Math.max(position, start);
    content.copy(into, at + from - position, from - start, Math.min(end, start + content.length) - start);
  }

  #range(position: number, length: number): { position: number; length: number } {
    const { blockBytes } = this.#index;
    return storedRange(this.#index, Math.floor(position / blockBytes), Math.ceil((position + length) / blockBytes));
  }
}
