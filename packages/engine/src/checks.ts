import { AenvError, type SandboxId } from "@aenv/base";
import type { SandboxRecord } from "@aenv/state";
import type { CreateOptions } from "./types.ts";

export function notFound(id: SandboxId, record?: SandboxRecord): AenvError {
  const cause = record?.state === "gone" ? record.cause : undefined;
  return new AenvError("NOT_FOUND", `sandbox ${id} not found${cause === undefined ? "" : `: it ended (${cause})`}`, {
    data: { sandboxId: id, ...(cause === undefined ? {} : { cause, endedAt: record?.endedAt }) },
  });
}

export function checkTimeout(ms: number, max: number): void {
  if (!Number.isFinite(ms) || ms > max)
    throw new AenvError("INVALID_ARGUMENT", `a timeout is at most ${Math.floor(max / 1000)} s`);
}

/** Of something that starts to run: it has to be more than nothing. */
export function checkLifetime(ms: number, max: number): void {
  checkTimeout(ms, max);
  if (ms <= 0) throw new AenvError("INVALID_ARGUMENT", "the timeout must be more than 0");
}

export function checkCreate(options: CreateOptions, maxTimeoutMs: number): void {
  checkLifetime(options.timeoutMs, maxTimeoutMs);
  if (options.autoPause === true) return;
  if (options.autoResume === true)
    throw new AenvError("INVALID_ARGUMENT", "autoResume needs autoPause: only a paused sandbox can be resumed");
}
