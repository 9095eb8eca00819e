import { AenvError } from "@aenv/base";
import { BLOCK_BYTES, BLOCK_SECTORS, follower, UNMAPPED, ZERO_BIT } from "./blocks.ts";
import { EMPTY_MAP, type ExtentMap, findExtent, ZEROED } from "./extents.ts";
import { SECTOR } from "./format.ts";
import { FileSource } from "./source.ts";
import { type Upper, writeExact } from "./upper.ts";

/** Sealed layers under one merged index; `files` are numbered as the index numbers them. */
export interface Stack {
  map: ExtentMap;
  files: readonly FileSource[];
}

export const EMPTY_STACK: Stack = { map: EMPTY_MAP, files: [] };

export interface DiskExtent {
  length: number;
  zero: boolean;
  hole: boolean;
}

/** What `#fill` does with data that may have to come from the device. */
const REFUSE = 0;
const BLOCK = 1;
const COLLECT = 2;
type ColdMode = typeof REFUSE | typeof BLOCK | typeof COLLECT;

interface ColdRange {
  file: FileSource;
  position: number;
  length: number;
}

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

  constructor(size: number, stack: Stack, upper: Upper) {
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
    await this.#hold(async () => {
      await this.#load(offset, length);
      this.#fill(offset, length, into, at, BLOCK);
    });
  }

  write(offset: number, data: Buffer, fua: boolean): Promise<void> | undefined {
    if (this.#gate) return this.#afterGate(() => this.write(offset, data, fua));
    this.#alive();
    this.#write(offset, data);
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
    const end = offset + length;
    const first = Math.ceil(offset / BLOCK_BYTES);
    const last = Math.floor(end / BLOCK_BYTES);
    if (first > last) this.#zeroInside(offset, length);
    else {
      this.#zeroInside(offset, first * BLOCK_BYTES - offset);
      this.#zeroBlocks(first, last);
      this.#zeroInside(last * BLOCK_BYTES, end - last * BLOCK_BYTES);
    }
    return fua ? this.flush() : undefined;
  }

  trim(offset: number, length: number, fua: boolean): Promise<void> | undefined {
    if (this.#gate) return this.#afterGate(() => this.trim(offset, length, fua));
    this.#alive();
    const first = Math.ceil(offset / BLOCK_BYTES);
    const last = Math.floor((offset + length) / BLOCK_BYTES);
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
    this.#cold = [];
    this.#fill(offset, length, NOTHING, 0, COLLECT);
    const cold = this.#cold;
    this.#cold = [];
    await Promise.all(cold.map((c) => c.file.load(c.position, c.length)));
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
        if (mode !== COLLECT) into.fill(0, target, target + limit - position);
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
        if (mode !== COLLECT) into.fill(0, target, target + limit - position);
        position = limit;
        continue;
      }
      const limit = Math.min((map.end[i] as number) * SECTOR, end);
      const file = map.file[i] as number;
      if (file === ZEROED) {
        if (mode !== COLLECT) into.fill(0, target, target + limit - position);
      } else {
        const place = (map.place[i] as number) * SECTOR + position - start;
        if (!this.#fillFrom(files[file] as FileSource, place, limit - position, into, target, mode)) return false;
      }
      position = limit;
      i++;
    }
    return true;
  }

  #fillFrom(file: FileSource, place: number, length: number, into: Buffer, at: number, mode: ColdMode): boolean {
    if (mode !== BLOCK && !file.isWarm(place, length)) {
      if (mode === REFUSE) return false;
      this.#cold.push({ file, position: place, length });
      return true;
    }
    if (mode !== COLLECT) file.read(into, at, length, place);
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

  #write(offset: number, data: Buffer): void {
    this.#dirty = true;
    const end = offset + data.length;
    const first = Math.ceil(offset / BLOCK_BYTES);
    const last = Math.floor(end / BLOCK_BYTES);
    if (first > last) return this.#writeInside(offset, data);
    const head = first * BLOCK_BYTES - offset;
    if (head > 0) this.#writeInside(offset, data.subarray(0, head));
    if (last > first) this.#writeBlocks(first, last - first, data, head);
    if (end > last * BLOCK_BYTES) this.#writeInside(last * BLOCK_BYTES, data.subarray(last * BLOCK_BYTES - offset));
  }

  #writeBlocks(block: number, count: number, data: Buffer, at: number): void {
    const { table } = this.#upper;
    let i = 0;
    while (i < count) {
      const value = table.get(block + i);
      const place = Math.floor(value / 2);
      let n = 1;
      let zeroed = (value & ZERO_BIT) !== 0;
      for (; i + n < count; n++) {
        const next = table.get(block + i + n);
        if (Math.floor(next / 2) !== (place === 0 ? 0 : place + n)) break;
        zeroed ||= (next & ZERO_BIT) !== 0;
      }
      const from = at + i * BLOCK_BYTES;
      if (place === 0) this.#append(block + i, n, data.subarray(from, from + n * BLOCK_BYTES));
      else {
        this.#put(data.subarray(from, from + n * BLOCK_BYTES), place * BLOCK_BYTES, false);
        if (zeroed) this.#upper.map(block + i, n, place * 2);
      }
      i += n;
    }
  }

  #append(block: number, count: number, data: Buffer): void {
    const place = this.#upper.allocate(count);
    try {
      this.#put(data, place * BLOCK_BYTES, true);
    } catch (e) {
      this.#upper.giveBack(place);
      throw e;
    }
    this.#upper.map(block, count, place * 2);
  }

  #put(data: Buffer, position: number, appended: boolean): void {
    writeExact(this.#upper.fd, data, data.length, position);
    this.#upperSource.wrote(position, data.length, appended);
  }

  /** A write inside one block: the rest of the block is copied up when the upper does not hold it. */
  #writeInside(offset: number, data: Buffer): void {
    const block = Math.floor(offset / BLOCK_BYTES);
    const inside = offset - block * BLOCK_BYTES;
    const value = this.#upper.table.get(block);
    if (value !== UNMAPPED && (value & ZERO_BIT) === 0) {
      return this.#put(data, Math.floor(value / 2) * BLOCK_BYTES + inside, false);
    }
    const whole = Buffer.alloc(BLOCK_BYTES);
    this.#fill(block * BLOCK_BYTES, Math.min(BLOCK_BYTES, this.size - block * BLOCK_BYTES), whole, 0, BLOCK);
    data.copy(whole, inside);
    this.#writeBlocks(block, 1, whole, 0);
  }

  /** Zeros inside one block. */
  #zeroInside(offset: number, length: number): void {
    if (length === 0 || this.#isZero(offset, length)) return;
    this.#write(offset, Buffer.alloc(length));
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
