import { closeSync, openSync, readSync } from "node:fs";
import { AenvError } from "@aenv/base";
import { type GuestMapping, PAGE_BYTES, type PageRun } from "./guest-memory.ts";

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
    const fd = open(path);
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

function open(path: string): number {
  try {
    return openSync(path, "r");
  } catch (e) {
    throw new AenvError("VMM_FAILED", `cannot open ${path}: the VMM has ended, or this process may not trace it`, {
      cause: e,
    });
  }
}
