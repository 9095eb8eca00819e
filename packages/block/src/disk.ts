import { AenvError, Mutex } from "@aenv/base";
import { BLOCK_BYTES, BLOCK_SECTORS, follower, UNMAPPED, ZERO_BIT } from "./blocks.ts";
import { EMPTY_MAP, type ExtentMap, findExtent, ZEROED } from "./extents.ts";
import { SECTOR } from "./format.ts";
import { FileSource, type Source } from "./source.ts";
import { type Upper, writeExact, writeExactAsync } from "./upper.ts";

/** A write of 4 KiB to 1 MiB takes well under this, unless the host makes the writer wait for its devices. */
const SLOW_WRITE_MS = 20;
const SLOW_PERIOD_MS = 500;

/** One write to the upper's data file. */
interface Put {
  data: Buffer;
  position: number;
  appended: boolean;
  /** Blocks from here on get `value` once the data is there; UNMAPPED when they have it already. */
  block: number;
  value: number;
}

/** Sealed layers under one merged index; `files` are numbered as the index numbers them. */
export interface Stack {
  map: ExtentMap;
  files: readonly Source[];
}

export const EMPTY_STACK: Stack = { map: EMPTY_MAP, files: [] };

export interface DiskExtent {
  length: number;
  zero: boolean;
  hole: boolean;
}

/** What `#fill` does with data that may have to come from the device. */
const REFUSE = 0;
/** Waits for a device, but not for a network: false when that would be needed. */
const BLOCK = 1;
/** Fills what is warm and notes the rest. */
const GATHER = 2;
type ColdMode = typeof REFUSE | typeof BLOCK | typeof GATHER;

interface ColdRange {
  file: Source;
  position: number;
  length: number;
  /** Where in the caller's buffer it goes. */
  at: number;
}

/** Content of the blocks at the ends of a write that covers them only in part. */
type Edges = ReadonlyMap<number, Buffer>;
const NO_EDGES: Edges = new Map();

/**
 * A virtual disk: sealed layers with one writable upper on top. Fits the NBD server's target port. Writes are complete,
 * visible and in the page cache when `write` returns; `commit` makes them findable after a crash of this process.
 */
export class Disk {
  readonly size: number;
  readonly readOnly = false;
  #stack: Stack;
  #upper: Upper;
  #upperSource: FileSource;
  #dirty = false;
  /** Set while the disk is frozen: requests wait for it. */
  #gate: PromiseWithResolvers<void> | undefined;
  #busy = 0;
  #idle: PromiseWithResolvers<void> | undefined;
  #closed = false;
  #cold: ColdRange[] = [];
  /** Until then writes go through the thread pool, so that a host that throttles them stops this disk only. */
  #slowUntil = 0;
  readonly #slowWriteMs: number;
  /** Changes that go, or wait to go, through the thread pool; others queue behind them. */
  #queued = 0;
  readonly #queue = new Mutex();

  /** `slowWriteMs`: a write that took longer sends those after it through the thread pool for a while. */
  constructor(size: number, stack: Stack, upper: Upper, slowWriteMs = SLOW_WRITE_MS) {
    this.#slowWriteMs = slowWriteMs;
    this.size = size;
    this.#stack = stack;
    this.#upper = upper;
    this.#upperSource = new FileSource(upper.files.data, upper.fd, FileSource.warmMap(size + 4 * BLOCK_BYTES));
  }

  /** The writable layer; only for one who has frozen the disk. */
  get upper(): Upper {
    return this.#upper;
  }

  get stack(): Stack {
    return this.#stack;
  }

