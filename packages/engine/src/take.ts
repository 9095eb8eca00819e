import { AenvError } from "@aenv/base";
import type { SnapshotCause, SnapshotRecord } from "@aenv/state";
import { capture } from "./capture.ts";
import type { Context } from "./context.ts";
import { checkDisk } from "./disk-reserve.ts";
import { hasMemory, noMemory, takeMemory } from "./memory-stack.ts";
import { goneWhile, untilMoved, planOf } from "./pause.ts";
import { Phases } from "./phases.ts";
import { quiesce } from "./quiesce.ts";
import type { Sandbox } from "./sandbox.ts";

export interface TakeOptions {
  cause: SnapshotCause;
  /** False: the disk only, and the sandbox's next capture does not build on this one. */
  memory: boolean;
  /** The state survives a loss of power when this resolves. */
  durable: boolean;
  /** Part of the transaction from which on the state exists. */
  also?: (snapshot: SnapshotRecord) => void;
}

/**
 * The state of a sandbox as a snapshot. A running one is captured and goes on; of a paused one it is the state that it
 * waits in, and nothing is captured. Waits for a pause or resume that runs.
 */
export async function takeState(
  ctx: Context,
  sandbox: Sandbox,
  options: TakeOptions,
  caller: AbortSignal,
  phases = new Phases(ctx.clock),
): Promise<SnapshotRecord> {
  for (;;) {
    const { phase } = sandbox;
    switch (phase.t) {
      case "running": {
        checkDisk(ctx, "no state is captured");
        using _turn = await sandbox.captures.acquire(caller);
        if (sandbox.state === "running") return await captureRunning(ctx, sandbox, options, phases, caller);
        break;
      }
      case "paused": {
        const { snapshot } = sandbox;
        if (!options.memory && hasMemory(snapshot))
          throw new AenvError("CONFLICT", `sandbox ${sandbox.id} is paused with its memory`, {
            hint: "Resume it first: what its guest has not written to its disk yet is in that memory.",
          });
        ctx.state.tx(() => options.also?.(snapshot));
        return snapshot;
      }
      case "pausing":
      case "resuming":
      case "rewinding":
        await untilMoved(sandbox, phase, caller);
        break;
      case "creating":
      case "killing":
      case "gone":
        throw goneWhile(sandbox.id, "captured");
    }
  }
}

async function captureRunning(
  ctx: Context,
  sandbox: Sandbox,
  { cause, memory, durable, also }: TakeOptions,
  phases: Phases,
  caller: AbortSignal,
): Promise<SnapshotRecord> {
  const { run } = sandbox;
  if (!run) throw goneWhile(sandbox.id, "captured");
  try {
    await phases.time("quiesce", () => quiesce(ctx, run, sandbox, { cause, sync: !memory, mustAnswer: false }, caller));
    let committed = (): void => {};
    const snapshot = await capture(
      ctx,
      run,
      {
        ...planOf(sandbox),
        memory: memory ? takeMemory(ctx, run, true) : noMemory,
        after: "resume",
        builds: memory,
        cause,
        durable,
        commit: (taken) => {
          if (sandbox.run !== run) throw goneWhile(sandbox.id, "captured");
          if (memory) committed = sandbox.capturedAs(taken);
          also?.(taken);
        },
      },
      phases,
      caller,
    );
    committed();
    ctx.logger.info({ sandbox: sandbox.id, cause, ms: phases.totalMs, ...phases.phases }, "sandbox captured");
    return snapshot;
  } catch (e) {
    if (sandbox.state !== "running" && !caller.aborted) throw goneWhile(sandbox.id, "captured", e);
    throw AenvError.from(caller.aborted ? caller.reason : e, `capture sandbox ${sandbox.id}`);
  }
}
