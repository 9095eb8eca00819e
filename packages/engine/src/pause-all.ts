import { AenvError, messageOf, type SandboxId, type Semaphore } from "@aenv/base";
import type { Context } from "./context.ts";
import type { Pauser } from "./pause.ts";
import type { Sandbox } from "./sandbox.ts";

export interface PausedAll {
  paused: number;
  /** They go on running; why each of them was not paused. */
  left: { sandboxId: SandboxId; error: AenvError }[];
}

interface Rooms {
  pauser: Pauser;
  live: ReadonlyMap<SandboxId, Sandbox>;
  turns: Semaphore;
}

/** Nothing is created or resumed any more when this is called. */
export async function pauseAll(ctx: Context, { pauser, live, turns }: Rooms, signal: AbortSignal): Promise<PausedAll> {
  // Who waits for these is told; who is paused stays so.
  for (const { phase } of live.values())
    if (phase.t === "creating" || phase.t === "resuming" || phase.t === "rewinding")
      phase.abort.abort(new AenvError("UNAVAILABLE", "the server is stopping"));
  const result: PausedAll = { paused: 0, left: [] };
  await Promise.all(
    [...live.values()].map(async (sandbox) => {
      try {
        if (await turns.run(() => pauseOne(pauser, sandbox, signal), signal)) result.paused++;
      } catch (e) {
        if (sandbox.state === "gone" || sandbox.state === "killing") return;
        const error = AenvError.from(e, `pause sandbox ${sandbox.id}`);
        result.left.push({ sandboxId: sandbox.id, error });
        ctx.logger.warn({ sandbox: sandbox.id, error: messageOf(error) }, "a sandbox was not paused; it goes on");
      }
    }),
  );
  return result;
}

/** False: there was nothing to pause. */
async function pauseOne(pauser: Pauser, sandbox: Sandbox, signal: AbortSignal): Promise<boolean> {
  for (;;) {
    const { phase } = sandbox;
    switch (phase.t) {
      case "paused":
      case "gone":
        return false;
      case "running":
      case "pausing":
        return await pauser.pause(sandbox, { interrupted: true }, signal);
      case "creating":
      case "resuming":
      case "rewinding":
      case "killing":
        await phase.done;
        if (sandbox.phase === phase) return false;
    }
  }
}