  readNow(offset: number, length: number, into: Buffer, at: number): boolean {
    if (this.#gate) return false;
    this.#alive();
    return this.#fill(offset, length, into, at, REFUSE);
  }

  async read(offset: number, length: number, into: Buffer, at: number): Promise<void> {
    await this.#hold(() => this.#gather(offset, length, into, at));
  }

  write(offset: number, data: Buffer, fua: boolean): Promise<void> | undefined {
    if (this.#gate) return this.#afterGate(() => this.write(offset, data, fua));
    this.#alive();
    if (this.#queued > 0 || (this.#slowUntil > 0 && this.#isSlow())) {
      return this.#enqueue(() => this.#writeLater(offset, data), fua);
    }
    const edges = this.#edgesNow(offset, data.length);
    if (!edges) return this.#enqueue(() => this.#writeLater(offset, data), fua);
    this.#write(offset, data, edges);
    return fua ? this.flush() : undefined;
  }

  flush(): Promise<void> | undefined {
    if (this.#gate) return this.#afterGate(() => this.flush());
    this.#alive();
    this.#dirty = false;
    const syncing = this.#upper.flush();
    return syncing ? this.#hold(() => syncing) : undefined;
  }

  /** Everything acknowledged after this call survives the end of the process. */
  commit(): void {
    if (!this.#dirty || this.#closed) return;
    this.#dirty = false;
    this.#upper.commit();
    if (this.#busy === 0 && this.#upper.wantsCompaction) this.#upper.compactLog();
  }

  zero(offset: number, length: number, _punch: boolean, fua: boolean): Promise<void> | undefined {
    if (this.#gate) return this.#afterGate(() => this.zero(offset, length, _punch, fua));
    this.#alive();
    const edges = this.#queued > 0 ? undefined : this.#edgesNow(offset, length);
    if (!edges) {
      return this.#enqueue(async () => this.#zero(offset, length, await this.#edgesLater(offset, length)), fua);
    }
    this.#zero(offset, length, edges);
    return fua ? this.flush() : undefined;
  }

  #zero(offset: number, length: number, edges: Edges): void {
    const end = offset + length;
    const first = Math.ceil(offset / BLOCK_BYTES);
    const last = Math.floor(end / BLOCK_BYTES);
    if (first > last) this.#zeroInside(offset, length, edges);
    else {
      this.#zeroInside(offset, first * BLOCK_BYTES - offset, edges);
      this.#zeroBlocks(first, last);
      this.#zeroInside(last * BLOCK_BYTES, end - last * BLOCK_BYTES, edges);
    }
  }

  trim(offset: number, length: number, fua: boolean): Promise<void> | undefined {
    if (this.#gate) return this.#afterGate(() => this.trim(offset, length, fua));
    this.#alive();
    const first = Math.ceil(offset / BLOCK_BYTES);
    const last = Math.floor((offset + length) / BLOCK_BYTES);
    if (this.#queued > 0) {
      return this.#enqueue(() => {
        if (first < last) this.#zeroBlocks(first, last);
      }, fua);
    }
    if (first < last) this.#zeroBlocks(first, last);
    return fua ? this.flush() : undefined;
  }

  cache(offset: number, length: number): Promise<void> {
    return this.#hold(() => this.#load(offset, length));
  }

  /** Data or zeros from `offset` on; neighbours of one kind are one extent. Zeroed blocks take no space of their own. */
  status(offset: number, length: number, limit: number): DiskExtent[] {
    this.#alive();
    const out: DiskExtent[] = [];
    const end = offset + length;
    let at = offset;
    while (at < end) {
      const run = this.#runAt(at, end);
      const last = out.at(-1);
      if (last && last.zero === run.zero) last.length += run.end - at;
      else if (out.length === limit) break;
      else out.push({ length: run.end - at, zero: run.zero, hole: run.zero });
      at = run.end;
    }
    return out;
  }

  /** Waits for what is running and holds back what comes, until `thaw` or `replace`. */
  async freeze(): Promise<void> {
    this.#alive();
    if (this.#gate) throw new AenvError("IN_TRANSITION", "the disk is being sealed already");
    this.#gate = Promise.withResolvers();
    while (this.#busy > 0) {
      this.#idle ??= Promise.withResolvers();
      await this.#idle.promise;
    }
  }

  thaw(): void {
    this.#gate?.resolve();
    this.#gate = undefined;
  }

  /** Ends a freeze with other layers beneath and another upper on top. The old upper is the caller's to close. */
  replace(stack: Stack, upper: Upper): void {
    this.#stack = stack;
    this.#upper = upper;
    this.#upperSource = new FileSource(upper.files.data, upper.fd, FileSource.warmMap(this.size + 4 * BLOCK_BYTES));
    this.#dirty = false;
    this.thaw();
  }

  /** What is known about the page cache goes on with the sealed file. */
  get upperWarm(): Uint8Array {
    return this.#upperSource.warm;
  }

  /** Commits, then closes the upper. Requests that come later fail. The files of the stack stay open. */
  async close(): Promise<void> {
    if (this.#closed) return;
    if (!this.#gate) await this.freeze();
    this.#closed = true;
    try {
      this.#upper.commit();
    } finally {
      this.#upper.close();
      this.thaw();
    }
  }

  #alive(): void {
    if (this.#closed) throw new AenvError("UNAVAILABLE", "the disk is closed");
  }

  async #afterGate(fn: () => Promise<void> | undefined): Promise<void> {
    while (this.#gate) await this.#gate.promise;
    await fn();
  }

  #isSlow(): boolean {
    if (performance.now() < this.#slowUntil) return true;
    this.#slowUntil = 0;
    return false;
  }

  /** Does a change after those that wait already. */
  #enqueue(fn: () => Promise<void> | void, fua: boolean): Promise<void> {
    this.#queued++;
    return this.#hold(async () => {
      try {
        await this.#queue.run(async () => {
          await fn();
        });
      } finally {
        this.#queued--;
      }
      if (fua) await this.#upper.flush();
    });
  }

  /** Work that a freeze waits for. */
  async #hold(fn: () => Promise<void>): Promise<void> {
    while (this.#gate) await this.#gate.promise;
    this.#alive();
    this.#busy++;
    try {
      await fn();
    } finally {
      if (--this.#busy === 0) {
        this.#idle?.resolve();
        this.#idle = undefined;
      }
    }
  }

  /** Brings the range into the page cache. */
  async #load(offset: number, length: number): Promise<void> {
    await Promise.all(this.#collect(offset, length, NOTHING, 0).map((c) => c.file.load(c.position, c.length)));
  }

  /** Fills all of the range, without blocking this thread for long. */
  async #gather(offset: number, length: number, into: Buffer, at: number): Promise<void> {
    const cold = this.#collect(offset, length, into, at);
    await Promise.all(cold.map((c) => c.file.fetch(into, c.at, c.length, c.position)));
  }

  /** Fills what is warm (nothing, where `into` is empty); returns the rest. */
  #collect(offset: number, length: number, into: Buffer, at: number): ColdRange[] {
    this.#cold = [];
    this.#fill(offset, length, into, at, GATHER);
    const cold = this.#cold;
    this.#cold = [];
    return cold;
  }

