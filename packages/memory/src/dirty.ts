import { closeSync, openSync, readSync } from "node:fs";
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

// /proc/PID/pagemap, kernel documentation "pagemap": one u64 a page. The flags are in the high word.
const PRESENT = 1 << 31;
const SWAPPED = 1 << 30;
/** Page of a file or of shared memory; clear on what a private mapping has copied. */
const FILE_BACKED = 1 << 29;
const ENTRY_BYTES = 8;
/** Pages whose entries are read at a time: 512 KiB of pagemap. */
const BATCH_PAGES = 65_536;

/**
 * The pages that the guest has written since its VMM mapped the memory file privately, merged into runs in order.
 *
 * A written page of a private file mapping is anonymous memory of that process: present or swapped, and not file-backed.
 * The caller holds the VM stopped, else the answer is only a lower bound.
 */
export function writtenRuns(mappings: readonly GuestMapping[]): PageRun[] {
  const runs: PageRun[] = [];
  const entries = Buffer.alloc(BATCH_PAGES * ENTRY_BYTES);
  const words = new Uint32Array(entries.buffer, entries.byteOffset, BATCH_PAGES * 2);
  for (const m of mappings) {
    const path = `/proc/${m.pid}/pagemap`;
    const fd = openProc(path);
    try {
      const pages = m.length / PAGE_BYTES;
      const firstPage = Number(m.hostAddress / BigInt(PAGE_BYTES));
      for (let done = 0; done < pages; done += BATCH_PAGES) {
        const count = Math.min(BATCH_PAGES, pages - done);
        const wanted = count * ENTRY_BYTES;
        const got = readSync(fd, entries, 0, wanted, (firstPage + done) * ENTRY_BYTES);
        if (got !== wanted)
          throw new AenvError("VMM_FAILED", `${path} gave ${got} of ${wanted} bytes: the VMM has ended`);
        for (let i = 0; i < count; i++) {
          const high = words[i * 2 + 1] ?? 0;
          if ((high & (PRESENT | SWAPPED)) === 0 || (high & FILE_BACKED) !== 0) continue;
          append(runs, m.guestOffset + (done + i) * PAGE_BYTES);
        }
      }
    } finally {
      closeSync(fd);
    }
  }
  return runs;
}

/** Adds one page to the last run or as a new one. */
function append(runs: PageRun[], offset: number): void {
  const last = runs.at(-1);
  if (last && last.offset + last.length === offset) last.length += PAGE_BYTES;
  else runs.push({ offset, length: PAGE_BYTES });
}

function openProc(path: string, flags = "r"): number {
  try {
    return openSync(path, flags);
  } catch (e) {
    throw new AenvError("VMM_FAILED", `cannot open ${path}: the VMM has ended, or this process may not trace it`, {
      cause: e,
    });
  }
}

/** The part of guest memory `[offset, offset + length)` that one mapping holds, as address and length. */
function locate(
  mappings: readonly GuestMapping[],
  offset: number,
  length: number,
): { pid: number; address: number; length: number } {
  const m = mappings.find((x) => offset >= x.guestOffset && offset < x.guestOffset + x.length);
  if (!m) throw new AenvError("INTERNAL", `guest memory at ${offset} is not mapped`);
  const into = offset - m.guestOffset;
  // User addresses end below 2^47, so a double holds them exactly.
  return { pid: m.pid, address: Number(m.hostAddress) + into, length: Math.min(length, m.length - into) };
}

/** A run's content. */
export interface PageData extends PageRun {
  data: Buffer;
}

/** Longest piece read at once, so that the buffers of a capture are freed piece by piece. */
const MAX_PIECE_BYTES = 4 << 20;

/** Reads the runs out of the VMM's memory. The caller holds the VM stopped. Yields pieces of at most 4 MiB, in order. */
export function* readRuns(mappings: readonly GuestMapping[], runs: readonly PageRun[]): Generator<PageData> {
  const files = new Map<number, number>();
  try {
    for (const run of runs) {
      for (let at = run.offset; at < run.offset + run.length; ) {
        const piece = locate(mappings, at, Math.min(MAX_PIECE_BYTES, run.offset + run.length - at));
        let fd = files.get(piece.pid);
        if (fd === undefined) files.set(piece.pid, (fd = openProc(`/proc/${piece.pid}/mem`)));
        const data = Buffer.allocUnsafe(piece.length);
        const got = readSync(fd, data, 0, piece.length, piece.address);
        if (got !== piece.length)
          throw new AenvError("VMM_FAILED", `read ${got} of ${piece.length} bytes of guest memory`);
        yield { offset: at, length: piece.length, data };
        at += piece.length;
      }
    }
  } finally {
    for (const fd of files.values()) closeSync(fd);
  }
}
