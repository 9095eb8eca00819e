import { closeSync, fstatSync, openSync } from "node:fs";
import { AenvError, errnoOf } from "@aenv/base";
import { type DeltaEntry, DeltaFile, readFully } from "./delta-file.ts";
import type { DeltaPiece } from "./delta.ts";
import { MAX_PIECE_BYTES, PAGE_BYTES } from "./guest-memory.ts";

/** The memory of a snapshot: a flat file that VMMs map, and the deltas on it, oldest first. Without a flat file: zeros. */
export interface StackFiles {
  memoryBytes: number;
  flat: string | undefined;
  deltas: readonly string[];
}

/** The content of a snapshot's memory. Opening it reads the indexes of the deltas; CORRUPT names the file. */
export class MemoryStack implements Disposable {
  readonly memoryBytes: number;
  readonly #flat: number | undefined;
  readonly #deltas: DeltaFile[] = [];
  readonly #entries: { file: DeltaFile; entry: DeltaEntry }[] = [];
  /** By page: 0 for the flat file, else the number of the entry that holds it, plus one. */
  readonly #where: Uint32Array;

  constructor(files: StackFiles) {
    this.memoryBytes = files.memoryBytes;
    this.#where = new Uint32Array(files.memoryBytes / PAGE_BYTES);
    using undo = new DisposableStack();
    this.#flat = files.flat === undefined ? undefined : openFlat(files.flat, files.memoryBytes);
    if (this.#flat !== undefined) undo.adopt(this.#flat, closeSync);
    for (const path of files.deltas) {
      const file = undo.use(DeltaFile.open(path, files.memoryBytes));
      this.#deltas.push(file);
      for (const entry of file.entries) {
        if (entry.offset + entry.length > files.memoryBytes)
          throw new AenvError("CORRUPT", `the memory delta ${path} holds an address that the machine does not have`);
        this.#entries.push({ file, entry });
        const first = entry.offset / PAGE_BYTES;
        this.#where.fill(this.#entries.length, first, first + entry.length / PAGE_BYTES);
      }
    }
    undo.move();
  }

  /** Bytes of guest memory that differ from the flat file. */
  get overlayBytes(): number {
    let pages = 0;
    for (const w of this.#where) if (w !== 0) pages++;
    return pages * PAGE_BYTES;
  }

  /** The content from a page-aligned offset on. Data of deltas is not checked here. */
  read(offset: number, into: Buffer): void {
    const end = (offset + into.length) / PAGE_BYTES;
    for (let page = offset / PAGE_BYTES; page < end; ) {
      const where = this.#where[page] ?? 0;
      let next = page + 1;
      while (next < end && this.#where[next] === where) next++;
      const at = page * PAGE_BYTES;
      const part = into.subarray(at - offset, next * PAGE_BYTES - offset);
      const from = where === 0 ? undefined : this.#entries[where - 1];
      if (!from) this.#readFlat(at, part);
      else if (from.entry.at === undefined) part.fill(0);
      else from.file.readPart(from.entry.at + at - from.entry.offset, part);
      page = next;
    }
  }

  /** What differs from the flat file, every page once, checked against its sum. `data` is valid until the next piece. */
  *overlay(): Generator<DeltaPiece> {
    for (const [number, { file, entry }] of this.#entries.entries()) {
      const first = entry.offset / PAGE_BYTES;
      const end = first + entry.length / PAGE_BYTES;
      let data: Buffer | undefined;
      for (let page = first; page < end; ) {
        if (this.#where[page] !== number + 1) {
          page++;
          continue;
        }
        let next = page + 1;
        while (next < end && this.#where[next] === number + 1) next++;
        const [from, to] = [(page - first) * PAGE_BYTES, (next - first) * PAGE_BYTES];
        if (entry.at !== undefined) data ??= file.read(entry);
        yield { offset: page * PAGE_BYTES, length: to - from, data: data?.subarray(from, to) };
        page = next;
      }
    }
  }

  /** All of the memory in pieces, in order; those of deltas unchecked. */
  *content(): Generator<{ offset: number; data: Buffer }> {
    for (let offset = 0; offset < this.memoryBytes; offset += MAX_PIECE_BYTES) {
      const data = Buffer.allocUnsafe(Math.min(MAX_PIECE_BYTES, this.memoryBytes - offset));
      this.read(offset, data);
      yield { offset, data };
    }
  }

  [Symbol.dispose](): void {
    if (this.#flat !== undefined) closeSync(this.#flat);
    for (const d of this.#deltas) d[Symbol.dispose]();
  }

  #readFlat(offset: number, into: Buffer): void {
    if (this.#flat === undefined) into.fill(0);
    else if (!readFully(this.#flat, into, offset)) throw new AenvError("CORRUPT", "a memory file ends early");
  }
}

function openFlat(path: string, memoryBytes: number): number {
  let fd: number;
  try {
    fd = openSync(path, "r");
  } catch (e) {
    if (errnoOf(e) === "ENOENT") throw new AenvError("CORRUPT", `the memory file ${path} is missing`, { cause: e });
    throw AenvError.from(e, `open the memory file ${path}`);
  }
  const { size } = fstatSync(fd);
  if (size === memoryBytes) return fd;
  closeSync(fd);
  throw new AenvError("CORRUPT", `the memory file ${path} has ${size} bytes, the machine ${memoryBytes}`);
}
