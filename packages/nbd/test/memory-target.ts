import type { BlockTarget, Extent, Pending } from "../src/target.ts";

const BLOCK = 4096;

/** A disk in memory with knobs for faults; never waits unless told to. */
export class MemoryTarget implements BlockTarget {
  readonly size: number;
  readonly readOnly: boolean;
  readonly data: Buffer;
  flushes = 0;
  commits = 0;
  /** Thrown or rejected by the next requests of the named kind. */
  readonly fail = new Map<"read" | "write" | "flush", Error>();
  /** While set, reads and writes take the asynchronous way and wait for it. */
  gate: Promise<void> | undefined;
  waiting = 0;
  mostWaiting = 0;

  constructor(size: number, readOnly = false) {
    this.size = size;
    this.readOnly = readOnly;
    this.data = Buffer.alloc(size);
  }

  readNow(offset: number, length: number, into: Buffer, at: number): boolean {
    if (this.gate) return false;
    this.#check("read");
    this.data.copy(into, at, offset, offset + length);
    return true;
  }

  async read(offset: number, length: number, into: Buffer, at: number): Promise<void> {
    await this.#wait();
    this.#check("read");
    this.data.copy(into, at, offset, offset + length);
  }

  write(offset: number, data: Buffer): Pending {
    if (!this.gate) {
      this.#check("write");
      data.copy(this.data, offset);
      return undefined;
    }
    return this.#wait().then(() => {
      this.#check("write");
      data.copy(this.data, offset);
    });
  }

  flush(): Pending {
    this.#check("flush");
    this.flushes++;
    return undefined;
  }

  zero(offset: number, length: number): Pending {
    this.data.fill(0, offset, offset + length);
    return undefined;
  }

  trim(offset: number, length: number): Pending {
    return this.zero(offset, length);
  }

  commit(): void {
    this.commits++;
  }

  status(offset: number, length: number, limit: number): Extent[] {
    const out: Extent[] = [];
    for (let at = offset; at < offset + length; ) {
      const next = Math.min(offset + length, (Math.floor(at / BLOCK) + 1) * BLOCK);
      const zero = this.data.subarray(at, next).every((b) => b === 0);
      const last = out.at(-1);
      if (last?.zero === zero) last.length += next - at;
      else if (out.length === limit) break;
      else out.push({ length: next - at, zero, hole: zero });
      at = next;
    }
    return out;
  }

  cache(): Pending {
    return undefined;
  }

  #check(kind: "read" | "write" | "flush"): void {
    const e = this.fail.get(kind);
    if (e) throw e;
  }

  async #wait(): Promise<void> {
    this.waiting++;
    this.mostWaiting = Math.max(this.mostWaiting, this.waiting);
    await this.gate;
    this.waiting--;
  }
}

export function errno(code: string): Error {
  return Object.assign(new Error(`made-up ${code}`), { code });
}
