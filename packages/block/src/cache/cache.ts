import { createHash } from "node:crypto";
import { AenvError, deadline, Semaphore } from "@aenv/base";
import type { BlobStore } from "../store/port.ts";
import { type SlotEntry, SlotFile } from "./slot-file.ts";
import { MOST_PIECES, type SharedBlob, type SharedSlots, SLOT_BYTES, useClock } from "./slots.ts";

/** Of the slots, one in so many callers loads at a time: all of them together cannot hold every slot. */
const SLOTS_PER_LOAD = 2 * MOST_PIECES;
const PARALLEL_REQUESTS = 8;
/** When no slot is free, so large a part is made free at once. */
const EVICT_PART = 1 / 16;
const MIN_SLOTS = 16;
const LOAD_MS = 30_000;

export interface RemoteBlob {
  store: BlobStore;
  key: string;
  /** Hexadecimal: what the cache knows the content by. */
  sha256: string;
  bytes: number;
  /** SHA-256 of each piece of `SLOT_BYTES`, hexadecimal: what the store gives is checked against it. */
  pieces: readonly string[];
}

export interface CacheOptions {
  dir: string;
  /** Bound of the contents on disk; at least 16 MiB. */
  bytes: number;
  /** Milliseconds that a reader waits for the store. */
  loadMs?: number;
}

export interface CacheStats {
  slots: number;
  usedSlots: number;
  hits: number;
  fetchedBytes: number;
  requests: number;
  evicted: number;
}

interface Attached {
  remote: RemoteBlob;
  shared: SharedBlob;
  users: number;
  /** Pieces in the order in which they were wanted first. */
  wanted: Set<number>;
}

interface Slot {
  entry: { sha256: string; piece: number } | undefined;
  /** Of an earlier process: its content is checked before it is used. */
  unchecked: SlotEntry | undefined;
  pins: number;
}

/**
 * Pieces of blobs of stores, in one file of bounded size. One thread owns it and brings pieces in; any thread reads what
 * is there (`CachedSource`). What is held or being read is never evicted; of the rest the longest unused goes first.
 */
export class BlobCache implements Disposable {
  readonly shared: SharedSlots;
  readonly #file: SlotFile;
  readonly #slots: Slot[];
  readonly #free: number[] = [];
  /** By content: slot of each piece. */
  readonly #where = new Map<string, number>();
  readonly #blobs = new Map<number, Attached>();
  readonly #bySha = new Map<string, number>();
  readonly #loading = new Map<string, Promise<void>>();
  readonly #requests = new Semaphore(PARALLEL_REQUESTS);
  readonly #admission: Semaphore;
  readonly #loadMs: number;
  readonly #freed: (() => void)[] = [];
  #nextBlob = 1;
  readonly stats: CacheStats;

