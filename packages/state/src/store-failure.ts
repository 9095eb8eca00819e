import { AenvError, messageOf } from "@aenv/base";

const SQLITE_FULL = 13;
/** The disk or another process does not let it write now; nothing is wrong with what was to be written. */
const SQLITE_REFUSED: ReadonlySet<number> = new Set([5, 6, 7, 8, 10, 14]);

const failures = new WeakSet<object>();

/** The low byte of an extended code is the code; 0 where it is no error of sqlite. */
export function sqliteCode(e: unknown): number {
  return e instanceof Error && "errcode" in e ? Number(e.errcode) & 0xff : 0;
}

/** Runs a write. NO_SPACE or UNAVAILABLE where the database could not be written, else what `fn` throws. */
export function inStore<T>(fn: () => T): T {
  try {
    return fn();
  } catch (e) {
    const code = sqliteCode(e);
    if (code !== SQLITE_FULL && !SQLITE_REFUSED.has(code)) throw e;
    const failure =
      code === SQLITE_FULL
        ? new AenvError("NO_SPACE", "the node cannot write its state: the disk of its data folder is full", {
            cause: e,
            hint: "Free disk space: kill sandboxes, delete snapshots, or make the disk larger. Ending a sandbox works meanwhile.",
          })
        : new AenvError("UNAVAILABLE", `the node cannot write its state: ${messageOf(e)}`, {
            cause: e,
            hint: "Look at the disk of the data folder (dmesg, aenv doctor). Ending a sandbox works meanwhile.",
          });
    failures.add(failure);
    throw failure;
  }
}

/** The database could not be written: the same write may succeed later. */
export function isStoreFailure(e: unknown): boolean {
  return typeof e === "object" && e !== null && failures.has(e);
}
