import { randomUUID } from "node:crypto";
import {
  closeSync,
  fdatasync as fdatasyncCallback,
  fdatasyncSync,
  fstatSync,
  ftruncateSync,
  openSync,
  readSync,
  renameSync,
  rmSync,
  write as writeCallback,
  writeSync,
} from "node:fs";
import { promisify } from "node:util";
import { AenvError, errnoOf } from "@aenv/base";
import { BLOCK_BYTES, BLOCK_SECTORS, BlockTable, follower, UNMAPPED, ZERO_BIT } from "./blocks.ts";
import {
  corrupt,
  decodeHeader,
  ENTRY_BYTES,
  type Entry,
  encodeHeader,
  HEADER_BYTES,
  putEntry,
  putInvalidEntry,
  readEntry,
  SECTOR,
} from "./format.ts";
import { readExact } from "./reads.ts";

const fdatasync = promisify(fdatasyncCallback);
const write = promisify(writeCallback);

/**
 * "process": what was acknowledged survives the end of any process (it is in the page cache). "power": what was
 * acknowledged by FLUSH also survives the host losing power, at the price of fdatasync.
 */
export type Durability = "process" | "power";

/** Marks uppers of ours: the meaning of a zeroed entry's place is ours alone. */
const UPPER_TAG = "aenv-upper-1";
/** Block 0 of the data file is the header; block 1 stays unused, so that a zeroed entry naming it owns no place. */
const FIRST_PLACE = 2;
const NO_PLACE_SECTOR = BLOCK_SECTORS;
/** Whole blocks below the format's limit of 16383 sectors. */
const MAX_ENTRY_BLOCKS = 2047;
/** The log grows in steps that are written ahead, so that noting a write cannot run out of space later. */
const LOG_STEP_BYTES = 64 * 1024;
/** The log is rewritten when it is this much longer than what is live. */
const LOG_SLACK_ENTRIES = 64 * 1024;

export interface UpperFiles {
  data: string;
  index: string;
}

/**
 * The writable layer of one disk: an LSMT data file and its index log. Data is written before the log entry that makes
 * it visible, so a crash at any time leaves the state before or after each write.
 */
export class Upper {
  readonly files: UpperFiles;
  readonly table: BlockTable;
  readonly fd: number;
  #logFd: number;
  readonly #durability: Durability;
  /** Next free place in the data file. */
  #next = FIRST_PLACE;
  #logAt = HEADER_BYTES;
  #logReserved = HEADER_BYTES;
  #pending = Buffer.alloc(LOG_STEP_BYTES);
  #pendingEntries = 0;
  /** Last pending entry, which a neighbour may extend. */
  readonly #tail = { block: 0, count: 0, value: UNMAPPED };
  #failed: unknown;
  #closed = false;

  private constructor(files: UpperFiles, blocks: number, fd: number, logFd: number, durability: Durability) {
    this.files = files;
    this.table = new BlockTable(blocks);
    this.fd = fd;
    this.#logFd = logFd;
    this.#durability = durability;
  }

  /** Makes an empty upper. The data file appears last: where it exists, the index does too. */
  static create(files: UpperFiles, virtualSize: number, durability: Durability): Upper {
    rmSync(files.data, { force: true });
    const header = { virtualSize, uuid: randomUUID(), userTag: UPPER_TAG };
    makeFile(files.index, encodeHeader("rw-index", header), durability);
    makeFile(files.data, encodeHeader("rw-data", header), durability);
    return Upper.open(files, virtualSize, durability);
  }

  /** Opens what an earlier process left, whenever it ended. Throws CORRUPT naming the file. */
  static open(files: UpperFiles, virtualSize: number, durability: Durability): Upper {
    const fd = openRw(files.data);
    let logFd: number | undefined;
    try {
      logFd = openRw(files.index);
      const upper = new Upper(files, Math.ceil(virtualSize / BLOCK_BYTES), fd, logFd, durability);
      upper.#check(files.data, fd, virtualSize, true);
      upper.#check(files.index, logFd, virtualSize, false);
      upper.#replay();
      return upper;
    } catch (e) {
      closeSync(fd);
      if (logFd !== undefined) closeSync(logFd);
      throw AenvError.from(e, `opening ${files.data}`);
    }
  }

  /** Bytes of data the file holds. */
  get dataBytes(): number {
    return this.#next * BLOCK_BYTES;
  }

  /** Takes `count` places in a row for new blocks. They are only used once `map` names them. */
  allocate(count: number): number {
    const place = this.#next;
    this.#next += count;
    return place;
  }

  /** Gives back what `allocate` gave last, after a write to it failed. */
  giveBack(place: number): void {
    this.#next = place;
  }

  /**
   * The blocks' data is in the file at these places (or, with the zero bit, they read as zeros). A place that was given
   * to a `map` that failed must not be given back: the log may name it.
   */
  map(block: number, count: number, value: number): void {
    this.#reserveLog(Math.ceil(count / MAX_ENTRY_BLOCKS));
    let left = count;
    let at = block;
    while (left > 0) {
      const n = Math.min(left, MAX_ENTRY_BLOCKS);
      this.#note(at, n, follower(value, at - block));
      left -= n;
      at += n;
    }
    for (let i = 0; i < count; i++) this.table.set(block + i, follower(value, i));
  }