  /** Blocks at the ends of the range that lie in it only in part and that the upper does not hold. */
  #edgeBlocks(offset: number, length: number): number[] {
    const { table } = this.#upper;
    const end = offset + length;
    const ends = [offset, end].filter((at) => at % BLOCK_BYTES !== 0).map((at) => Math.floor(at / BLOCK_BYTES));
    return [...new Set(ends)].filter((block) => table.get(block) === UNMAPPED || (table.get(block) & ZERO_BIT) !== 0);
  }

  /** Their content; undefined when it must be fetched. */
  #edgesNow(offset: number, length: number): Edges | undefined {
    if (offset % BLOCK_BYTES === 0 && length % BLOCK_BYTES === 0) return NO_EDGES;
    const out = new Map<number, Buffer>();
    for (const block of this.#edgeBlocks(offset, length)) {
      const content = Buffer.alloc(BLOCK_BYTES);
      if (!this.#fill(block * BLOCK_BYTES, BLOCK_BYTES, content, 0, BLOCK)) return undefined;
      out.set(block, content);
    }
    return out;
  }

  /** The same for one whose turn it is: nothing changes the disk meanwhile. */
  async #edgesLater(offset: number, length: number): Promise<Edges> {
    const out = new Map<number, Buffer>();
    for (const block of this.#edgeBlocks(offset, length)) {
      const content = Buffer.alloc(BLOCK_BYTES);
      await this.#gather(block * BLOCK_BYTES, BLOCK_BYTES, content, 0);
      out.set(block, content);
    }
    return out;
  }

  #fill(offset: number, length: number, into: Buffer, at: number, mode: ColdMode): boolean {
    const end = offset + length;
    const { table } = this.#upper;
    let position = offset;
    while (position < end) {
      const block = Math.floor(position / BLOCK_BYTES);
      const value = table.get(block);
      const limit = value === UNMAPPED ? this.#unmappedEnd(block, end) : this.#mappedEnd(block, value, end);
      const target = at + position - offset;
      if (value === UNMAPPED) {
        if (!this.#fillFromStack(position, limit, into, target, mode)) return false;
      } else if ((value & ZERO_BIT) !== 0) {
        if (into !== NOTHING) into.fill(0, target, target + limit - position);
      } else {
        const place = Math.floor(value / 2) * BLOCK_BYTES + (position - block * BLOCK_BYTES);
        if (!this.#fillFrom(this.#upperSource, place, limit - position, into, target, mode)) return false;
      }
      position = limit;
    }
    return true;
  }

  /** End in bytes, at most `end`, of the mapped run that starts with this block. */
  #mappedEnd(block: number, value: number, end: number): number {
    const { table } = this.#upper;
    let n = 1;
    while ((block + n) * BLOCK_BYTES < end && table.get(block + n) === follower(value, n)) n++;
    return Math.min(end, (block + n) * BLOCK_BYTES);
  }

  #unmappedEnd(block: number, end: number): number {
    const { table } = this.#upper;
    const last = Math.ceil(end / BLOCK_BYTES);
    let b = block + 1;
    while (b < last) {
      b = table.skipUntouched(b, last);
      if (b >= last || table.get(b) !== UNMAPPED) break;
      b++;
    }
    return Math.min(end, b * BLOCK_BYTES);
  }

  #fillFromStack(from: number, end: number, into: Buffer, at: number, mode: ColdMode): boolean {
    const { map, files } = this.#stack;
    let i = findExtent(map, Math.floor(from / SECTOR));
    let position = from;
    while (position < end) {
      const start = i < map.count ? (map.start[i] as number) * SECTOR : Number.POSITIVE_INFINITY;
      const target = at + position - from;
      if (start > position) {
        const limit = Math.min(start, end);
        if (into !== NOTHING) into.fill(0, target, target + limit - position);
        position = limit;
        continue;
      }
      const limit = Math.min((map.end[i] as number) * SECTOR, end);
      const file = map.file[i] as number;
      if (file === ZEROED) {
        if (into !== NOTHING) into.fill(0, target, target + limit - position);
      } else {
        const place = (map.place[i] as number) * SECTOR + position - start;
        if (!this.#fillFrom(files[file] as Source, place, limit - position, into, target, mode)) return false;
      }
      position = limit;
      i++;
    }
    return true;
  }

  #fillFrom(file: Source, place: number, length: number, into: Buffer, at: number, mode: ColdMode): boolean {
    const there = mode === BLOCK && file.local ? true : file.isWarm(place, length);
    if (there && (into === NOTHING || file.read(into, at, length, place))) return true;
    if (mode !== GATHER) return false;
    this.#cold.push({ file, position: place, length, at });
    return true;
  }

  /** What the byte at `at` is, and how far that goes without looking too far. */
  #runAt(at: number, end: number): { zero: boolean; end: number } {
    const block = Math.floor(at / BLOCK_BYTES);
    const value = this.#upper.table.get(block);
    if (value !== UNMAPPED) return { zero: (value & ZERO_BIT) !== 0, end: this.#mappedEnd(block, value, end) };
    const limit = this.#unmappedEnd(block, end);
    const { map } = this.#stack;
    const i = findExtent(map, Math.floor(at / SECTOR));
    if (i >= map.count || (map.start[i] as number) * SECTOR > at) {
      return { zero: true, end: i < map.count ? Math.min(limit, (map.start[i] as number) * SECTOR) : limit };
    }
    return { zero: map.file[i] === ZEROED, end: Math.min(limit, (map.end[i] as number) * SECTOR) };
  }

  #write(offset: number, data: Buffer, edges: Edges): void {
    this.#dirty = true;
    const puts = this.#plan(offset, data, edges);
    for (let i = 0; i < puts.length; i++) {
      const put = puts[i] as Put;
      const started = performance.now();
      try {
        writeExact(this.#upper.fd, put.data, put.data.length, put.position);
      } catch (e) {
        this.#abandon(puts, i);
        throw e;
      }
      const now = performance.now();
      if (now - started > this.#slowWriteMs) this.#slowUntil = now + SLOW_PERIOD_MS;
      this.#finish(puts, i);
    }
  }

  /** The same through the thread pool, one request at a time: the host holds back whoever writes too much. */
  async #writeLater(offset: number, data: Buffer): Promise<void> {
    const puts = this.#plan(offset, data, await this.#edgesLater(offset, data.length));
    for (let i = 0; i < puts.length; i++) {
      const put = puts[i] as Put;
      const started = performance.now();
      try {
        await writeExactAsync(this.#upper.fd, put.data, put.data.length, put.position);
      } catch (e) {
        this.#abandon(puts, i);
        throw e;
      }
      const now = performance.now();
      if (now - started > this.#slowWriteMs) this.#slowUntil = now + SLOW_PERIOD_MS;
      this.#dirty = true;
      this.#finish(puts, i);
    }
  }

  /** Data of a put is in the file: makes it visible. */
  #finish(puts: readonly Put[], i: number): void {
    const { data, position, appended, block, value } = puts[i] as Put;
    this.#upperSource.wrote(position, data.length, appended);
    if (value === UNMAPPED) return;
    try {
      this.#upper.map(block, data.length / BLOCK_BYTES, value);
    } catch (e) {
      this.#abandon(puts, i + 1);
      throw e;
    }
  }

  /** Gives back the places of puts that will not happen. Nothing else allocates between plan and end of a write. */
  #abandon(puts: readonly Put[], from: number): void {
    const first = puts.find((p, i) => i >= from && p.appended);
    if (first) this.#upper.giveBack(first.position / BLOCK_BYTES);
  }

  /** Where the data of a write goes, in order. Copies up what a write inside a block needs. */
  #plan(offset: number, data: Buffer, edges: Edges): Put[] {
    const out: Put[] = [];
    const end = offset + data.length;
    const first = Math.ceil(offset / BLOCK_BYTES);
    const last = Math.floor(end / BLOCK_BYTES);
    if (first > last) {
      this.#planInside(offset, data, edges, out);
      return out;
    }
    const head = first * BLOCK_BYTES - offset;
    if (head > 0) this.#planInside(offset, data.subarray(0, head), edges, out);
    if (last > first) this.#planBlocks(first, last - first, data, head, out);
    const tail = data.subarray(last * BLOCK_BYTES - offset);
    if (tail.length > 0) this.#planInside(last * BLOCK_BYTES, tail, edges, out);
    return out;
  }

  #planBlocks(first: number, count: number, data: Buffer, at: number, out: Put[]): void {
    const { table } = this.#upper;
    let i = 0;
    while (i < count) {
      const block = first + i;
      const value = table.get(block);
      const owned = Math.floor(value / 2);
      let n = 1;
      let zeroed = (value & ZERO_BIT) !== 0;
      for (; i + n < count; n++) {
        const next = table.get(block + n);
        if (Math.floor(next / 2) !== (owned === 0 ? 0 : owned + n)) break;
        zeroed ||= (next & ZERO_BIT) !== 0;
      }
      const part = data.subarray(at + i * BLOCK_BYTES, at + (i + n) * BLOCK_BYTES);
      const place = owned === 0 ? this.#upper.allocate(n) : owned;
      const changes = owned === 0 || zeroed;
      out.push({
        data: part,
        position: place * BLOCK_BYTES,
        appended: owned === 0,
        block,
        value: changes ? place * 2 : UNMAPPED,
      });
      i += n;
    }
  }

  /** A write inside one block: the rest of the block is copied up when the upper does not hold it. */
  #planInside(offset: number, data: Buffer, edges: Edges, out: Put[]): void {
    const block = Math.floor(offset / BLOCK_BYTES);
    const inside = offset - block * BLOCK_BYTES;
    const value = this.#upper.table.get(block);
    if (value !== UNMAPPED && (value & ZERO_BIT) === 0) {
      const position = Math.floor(value / 2) * BLOCK_BYTES + inside;
      out.push({ data, position, appended: false, block, value: UNMAPPED });
      return;
    }
    const whole = edges.get(block);
    if (!whole) throw new AenvError("INTERNAL", `block ${block} was to be written in part without the rest of it`);
    data.copy(whole, inside);
    this.#planBlocks(block, 1, whole, 0, out);
  }

  /** Zeros inside one block. */
  #zeroInside(offset: number, length: number, edges: Edges): void {
    if (length === 0 || this.#isZero(offset, length)) return;
    this.#write(offset, Buffer.alloc(length), edges);
  }

  #isZero(offset: number, length: number): boolean {
    const first = this.status(offset, length, 1)[0];
    return first !== undefined && first.zero && first.length >= length;
  }

  #zeroBlocks(from: number, to: number): void {
    this.#dirty = true;
    const { table } = this.#upper;
    let block = from;
    while (block < to) {
      const value = table.get(block);
      const limit =
        value === UNMAPPED
          ? this.#unmappedEnd(block, to * BLOCK_BYTES) / BLOCK_BYTES
          : this.#mappedEnd(block, value, to * BLOCK_BYTES) / BLOCK_BYTES;
      if (value === UNMAPPED) this.#hideStack(block, limit);
      else if ((value & ZERO_BIT) === 0) this.#upper.map(block, limit - block, value | ZERO_BIT);
      block = limit;
    }
  }

  /** Zeroes unmapped blocks, noting only those where the layers beneath hold data. */
  #hideStack(from: number, to: number): void {
    const { map } = this.#stack;
    let block = from;
    for (let i = findExtent(map, from * BLOCK_SECTORS); i < map.count; i++) {
      const first = Math.max(block, Math.floor((map.start[i] as number) / BLOCK_SECTORS));
      if (first >= to) return;
      const last = Math.min(to, Math.ceil((map.end[i] as number) / BLOCK_SECTORS));
      if (map.file[i] === ZEROED || last <= first) continue;
      this.#upper.map(first, last - first, ZERO_BIT);
      block = last;
    }
  }
}

const NOTHING = Buffer.alloc(0);
