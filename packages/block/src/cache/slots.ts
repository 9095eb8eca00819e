/** The part of the cache of remote blobs that threads share: which piece of which blob is in which slot of one file. */
import { readSync } from "node:fs";
import type { Source } from "../source.ts";

export const SLOT_BYTES = 1024 * 1024;

/** Can be sent to another thread; the arrays are over shared memory. */
export interface SharedSlots {
  fd: number;
  /** Grows before a slot gets other content. */
  generation: Int32Array;
  /** When it was used last, by `useClock`. */
  used: Uint32Array;
}

export interface SharedBlob {
  /** For messages. */
  name: string;
  /** The owner's number of it. */
  blob: number;
  bytes: number;
  /** Slot of each piece plus one; 0 for a piece that is not here. */
  slots: Int32Array;
}

/** Milliseconds, as far as 32 bits go: the order of uses within weeks. */
export function useClock(): number {
  return Math.floor(performance.timeOrigin + performance.now()) >>> 0;
}

/** Asks the owner of the cache to bring pieces in, and holds them there until the returned function is called. */
export type LoadPieces = (blob: number, from: number, to: number) => Promise<() => void>;

/** Loaded and held by one caller at a time: a long read takes turns with others in a small cache. */
export const MOST_PIECES = 4;

/** A blob of a store, read through the cache. */
export class CachedSource implements Source {
  readonly path: string;
  readonly local = false;
  readonly #blob: SharedBlob;
  readonly #shared: SharedSlots;
  readonly #load: LoadPieces;

  constructor(shared: SharedSlots, blob: SharedBlob, load: LoadPieces) {
    this.path = blob.name;
    this.#shared = shared;
    this.#blob = blob;
    this.#load = load;
  }

  isWarm(position: number, length: number): boolean {
    const last = Math.floor((position + length - 1) / SLOT_BYTES);
    for (let p = Math.floor(position / SLOT_BYTES); p <= last; p++) {
      if (Atomics.load(this.#blob.slots, p) === 0) return false;
    }
    return true;
  }

  read(into: Buffer, at: number, length: number, position: number): boolean {
    for (let done = 0; done < length; ) {
      const piece = Math.floor((position + done) / SLOT_BYTES);
      const inside = position + done - piece * SLOT_BYTES;
      const n = Math.min(SLOT_BYTES - inside, length - done);
      if (!this.#readPiece(piece, inside, into, at + done, n)) return false;
      done += n;
    }
    return true;
  }

  async load(position: number, length: number): Promise<void> {
    await this.#each(position, length, () => {});
  }

  async fetch(into: Buffer, at: number, length: number, position: number): Promise<void> {
    if (this.read(into, at, length, position)) return;
    await this.#each(position, length, (from, n) => {
      if (!this.read(into, at + from - position, n, from)) throw new Error(`a held piece of ${this.path} was lost`);
    });
  }

  /** Calls `fn` for parts of the range while they are held. */
  async #each(position: number, length: number, fn: (from: number, n: number) => void): Promise<void> {
    const end = position + length;
    for (let from = position; from < end; ) {
      const first = Math.floor(from / SLOT_BYTES);
      const last = Math.min(first + MOST_PIECES, Math.ceil(end / SLOT_BYTES));
      const release = await this.#load(this.#blob.blob, first, last);
      const to = Math.min(end, last * SLOT_BYTES);
      try {
        fn(from, to - from);
      } finally {
        release();
      }
      from = to;
    }
  }

  /** False when the slot got other content before or while it was read. */
  #readPiece(piece: number, inside: number, into: Buffer, at: number, length: number): boolean {
    const { fd, generation, used } = this.#shared;
    const { slots } = this.#blob;
    const slot = Atomics.load(slots, piece) - 1;
    if (slot < 0) return false;
    const before = Atomics.load(generation, slot);
    if (Atomics.load(slots, piece) !== slot + 1) return false;
    for (let done = 0; done < length; ) {
      const n = readSync(fd, into, at + done, length - done, slot * SLOT_BYTES + inside + done);
      if (n === 0) return false;
      done += n;
    }
    used[slot] = useClock();
    return Atomics.load(generation, slot) === before && Atomics.load(slots, piece) === slot + 1;
  }
}