  /** After it everything mapped so far survives the end of the process. */
  commit(): void {
    if (this.#pendingEntries === 0) return;
    writeExact(this.#logFd, this.#pending, this.#pendingEntries * ENTRY_BYTES, this.#logAt);
    this.#logAt += this.#pendingEntries * ENTRY_BYTES;
    this.#pendingEntries = 0;
    this.#tail.count = 0;
  }

  /** After it everything mapped so far survives what `durability` names. */
  flush(): Promise<void> | undefined {
    if (this.#failed !== undefined) throw AenvError.from(this.#failed, "an earlier flush failed");
    this.commit();
    return this.#durability === "process" ? undefined : this.#sync();
  }

  async #sync(): Promise<void> {
    try {
      await fdatasync(this.fd);
      await fdatasync(this.#logFd);
    } catch (e) {
      // The kernel drops the dirty mark of pages it failed to write: a later sync would lie.
      this.#failed = e;
      throw AenvError.from(e, `syncing ${this.files.data}`);
    }
  }

  /** The log is much longer than what is live. */
  get wantsCompaction(): boolean {
    return (this.#logAt - HEADER_BYTES) / ENTRY_BYTES > 2 * this.table.mapped + LOG_SLACK_ENTRIES;
  }

  /** Rewrites the log to what is live. No flush may be running. */
  compactLog(): void {
    this.commit();
    const header = readExact(this.#logFd, 0, HEADER_BYTES, this.files.index);
    const entries = this.#liveEntries(false);
    makeFile(this.files.index, Buffer.concat([header, entries]), this.#durability);
    closeSync(this.#logFd);
    this.#logFd = openRw(this.files.index);
    this.#logAt = HEADER_BYTES + entries.length;
    this.#logReserved = this.#logAt;
  }

  /**
   * Makes the data file a sealed layer in place: index and trailer are appended, no data moves. The upper must not be
   * written afterwards. Returns the file's size and its number of extents.
   */
  seal(): { bytes: number; extents: number } {
    const index = this.#liveEntries(true);
    const header = decodeHeader(readExact(this.fd, 0, HEADER_BYTES, this.files.data), this.files.data);
    const indexOffset = this.dataBytes;
    const padding = Buffer.alloc((SECTOR - (index.length % SECTOR)) % SECTOR, 0xff);
    const trailer = encodeHeader("trailer", {
      virtualSize: header.virtualSize,
      uuid: header.uuid,
      indexOffset,
      indexEntries: index.length / ENTRY_BYTES,
    });
    const tail = Buffer.concat([index, padding, trailer]);
    ftruncateSync(this.fd, indexOffset);
    writeExact(this.fd, tail, tail.length, indexOffset);
    if (this.#durability === "power") fdatasyncSync(this.fd);
    return { bytes: indexOffset + tail.length, extents: index.length / ENTRY_BYTES };
  }

  close(): void {
    if (this.#closed) return;
    this.#closed = true;
    closeSync(this.fd);
    closeSync(this.#logFd);
  }

  #note(block: number, count: number, value: number): void {
    const t = this.#tail;
    if (
      t.count > 0 &&
      t.count + count <= MAX_ENTRY_BLOCKS &&
      t.block + t.count === block &&
      value === follower(t.value, t.count)
    ) {
      t.count += count;
      putBlocks(this.#pending, this.#pendingEntries - 1, t.block, t.count, t.value);
      return;
    }
    if ((this.#pendingEntries + 1) * ENTRY_BYTES > this.#pending.length) this.commit();
    t.block = block;
    t.count = count;
    t.value = value;
    putBlocks(this.#pending, this.#pendingEntries++, block, count, value);
  }

  /** Space for so many more entries, written ahead, so that running out of it is noticed before anything changed. */
  #reserveLog(entries: number): void {
    while (this.#logAt + (this.#pendingEntries + entries) * ENTRY_BYTES > this.#logReserved) {
      writeExact(this.#logFd, PADDING, PADDING.length, this.#logReserved);
      this.#logReserved += PADDING.length;
    }
  }

  /** Sorted entries of what is mapped; a sealed index does not name the places of zeroed blocks. */
  #liveEntries(sealed: boolean): Buffer {
    let b = Buffer.alloc(LOG_STEP_BYTES);
    let n = 0;
    this.table.runs((block, count, value) => {
      for (let done = 0; done < count; done += MAX_ENTRY_BLOCKS) {
        if ((n + 1) * ENTRY_BYTES > b.length) b = Buffer.concat([b, Buffer.alloc(b.length)]);
        const take = Math.min(count - done, MAX_ENTRY_BLOCKS);
        putBlocks(b, n++, block + done, take, sealed && (value & ZERO_BIT) !== 0 ? ZERO_BIT : follower(value, done));
      }
    });
    return b.subarray(0, n * ENTRY_BYTES);
  }

  #check(path: string, fd: number, virtualSize: number, data: boolean): void {
    const header = decodeHeader(readExact(fd, 0, HEADER_BYTES, path), path);
    if (!header.header || header.data !== data || header.sealed) {
      throw corrupt(path, `is not the ${data ? "data" : "index"} file of an upper`);
    }
    if (header.userTag !== UPPER_TAG) throw corrupt(path, "is an upper written by other software");
    if (header.virtualSize !== virtualSize) {
      throw corrupt(path, `belongs to a disk of ${header.virtualSize} bytes, not ${virtualSize}`);
    }
  }

  #replay(): void {
    const dataBlocks = Math.ceil(fstatSync(this.fd).size / BLOCK_BYTES);
    const size = fstatSync(this.#logFd).size;
    const entries = Math.floor((size - HEADER_BYTES) / ENTRY_BYTES);
    const e: Entry = { sector: 0, length: 0, place: 0, zeroed: false };
    const step = LOG_STEP_BYTES / ENTRY_BYTES;
    for (let done = 0; done < entries; done += step) {
      const n = Math.min(step, entries - done);
      const b = readExact(this.#logFd, HEADER_BYTES + done * ENTRY_BYTES, n * ENTRY_BYTES, this.files.index);
      for (let i = 0; i < n; i++) {
        if (!readEntry(b, i * ENTRY_BYTES, e)) continue;
        this.#replayEntry(e, dataBlocks);
        this.#logAt = HEADER_BYTES + (done + i + 1) * ENTRY_BYTES;
      }
    }
    this.#logReserved = HEADER_BYTES + entries * ENTRY_BYTES;
  }

  #replayEntry(e: Entry, dataBlocks: number): void {
    const block = e.sector / BLOCK_SECTORS;
    const count = e.length / BLOCK_SECTORS;
    const place = e.place / BLOCK_SECTORS;
    const bare = e.zeroed && e.place === NO_PLACE_SECTOR;
    if (!Number.isInteger(block) || !Number.isInteger(count) || !Number.isInteger(place)) {
      throw corrupt(this.files.index, `has an unaligned entry at sector ${e.sector}`);
    }
    if (block + count > this.table.blocks) {
      throw corrupt(this.files.index, `has an entry behind the end of the disk at sector ${e.sector}`);
    }
    if (!bare && (place < FIRST_PLACE || place + count > dataBlocks)) {
      // Only a loss of power can leave an entry without its data, and only for writes that no FLUSH acknowledged.
      if (this.#durability === "power") return;
      throw corrupt(this.files.data, `ends before the data of sector ${e.sector}`);
    }
    const value = bare ? ZERO_BIT : place * 2 + (e.zeroed ? ZERO_BIT : 0);
    for (let i = 0; i < count; i++) this.table.set(block + i, follower(value, i));
    if (!bare) this.#next = Math.max(this.#next, place + count);
  }
}

const PADDING = Buffer.alloc(LOG_STEP_BYTES);
for (let at = 0; at < LOG_STEP_BYTES; at += ENTRY_BYTES) putInvalidEntry(PADDING, at);

/** Entry number `i` of `b` for a run of blocks that starts with `value`. */
function putBlocks(b: Buffer, i: number, block: number, count: number, value: number): void {
  const place = Math.floor(value / 2) * BLOCK_SECTORS || NO_PLACE_SECTOR;
  putEntry(b, i * ENTRY_BYTES, block * BLOCK_SECTORS, count * BLOCK_SECTORS, place, (value & ZERO_BIT) !== 0);
}

function openRw(path: string): number {
  try {
    return openSync(path, "r+");
  } catch (e) {
    if (errnoOf(e) !== "ENOENT") throw AenvError.from(e, `opening ${path}`);
    throw new AenvError("NOT_FOUND", `${path} is missing`, { cause: e, data: { file: path } });
  }
}

function makeFile(path: string, content: Buffer, durability: Durability): void {
  const temp = `${path}.new`;
  rmSync(temp, { force: true });
  const fd = openSync(temp, "wx", 0o600);
  try {
    writeExact(fd, content, content.length, 0);
    if (durability === "power") fdatasyncSync(fd);
  } finally {
    closeSync(fd);
  }
  renameSync(temp, path);
}

export function writeExact(fd: number, b: Buffer, length: number, position: number): void {
  let done = 0;
  while (done < length) done += writeSync(fd, b, done, length - done, position + done);
}

export async function writeExactAsync(fd: number, b: Buffer, length: number, position: number): Promise<void> {
  let done = 0;
  while (done < length) done += (await write(fd, b, done, length - done, position + done)).bytesWritten;
}

export function readFull(fd: number, b: Buffer, at: number, length: number, position: number): void {
  let done = 0;
  while (done < length) {
    const n = readSync(fd, b, at + done, length - done, position + done);
    if (n === 0) throw new AenvError("CORRUPT", `a layer file ends at byte ${position + done}, before its data`);
    done += n;
  }
}
