import { deadline, messageOf } from "@aenv/base";
import type { SnapshotRecord } from "@aenv/state";
import { CAPTURE_DEADLINE_MS } from "./capture.ts";
import type { Context } from "./context.ts";
import { checkRoom, type Registry } from "./create.ts";
import { handOver } from "./hand-over.ts";
import { failureOf, goneWhile, leave, untilMoved } from "./pause.ts";
import { Phases } from "./phases.ts";
import type { Pools } from "./pools.ts";
import type { VmRun } from "./run.ts";
import type { Sandbox } from "./sandbox.ts";

/** To a VMM that answers: a few ms. One that does not is ended later in any case. */
const STOP_DEADLINE_MS = 5000;

/**
 * In place: the sandbox goes on from another of its states, in another VM. The VM that it lived in stands still
 * meanwhile, is ended once the other one runs, and goes on when it does not. Joins a rewind to the same state; waits for
 * every other transition.
 */
export async function rewind(
  ctx: Context,
  rooms: { pools: Pools; registry: Registry },
  sandbox: Sandbox,
  to: SnapshotRecord,
  caller: AbortSignal,
): Promise<void> {
  const { lastRewind } = sandbox;
  for (;;) {
    const { phase } = sandbox;
    const last = sandbox.lastRewind;
    // The one that it joined.
    if (last && last !== lastRewind && last.to === to.id && sandbox.run === last.run) return;
    switch (phase.t) {
      case "running": {
        // A capture that runs comes first.
        using _turn = await sandbox.captures.acquire(caller);
        if (sandbox.state === "running" && sandbox.lastRewind === last)
          return await go(ctx, rooms, sandbox, to, caller);
        break;
      }
      case "paused":
        checkRoom(ctx, rooms.registry);
        return await go(ctx, rooms, sandbox, to, caller);
      case "rewinding":
      case "pausing":
      case "resuming":
        await untilMoved(sandbox, phase, caller);
        break;
      case "creating":
      case "killing":
      case "gone":
        throw goneWhile(sandbox.id, "rewound");
    }
  }
}

async function go(
  ctx: Context,
  { pools, registry }: { pools: Pools; registry: Registry },
  sandbox: Sandbox,
  to: SnapshotRecord,
  caller: AbortSignal,
): Promise<void> {
  const phases = new Phases(ctx.clock);
  using _foreground = ctx.foreground.enter();
  const { run: before, abort, end } = sandbox.beginRewind();
  try {
    const signal = AbortSignal.any([caller, abort.signal]);
    await ctx.step("rewinding:after");
    if (before) await phases.time("stop", () => standStill(ctx, before, signal));
    await ctx.step("rewind-stop:after");
    // Compaction may have put it into other files since.
    const snapshot = ctx.state.snapshots.get(to.id) ?? to;
    const run = await pools.launchAlone(snapshot, phases, signal);
    await using undo = new AsyncDisposableStack();
    undo.defer(() => run.release());
    const { id, record } = sandbox;
    const limitMs = ctx.config.initDeadlineMs;
    await handOver(ctx, run, { id, record, snapshot }, { cause: "rewind" }, limitMs, phases, signal);
    await ctx.step("rewind-commit:before");
    signal.throwIfAborted();
    const timed = before !== undefined || record.interrupted;
    const endAt = timed ? record.endAt : ctx.clock.now() + ctx.config.trafficTimeoutMs;
    sandbox.rewound(run, snapshot, endAt);
    undo.move();
    if (before) registry.events.runEnded(before, sandbox);
    registry.follow(sandbox);
    if (before) await leave(ctx, before, "rewound:after", phases);
    ctx.logger.info({ sandbox: id, ms: phases.totalMs, ...phases.phases }, "sandbox rewound");
    ctx.config.onOperation?.(phases.timing("rewind", id));
  } catch (e) {
    if (sandbox.state === "rewinding") {
      if (before) await goOn(ctx, before);
      sandbox.rewindFailed(before, e);
      registry.follow(sandbox);
    }
    throw failureOf(sandbox, ["rewind", "rewound"], e, abort.signal, caller);
  } finally {
    end();
  }
}

/** What it does from now on would be lost, and must have no effect. A VMM that does not answer is no reason to stay in it. */
async function standStill(ctx: Context, run: VmRun, signal: AbortSignal): Promise<void> {
  try {
    await run.vm.stop(deadline(STOP_DEADLINE_MS, signal));
  } catch (e) {
    signal.throwIfAborted();
    ctx.logger.warn({ run: run.id, error: messageOf(e) }, "a VM did not stop for a rewind");
  }
}

async function goOn(ctx: Context, run: VmRun): Promise<void> {
  try {
    await run.vm.resume(deadline(CAPTURE_DEADLINE_MS));
  } catch (e) {
    ctx.logger.warn({ run: run.id, error: messageOf(e) }, "a VM did not go on after a failed rewind");
  }
}
