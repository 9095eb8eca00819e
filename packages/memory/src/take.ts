import { closeSync, openSync } from "node:fs";
import { AenvError } from "@aenv/base";
import { DeltaWriter, readFully } from "./delta-file.ts";
import { narrow } from "./delta.ts";
import { writtenRuns } from "./dirty.ts";
import { type FlatOwner, FlatWriter } from "./flat-file.ts";
import { type GuestMapping, GuestMemory, MAX_PIECE_BYTES, type PageData, type PageRun } from "./guest-memory.ts";
import { MemoryStack, type StackFiles } from "./stack.ts";

export interface TakePlan {
  memoryBytes: number;
  /** A VMM that maps its memory file privately, or the file of one that writes through. */
  source: { mappings: readonly GuestMapping[] } | { file: string };
  /** The state that the guest had at its last capture or launch; undefined: a new flat file is written, not a delta. */
  parent: StackFiles | undefined;
  /** Must not exist. */
  target: string;
  /** Of a new flat file. */
  owner: FlatOwner;
  /** While the guest stands still so much is copied aside; what is beyond it is written at once, which takes longer. */
  bufferBytes: number;
}

/** Shares of a VM's written pages change after so many bytes. */
const SHARE_BYTES = 256 * 1024;

/** Which of the written pages are this take's: the `index`-th of `of` parts that are about equal. Takes of one VM go side by side. */
export interface Share {
  index: number;
  of: number;
}

export interface TakeResult {
  /** Bytes of data in the new file. */
  bytes: number;
  /** Bytes of guest memory that were looked at. */
  dirtyBytes: number;
}

/** So much is written before the device is told to begin. */
const AHEAD_BYTES = 4 << 20;

/**
 * One capture of a guest's memory: `take` while the VM stands still, then `finish` when it may run again. Disposal without
 * `finish` leaves no file.
 */
export class Take implements Disposable {
  readonly #plan: TakePlan;
  readonly #resources = new DisposableStack();
  readonly #parent: MemoryStack | undefined;
  readonly #writer: DeltaWriter | FlatWriter;
  #buffered: PageData[] = [];
  #bufferedBytes = 0;
  #dirtyBytes = 0;
  /** What is written goes to the device as it is written. */
  #ahead: boolean;
  #aheadBytes = 0;

  /** Opens what the state before is made of: to be done before the VM is stopped. */
  constructor(plan: TakePlan) {
    this.#plan = plan;
    // A guest that does not go on is kept: what is not copied aside is written to stay.
    this.#ahead = plan.bufferBytes === 0;
    using undo = new DisposableStack();
    if (plan.parent) {
      this.#parent = undo.use(new MemoryStack(plan.parent));
      this.#writer = undo.use(new DeltaWriter(plan.target, plan.memoryBytes));
    } else this.#writer = undo.use(FlatWriter.create(plan.target, plan.memoryBytes));
    this.#resources.use(undo.move());
  }

  /** Bytes of guest memory that were written so far: while the VM runs, a lower bound of what `take` will look at. */
  estimate(): number {
    const { source, memoryBytes } = this.#plan;
    if ("file" in source) return memoryBytes;
    return writtenRuns(source.mappings).reduce((n, r) => n + r.length, 0);
  }

  take(share: Share = { index: 0, of: 1 }): void {
    const { source, bufferBytes, memoryBytes } = this.#plan;
    const pieces =
      "file" in source ? filePieces(source.file, memoryBytes, share) : writtenPieces(source.mappings, share);
    for (const piece of pieces) {
      this.#dirtyBytes += piece.length;
      if (this.#bufferedBytes + piece.length <= bufferBytes) {
        this.#buffered.push(piece);
        this.#bufferedBytes += piece.length;
      } else {
        this.#drain();
        this.#put(piece);
        // From here on nothing fits: the order of the file stays that of the memory.
        this.#bufferedBytes = Number.POSITIVE_INFINITY;
      }
    }
  }

  async finish(durable: boolean): Promise<TakeResult> {
    this.#ahead = durable;
    this.#drain();
    const { bytes } = this.#writer;
    if (this.#writer instanceof FlatWriter) await this.#writer.seal(this.#plan.owner, durable);
    else await this.#writer.seal(durable);
    this[Symbol.dispose]();
    return { bytes, dirtyBytes: this.#dirtyBytes };
  }

  [Symbol.dispose](): void {
    this.#buffered = [];
    this.#resources.dispose();
  }

  #drain(): void {
    for (const piece of this.#buffered) this.#put(piece);
    this.#buffered = [];
  }

  #put(piece: PageData): void {
    const parent = this.#parent;
    if (this.#writer instanceof FlatWriter) this.#writer.fill(piece.offset, piece.data);
    else if (parent) {
      for (const p of narrow(piece, (offset, into) => parent.read(offset, into))) this.#writer.add(p);
      if (!this.#ahead || this.#writer.bytes - this.#aheadBytes < AHEAD_BYTES) return;
      this.#aheadBytes = this.#writer.bytes;
      this.#writer.flushAhead();
    }
  }
}

function* writtenPieces(mappings: readonly GuestMapping[], share: Share): Generator<PageData> {
  using memory = new GuestMemory(mappings, "r");
  for (const { offset, length } of pieces(writtenRuns(mappings), share)) {
    const data = Buffer.allocUnsafe(length);
    memory.read(offset, data);
    yield { offset, length, data };
  }
}

function* filePieces(path: string, memoryBytes: number, share: Share): Generator<PageData> {
  const fd = openSync(path, "r");
  try {
    for (const { offset, length } of pieces([{ offset: 0, length: memoryBytes }], share)) {
      const data = Buffer.allocUnsafe(length);
      if (!readFully(fd, data, offset)) throw new AenvError("VMM_FAILED", `the memory file ${path} ends early`);
      yield { offset, length, data };
    }
  } finally {
    closeSync(fd);
  }
}

/** Shares are of bytes, not of pieces: many pieces are a page. */
function* pieces(runs: readonly PageRun[], { index, of }: Share): Generator<PageRun> {
  let seen = 0;
  for (const run of runs)
    for (let done = 0; done < run.length; done += MAX_PIECE_BYTES) {
      const length = Math.min(MAX_PIECE_BYTES, run.length - done);
      if (Math.floor(seen / SHARE_BYTES) % of === index) yield { offset: run.offset + done, length };
      seen += length;
    }
}