  constructor({ dir, bytes, loadMs = LOAD_MS }: CacheOptions) {
    const count = Math.max(MIN_SLOTS, Math.floor(bytes / SLOT_BYTES));
    this.#loadMs = loadMs;
    this.#admission = new Semaphore(Math.floor(count / SLOTS_PER_LOAD));
    this.#file = new SlotFile(dir, count);
    this.shared = {
      fd: this.#file.fd,
      generation: new Int32Array(new SharedArrayBuffer(count * 4)),
      used: new Uint32Array(new SharedArrayBuffer(count * 4)),
    };
    this.stats = { slots: count, usedSlots: 0, hits: 0, fetchedBytes: 0, requests: 0, evicted: 0 };
    this.#slots = this.#file.entries().map((entry, slot) => {
      const known = entry && !this.#where.has(pieceKey(entry.sha256, entry.piece));
      if (known) this.#where.set(pieceKey(entry.sha256, entry.piece), slot);
      else this.#free.push(slot);
      return { entry: known ? entry : undefined, unchecked: known ? entry : undefined, pins: 0 };
    });
    this.stats.usedSlots = count - this.#free.length;
  }

  /** From now on the blob's pieces can be loaded. Each needs one `detach`. */
  attach(remote: RemoteBlob): SharedBlob {
    const pieces = Math.ceil(remote.bytes / SLOT_BYTES);
    if (remote.pieces.length !== pieces) {
      throw new AenvError("CORRUPT", `${remote.key} has ${remote.pieces.length} sums for ${pieces} pieces`);
    }
    const known = this.#blobs.get(this.#bySha.get(remote.sha256) ?? 0);
    if (known) {
      known.users++;
      return known.shared;
    }
    const blob = this.#nextBlob++;
    const slots = new Int32Array(new SharedArrayBuffer(pieces * 4));
    const name = `${remote.key} in ${remote.store.name}`;
    const shared: SharedBlob = { name, blob, bytes: remote.bytes, slots };
    this.#blobs.set(blob, { remote, shared, users: 1, wanted: new Set() });
    this.#bySha.set(remote.sha256, blob);
    // What is here from before is checked when it is wanted first; what this process loaded is known to be right.
    for (let p = 0; p < pieces; p++) {
      const slot = this.#where.get(pieceKey(remote.sha256, p));
      if (slot !== undefined && !this.#slots[slot]?.unchecked) Atomics.store(slots, p, slot + 1);
    }
    return shared;
  }

  /** Its pieces stay as long as there is room. */
  detach(blob: number): void {
    const attached = this.#blobs.get(blob);
    if (!attached || --attached.users > 0) return;
    attached.shared.slots.fill(0);
    this.#blobs.delete(blob);
    this.#bySha.delete(attached.remote.sha256);
  }

  /** Pieces in the order in which they were wanted since `attach`: what to prefetch next time. */
  wanted(blob: number): number[] {
    return [...(this.#blobs.get(blob)?.wanted ?? [])];
  }

  /**
   * Brings the pieces `from` to `to` (exclusive) in and holds them until the returned function is called. UNAVAILABLE or
   * DEADLINE when the store does not give them in time, CORRUPT when it gives something else.
   */
  async load(blob: number, from: number, to: number, parent?: AbortSignal): Promise<() => void> {
    const attached = this.#blobs.get(blob);
    if (!attached) throw new AenvError("NOT_FOUND", `blob ${blob} is not open`);
    if (to - from > MOST_PIECES) throw new RangeError(`${to - from} pieces at once`);
    const signal = deadline(this.#loadMs, parent);
    const held: number[] = [];
    let admitted: Disposable | undefined;
    const release = (): void => {
      for (const slot of held.splice(0)) this.#unpin(slot);
      admitted?.[Symbol.dispose]();
    };
    try {
      admitted = await this.#admission.acquire(signal);
      for (let p = from; p < to; p++) attached.wanted.add(p);
      await this.#start(attached, from, to, signal);
      for (let p = from; p < to; p++) held.push(await this.#hold(attached, p, signal));
      return release;
    } catch (e) {
      release();
      const error = AenvError.from(e, `reading ${attached.shared.name}`);
      if (error.code !== "DEADLINE" && error.code !== "CANCELLED") throw error;
      if (parent?.aborted === true) throw error;
      throw new AenvError("DEADLINE", `${attached.shared.name} was not read within ${this.#loadMs} ms`, {
        cause: e,
        hint: "Check the object store and the network to it.",
      });
    }
  }

  /** Brings pieces in that will be wanted, as far as there is room; never fails. */
  async prefetch(blob: number, pieces: readonly number[], signal?: AbortSignal): Promise<number> {
    const attached = this.#blobs.get(blob);
    let done = 0;
    for (const p of pieces.slice(0, this.stats.slots >> 1)) {
      if (!attached || signal?.aborted === true || !this.#blobs.has(blob)) break;
      if (!(p >= 0 && p < attached.shared.slots.length)) continue;
      try {
        (await this.load(blob, p, p + 1, signal))();
        done++;
      } catch {
        break;
      }
    }
    return done;
  }

  [Symbol.dispose](): void {
    this.#file[Symbol.dispose]();
  }

  /** Pins the piece; loads it when nobody did. */
  async #hold(attached: Attached, piece: number, signal: AbortSignal): Promise<number> {
    const key = pieceKey(attached.remote.sha256, piece);
    for (;;) {
      signal.throwIfAborted();
      const loading = this.#loading.get(key);
      // Another caller's failure may be its own: it gave up, or its time was over.
      if (loading)
        await raced(
          loading.catch(() => {}),
          signal,
        );
      const slot = Atomics.load(attached.shared.slots, piece) - 1;
      if (slot >= 0) {
        (this.#slots[slot] as Slot).pins++;
        return slot;
      }
      // Evicted again before we held it, or its load failed for someone who gave up earlier.
      if (!this.#loading.has(key)) await this.#start(attached, piece, piece + 1, signal);
    }
  }

  /** Starts loading what of the range is neither here nor being loaded, in runs. Resolves when all of that is here. */
  async #start(attached: Attached, from: number, to: number, signal: AbortSignal): Promise<void> {
    const work: Promise<void>[] = [];
    let run: number[] = [];
    const go = (): void => {
      if (run.length > 0) work.push(this.#track(attached, run, signal));
      run = [];
    };
    for (let p = from; p < to; p++) {
      const here = Atomics.load(attached.shared.slots, p) > 0;
      if (here) this.stats.hits++;
      if (here || this.#loading.has(pieceKey(attached.remote.sha256, p))) go();
      else run.push(p);
    }
    go();
    await Promise.all(work);
  }

  #track(attached: Attached, run: readonly number[], signal: AbortSignal): Promise<void> {
    const work = this.#bring(attached, run, signal).finally(() => {
      for (const p of run) this.#loading.delete(pieceKey(attached.remote.sha256, p));
    });
    work.catch(() => {});
    for (const p of run) this.#loading.set(pieceKey(attached.remote.sha256, p), work);
    return work;
  }

  async #bring(attached: Attached, run: readonly number[], signal: AbortSignal): Promise<void> {
    const missing: number[] = [];
    for (const p of run) if (!(await this.#fromBefore(attached, p))) missing.push(p);
    // What an earlier process left may split the run.
    for (let i = 0; i < missing.length; ) {
      let n = 1;
      while (i + n < missing.length && missing[i + n] === (missing[i] as number) + n) n++;
      await this.#request(attached, missing[i] as number, n, signal);
      i += n;
    }
  }

  /** A piece that an earlier process loaded: checked now, before anyone reads it. */
  async #fromBefore(attached: Attached, piece: number): Promise<boolean> {
    const { sha256 } = attached.remote;
    const at = this.#where.get(pieceKey(sha256, piece));
    const slot = at === undefined ? undefined : this.#slots[at];
    if (at === undefined || !slot) return false;
    if (slot.unchecked) {
      slot.pins++;
      const good = await this.#file.check(at, slot.unchecked).catch(() => false);
      slot.unchecked = undefined;
      this.#unpin(at);
      if (!good) {
        this.#evict(at);
        this.#free.push(at);
        return false;
      }
    }
    this.stats.hits++;
    this.shared.used[at] = useClock();
    Atomics.store(attached.shared.slots, piece, at + 1);
    return true;
  }

  async #request(attached: Attached, first: number, count: number, signal: AbortSignal): Promise<void> {
    const { remote } = attached;
    const from = first * SLOT_BYTES;
    const length = Math.min(remote.bytes - from, count * SLOT_BYTES);
    const data = await this.#requests.run(async () => {
      this.stats.requests++;
      return await raced(remote.store.read(remote.key, from, length, signal), signal);
    }, signal);
    this.stats.fetchedBytes += length;
    for (let i = 0; i < count; i++) {
      const part = data.subarray(i * SLOT_BYTES, Math.min((i + 1) * SLOT_BYTES, length));
      if (createHash("sha256").update(part).digest("hex") !== remote.pieces[first + i]) {
        throw new AenvError(
          "CORRUPT",
          `${attached.shared.name} is not what was published, at byte ${from + i * SLOT_BYTES}`,
          {
            data: { store: remote.store.name, key: remote.key },
            hint: "Delete the object, and publish again what uses it.",
          },
        );
      }
      await this.#store(attached, first + i, part, signal);
    }
  }

  async #store(attached: Attached, piece: number, data: Buffer, signal: AbortSignal): Promise<void> {
    const slot = await this.#slot(signal);
    const state = this.#slots[slot] as Slot;
    // Held until someone may find it, so that nobody takes it meanwhile.
    state.pins++;
    try {
      await this.#file.fill(slot, attached.remote.sha256, piece, data);
    } catch (e) {
      this.#file.clear(slot);
      this.#free.push(slot);
      throw AenvError.from(e, "writing the cache of layers");
    } finally {
      this.#unpin(slot);
    }
    state.entry = { sha256: attached.remote.sha256, piece };
    this.#where.set(pieceKey(attached.remote.sha256, piece), slot);
    this.shared.used[slot] = useClock();
    this.stats.usedSlots++;
    Atomics.store(attached.shared.slots, piece, slot + 1);
  }

  /** A slot that holds nothing. */
  async #slot(signal: AbortSignal): Promise<number> {
    for (;;) {
      const slot = this.#free.pop();
      if (slot !== undefined) return slot;
      if (this.#makeFree() === 0) {
        await raced(new Promise<void>((resolve) => this.#freed.push(resolve)), signal);
      }
    }
  }

  #makeFree(): number {
    const { used } = this.shared;
    const now = useClock();
    const idle = (slot: number): number => (now - (used[slot] as number)) >>> 0;
    const candidates: number[] = [];
    for (let s = 0; s < this.#slots.length; s++) {
      const { entry, pins } = this.#slots[s] as Slot;
      if (entry && pins === 0) candidates.push(s);
    }
    candidates.sort((a, b) => idle(b) - idle(a));
    const many = Math.max(1, Math.floor(this.#slots.length * EVICT_PART));
    for (const slot of candidates.slice(0, many)) {
      this.#evict(slot);
      this.#free.push(slot);
    }
    return Math.min(many, candidates.length);
  }

  /** Nobody finds the slot any more, and who reads it now notices. */
  #evict(slot: number): void {
    const state = this.#slots[slot] as Slot;
    if (!state.entry) return;
    const { sha256, piece } = state.entry;
    const attached = this.#blobs.get(this.#bySha.get(sha256) ?? 0);
    if (attached) Atomics.store(attached.shared.slots, piece, 0);
    Atomics.add(this.shared.generation, slot, 1);
    this.#where.delete(pieceKey(sha256, piece));
    this.#file.clear(slot);
    state.entry = undefined;
    state.unchecked = undefined;
    this.stats.usedSlots--;
    this.stats.evicted++;
  }

  #unpin(slot: number): void {
    const state = this.#slots[slot] as Slot;
    if (--state.pins > 0) return;
    for (const wake of this.#freed.splice(0)) wake();
  }
}

function pieceKey(sha256: string, piece: number): string {
  return `${sha256}/${piece}`;
}

/** The work goes on for others when the signal aborts; the caller does not wait for it. */
function raced<T>(work: Promise<T>, signal: AbortSignal): Promise<T> {
  return new Promise((resolve, reject) => {
    const onAbort = (): void => reject(signal.reason as Error);
    if (signal.aborted) return onAbort();
    signal.addEventListener("abort", onAbort, { once: true });
    work.then(resolve, reject).finally(() => signal.removeEventListener("abort", onAbort));
  });
}
