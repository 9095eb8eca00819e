/** What of the data folder's disk is kept for what runs: sandboxes write to it, and a full disk stops them all. */
import { statfsSync } from "node:fs";
import { AenvError } from "@aenv/base";
import type { Context } from "./context.ts";

/** With less than this an operation that failed on a file has failed for want of space. */
const FULL_BYTES = 1024 * 1024;
const HINT =
  "Free disk space on the node: kill sandboxes, delete snapshots or templates, or make the disk larger; AENV_DISK_RESERVE sets the reserve.";

/** Bytes that the file system of `path` has left. */
export function freeBytes(path: string): number {
  const { bavail, bsize } = statfsSync(path);
  return bavail * bsize;
}

/** NO_SPACE where the disk has less than its reserve: nothing new is begun then. Ends, pauses and resumes are not asked. */
export function checkDisk(ctx: Context, what: string): void {
  const { diskReserveBytes, home } = ctx.config;
  const free = ctx.freeBytes(home);
  if (free >= diskReserveBytes) return;
  throw new AenvError(
    "NO_SPACE",
    `${what}: the node's disk has ${mib(free)} MiB left and keeps ${mib(diskReserveBytes)} MiB for the sandboxes that run`,
    { hint: HINT, data: { freeBytes: free, reserveBytes: diskReserveBytes } },
  );
}

/** Below the reserve: nothing is made that nobody asked for. */
export const isDiskLow = (ctx: Pick<Context, "freeBytes" | "config">): boolean =>
  ctx.freeBytes(ctx.config.home) < ctx.config.diskReserveBytes;

/** What failed because the disk is full, said so: a VMM tells of it in words of its own. undefined: it was something else. */
export function diskFull(ctx: Context, e: unknown): AenvError | undefined {
  const wrapped = AenvError.from(e, "write");
  if (wrapped.code !== "NO_SPACE" && (wrapped.code === "CANCELLED" || ctx.freeBytes(ctx.config.home) >= FULL_BYTES))
    return undefined;
  return new AenvError("NO_SPACE", `the node's disk is full: ${wrapped.message}`, { cause: e, hint: HINT });
}

const mib = (n: number): number => Math.floor(n / 1024 ** 2);
