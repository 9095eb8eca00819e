import type { Clock } from "@aenv/base";

/** A wall clock that is stepped is noticed after at most so long. */
const MAX_WAIT_MS = 1000 * 60;

interface Entry<K> {
  key: K;
  at: number;
}

/**
 * Calls `fire` once for each key at its time (wall clock, milliseconds), with one timer for all: a binary heap in which a
 * changed or removed key leaves a stale entry behind, known by its time.
 */
export class Deadlines<K> {
  readonly #clock: Clock;
  readonly #fire: (key: K) => void;
  readonly #at = new Map<K, number>();
  #heap: Entry<K>[] = [];
  #cancel: (() => void) | undefined;
  #armedFor = Number.POSITIVE_INFINITY;
  #closed = false;

  constructor(clock: Clock, fire: (key: K) => void) {
    this.#clock = clock;
    this.#fire = fire;
  }

  get size(): number {
    return this.#at.size;
  }

  set(key: K, at: number): void {
    if (this.#closed) return;
    this.#at.set(key, at);
    // Many extensions of few keys must not grow the heap without end.
    if (this.#heap.length > 64 + 4 * this.#at.size) this.#rebuild();
    else this.#push({ key, at });
    this.#arm();
  }

  delete(key: K): void {
    this.#at.delete(key);
  }

  close(): void {
    this.#closed = true;
    this.#cancel?.();
    this.#at.clear();
    this.#heap = [];
  }

  #arm(): void {
    const first = this.#heap[0];
    if (!first || first.at >= this.#armedFor) return;
    this.#cancel?.();
    const now = this.#clock.now();
    const wait = Math.min(Math.max(0, first.at - now), MAX_WAIT_MS);
    this.#armedFor = now + wait;
    this.#cancel = this.#clock.after(wait, () => this.#run());
  }

  #run(): void {
    this.#armedFor = Number.POSITIVE_INFINITY;
    const now = this.#clock.now();
    for (let first = this.#heap[0]; first && first.at <= now; first = this.#heap[0]) {
      this.#pop();
      if (this.#at.get(first.key) !== first.at) continue;
      this.#at.delete(first.key);
      this.#fire(first.key);
    }
    if (!this.#closed) this.#arm();
  }

  #rebuild(): void {
    this.#heap = [];
    for (const [key, at] of this.#at) this.#push({ key, at });
  }

  #push(entry: Entry<K>): void {
    const heap = this.#heap;
    let at = heap.push(entry) - 1;
    while (at > 0) {
      const up = (at - 1) >> 1;
      const parent = heap[up];
      if (!parent || parent.at <= entry.at) break;
      heap[at] = parent;
      at = up;
    }
    heap[at] = entry;
  }

  #pop(): void {
    const heap = this.#heap;
    const last = heap.pop();
    if (!last || heap.length === 0) return;
    let at = 0;
    for (;;) {
      let down = 2 * at + 1;
      const left = heap[down];
      const right = heap[down + 1];
      if (!left) break;
      const child = right && right.at < left.at ? right : left;
      if (child === right) down++;
      if (child.at >= last.at) break;
      heap[at] = child;
      at = down;
    }
    heap[at] = last;
  }
}
