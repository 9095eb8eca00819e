import { closeSync, openSync, writeSync } from "node:fs";
import { AenvError } from "@aenv/base";
import type { DeltaPiece } from "./delta.ts";
import type { GuestMapping } from "./dirty.ts";

/** Zeros are written from one buffer of this size. */
const ZEROS = Buffer.alloc(1 << 20);

/**
 * Writes pieces into the memory of a VMM that has loaded its device state and not yet continued.
 * The pages become private memory of that VMM; the file it maps stays as it is. Returns the bytes written.
 */
export function inject(mappings: readonly GuestMapping[], pieces: Iterable<DeltaPiece>): number {
  const files = new Map<number, number>();
  let total = 0;
  try {
    for (const piece of pieces) {
      for (let done = 0; done < piece.length; ) {
        const offset = piece.offset + done;
        const m = mappings.find((x) => offset >= x.guestOffset && offset < x.guestOffset + x.length);
        if (!m)
          throw new AenvError("CORRUPT", `a memory layer holds an address, ${offset}, that the machine does not have`);
        const into = offset - m.guestOffset;
        const source = piece.data ? piece.data.subarray(done) : ZEROS;
        const length = Math.min(piece.length - done, m.length - into, source.length);
        let fd = files.get(m.pid);
        if (fd === undefined) files.set(m.pid, (fd = openSync(`/proc/${m.pid}/mem`, "r+")));
        const wrote = writeSync(fd, source, 0, length, Number(m.hostAddress) + into);
        if (wrote <= 0) throw new AenvError("VMM_FAILED", `the VMM took none of ${length} bytes of guest memory`);
        done += wrote;
        total += wrote;
      }
    }
  } finally {
    for (const fd of files.values()) closeSync(fd);
  }
  return total;
}
