import { AenvError, deadline, messageOf } from "@aenv/base";
import type { SnapshotCause } from "@aenv/state";
import type { Context } from "./context.ts";
import { runHooks } from "./hooks.ts";
import type { VmRun } from "./run.ts";
import type { Sandbox } from "./sandbox.ts";

/** Dirty pages of a busy guest go to the disk: much more than hooks or an idle guest take. */
const SYNC_DEADLINE_MS = 60_000;

/**
 * The guest gets ready for a capture: its hooks run. `mustAnswer`: UNAVAILABLE where its agent does not. `sync`: its file systems are on the disk afterwards, which is all that is kept of
 * it; a guest that cannot say so is not captured.
 */
export async function quiesce(
  ctx: Context,
  run: VmRun,
  sandbox: Sandbox,
  { cause, sync, mustAnswer }: { cause: SnapshotCause; sync: boolean; mustAnswer: boolean },
  parent: AbortSignal,
): Promise<void> {
  const answered = await runHooks(ctx, run, sandbox, { phase: "pre-snapshot", cause }, parent);
  if (mustAnswer && !answered) throw new AenvError("UNAVAILABLE", `the agent of sandbox ${sandbox.id} does not answer`);
  if (!sync) return;
  const guest = ctx.guestFactory({
    host: run.slot.hostIp,
    ...(sandbox.record.secure ? { accessToken: ctx.tokens.access(sandbox.id) } : {}),
  });
  try {
    const { exitCode, stderr } = await guest.exec({ cmd: "sync", user: "root" }, deadline(SYNC_DEADLINE_MS, parent));
    if (exitCode !== 0) throw new AenvError("GUEST_FAILED", `sync ended with ${exitCode}: ${stderr.slice(0, 500)}`);
  } catch (e) {
    parent.throwIfAborted();
    throw new AenvError("GUEST_FAILED", `the guest did not write its files to its disk: ${messageOf(e)}`, { cause: e });
  } finally {
    guest.close();
  }
}
