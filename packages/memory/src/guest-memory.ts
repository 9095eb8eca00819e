import { closeSync, openSync, readSync, writeSync } from "node:fs";
import { AenvError } from "@aenv/base";

export const PAGE_BYTES = 4096;

/** Where a piece of guest memory is mapped in its VMM. */
export interface GuestMapping {
  pid: number;
  /** Page-aligned virtual address in the VMM. */
  hostAddress: bigint;
  /** Offset of the piece in the guest's memory file, bytes. */
  guestOffset: number;
  /** Bytes. */
  length: number;
}

/** Page-aligned run of guest memory: `[offset, offset + length)` in the memory file. */
export interface PageRun {
  offset: number;
  length: number;
}

/** A run's content. */
export interface PageData extends PageRun {
  data: Buffer;
}

/** Longest piece handled at once. */
export const MAX_PIECE_BYTES = 1 << 20;

/** Guest memory as one address space, read and written from outside through /proc/PID/mem. */
export class GuestMemory implements Disposable {
  readonly #mappings: readonly GuestMapping[];
  readonly #flags: "r" | "r+";
  readonly #files = new Map<number, number>();

  constructor(mappings: readonly GuestMapping[], flags: "r" | "r+") {
    this.#mappings = mappings;
    this.#flags = flags;
  }

  /** All of `into`, from `offset` on. VMM_FAILED when the VMM has ended. */
  read(offset: number, into: Buffer): void {
    for (let done = 0; done < into.length; ) {
      const at = this.#at(offset + done, into.length - done);
      const got = readSync(at.fd, into, done, at.length, at.address);
      if (got <= 0) throw new AenvError("VMM_FAILED", `the VMM gave none of ${at.length} bytes of guest memory`);
      done += got;
    }
  }

  /** The pages become private memory of the VMM; the file that it maps stays as it is. */
  write(offset: number, data: Buffer): void {
    for (let done = 0; done < data.length; ) {
      const at = this.#at(offset + done, data.length - done);
      const wrote = writeSync(at.fd, data, done, at.length, at.address);
      if (wrote <= 0) throw new AenvError("VMM_FAILED", `the VMM took none of ${at.length} bytes of guest memory`);
      done += wrote;
    }
  }

  [Symbol.dispose](): void {
    for (const fd of this.#files.values()) closeSync(fd);
    this.#files.clear();
  }

  #at(offset: number, length: number): { fd: number; address: number; length: number } {
    const m = this.#mappings.find((x) => offset >= x.guestOffset && offset < x.guestOffset + x.length);
    if (!m) throw new AenvError("CORRUPT", `the machine has no memory at ${offset}`);
    let fd = this.#files.get(m.pid);
    if (fd === undefined) this.#files.set(m.pid, (fd = this.#open(m.pid)));
    const into = offset - m.guestOffset;
    // User addresses end below 2^47, so a double holds them exactly.
    return { fd, address: Number(m.hostAddress) + into, length: Math.min(length, m.length - into) };
  }

  #open(pid: number): number {
    try {
      return openSync(`/proc/${pid}/mem`, this.#flags);
    } catch (e) {
      throw new AenvError("VMM_FAILED", `cannot open /proc/${pid}/mem: the VMM has ended, or may not be traced`, {
        cause: e,
      });
    }
  }
}
