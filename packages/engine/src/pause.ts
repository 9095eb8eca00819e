import { AenvError, messageOf, type SandboxId } from "@aenv/base";
import { capture, type CapturePlan } from "./capture.ts";
import type { Context } from "./context.ts";
import { checkRoom, type Registry } from "./create.ts";
import { handOver } from "./hand-over.ts";
import { noMemory, takeMemory } from "./memory-stack.ts";
import { Phases } from "./phases.ts";
import type { Pools } from "./pools.ts";
import type { VmRun } from "./run.ts";
import { quiesce } from "./quiesce.ts";
import type { Phase, Sandbox } from "./sandbox.ts";
import type { PauseOptions, ResumeOptions } from "./types.ts";

interface Pause extends PauseOptions {
  /** Nobody asked for it: the node stops. */
  interrupted?: boolean;
}

/** Pause and resume: a sandbox out of its VM, and into another one. */
export class Pauser {
  readonly #ctx: Context;
  readonly #pools: Pools;
  readonly #registry: Registry;
  /** Of the last resume: told to all who waited for it. */
  readonly #failures = new WeakMap<Sandbox, AenvError>();

  constructor(ctx: Context, pools: Pools, registry: Registry) {
    this.#ctx = ctx;
    this.#pools = pools;
    this.#registry = registry;
  }

  /** False: it was paused already. Joins a pause that runs; waits for a resume that does. */
  async pause(sandbox: Sandbox, options: Pause, caller: AbortSignal): Promise<boolean> {
    const { pauses } = sandbox;
    for (;;) {
      const { phase } = sandbox;
      // The one that it joined; it may run again.
      if (sandbox.pauses > pauses) return true;
      switch (phase.t) {
        case "paused":
          return false;
        case "running": {
          // A capture that runs comes first: this one then stores what changed since.
          using _turn = await sandbox.captures.acquire(caller);
          if (sandbox.state === "running" && sandbox.pauses === pauses)
            return await this.#pause(sandbox, options, caller);
          break;
        }
        case "pausing":
        case "resuming":
        case "rewinding":
          await untilMoved(sandbox, phase, caller);
          break;
        case "creating":
        case "killing":
        case "gone":
          throw goneWhile(sandbox.id, "paused");
      }
    }
  }

  /** Joins a resume that runs; waits for a pause that does. False: it runs already. */
  async resume(sandbox: Sandbox, endAt: () => number, options: ResumeOptions, caller: AbortSignal): Promise<boolean> {
    for (let joined = false; ; ) {
      const { phase } = sandbox;
      switch (phase.t) {
        case "running":
          return joined;
        case "paused":
          await this.#resume(sandbox, endAt, options, caller);
          return true;
        case "resuming": {
          joined = true;
          await untilMoved(sandbox, phase, caller);
          const failure = this.#failures.get(sandbox);
          if (failure && sandbox.state === "paused") throw failure;
          break;
        }
        case "pausing":
        case "rewinding":
          await untilMoved(sandbox, phase, caller);
          break;
        case "creating":
        case "killing":
        case "gone":
          throw goneWhile(sandbox.id, "resumed");
      }
    }
  }

  async #pause(sandbox: Sandbox, options: Pause, caller: AbortSignal): Promise<boolean> {
    const ctx = this.#ctx;
    const { memory: keepMemory = true, requireHealthyGuest = false, interrupted = false } = options;
    const phases = new Phases(ctx.clock);
    const { run, abort, end } = sandbox.beginPause();
    try {
      const signal = AbortSignal.any([caller, abort.signal]);
      await ctx.step("pausing:after");
      await phases.time("quiesce", () =>
        quiesce(ctx, run, sandbox, { cause: "pause", sync: !keepMemory, mustAnswer: requireHealthyGuest }, signal),
      );
      let committed = (): void => {};
      await capture(
        ctx,
        run,
        {
          ...planOf(sandbox),
          memory: keepMemory ? takeMemory(ctx, run, false) : noMemory,
          after: "stay",
          builds: true,
          cause: "pause",
          durable: true,
          commit: (snapshot) => (committed = sandbox.pausedWith(snapshot, interrupted)),
        },
        phases,
        signal,
      );
      committed();
      this.#registry.events.runEnded(run, sandbox);
      await leave(ctx, run, "paused:after", phases);
      phases.mark("ended");
      ctx.logger.info({ sandbox: sandbox.id, ms: phases.totalMs, ...phases.phases }, "sandbox paused");
      ctx.config.onOperation?.(phases.timing("pause", sandbox.id));
      return true;
    } catch (e) {
      if (sandbox.state === "pausing") {
        sandbox.pauseFailed(run, e);
        this.#registry.follow(sandbox);
      }
      throw failureOf(sandbox, ["pause", "paused"], e, abort.signal, caller);
    } finally {
      end();
    }
  }

  async #resume(
    sandbox: Sandbox,
    endAt: () => number,
    { memory = true, autoPause }: ResumeOptions,
    caller: AbortSignal,
  ): Promise<void> {
    const ctx = this.#ctx;
    checkRoom(ctx, this.#registry);
    const phases = new Phases(ctx.clock);
    using _foreground = ctx.foreground.enter();
    const { abort, end } = sandbox.beginResume();
    this.#failures.delete(sandbox);
    try {
      // Whoever asked first may give up while others wait for the same: it goes on.
      const { signal } = abort;
      await ctx.step("resuming:after");
      const snapshot = ctx.state.snapshots.get(sandbox.snapshot.id) ?? sandbox.snapshot;
      const from = memory ? snapshot : { ...snapshot, memory: [] };
      const run = await this.#pools.launchAlone(from, phases, signal);
      await using undo = new AsyncDisposableStack();
      undo.defer(() => run.release());
      await handOver(ctx, run, sandbox, { cause: "resume" }, ctx.config.initDeadlineMs, phases, signal);
      await ctx.step("resume-commit:before");
      signal.throwIfAborted();
      sandbox.resumed(run, endAt(), autoPause);
      undo.move();
      this.#registry.follow(sandbox);
      ctx.logger.info({ sandbox: sandbox.id, ms: phases.totalMs, ...phases.phases }, "sandbox resumed");
      ctx.config.onOperation?.(phases.timing("resume", sandbox.id));
    } catch (e) {
      // For all who wait for it, whoever asked first.
      const failure = failureOf(sandbox, ["resume", "resumed"], e, abort.signal);
      this.#failures.set(sandbox, failure);
      if (sandbox.state === "resuming") sandbox.resumeFailed(e);
      throw failure;
    } finally {
      end();
    }
    caller.throwIfAborted();
  }
}

/** The VM of a state that the sandbox is not in any more. It is dead when this resolves; the rest is freed in the background. */
export async function leave(ctx: Context, run: VmRun, step: string, phases: Phases): Promise<void> {
  try {
    await ctx.step(step);
    await phases.time("end", () => run.killVm());
  } catch (e) {
    ctx.logger.warn({ run: run.id, error: messageOf(e) }, "a VM that is not needed any more did not end at once");
  }
  ctx.tasks.spawn("release", () => run.release());
}

/** What every capture of a sandbox has in common. */
export function planOf(sandbox: Sandbox): Pick<CapturePlan, "sandbox" | "diskBytes" | "defaults" | "envdVersion"> {
  const { diskBytes, defaults, envdVersion } = sandbox.snapshot;
  return { sandbox: sandbox.id, diskBytes, defaults, envdVersion };
}

/** What the caller of a transition is told that came to nothing. `abort`: of the transition. */
export function failureOf(
  { id }: Sandbox,
  [verb, past]: readonly [string, string],
  e: unknown,
  abort: AbortSignal,
  caller?: AbortSignal,
): AenvError {
  if (caller?.aborted) return AenvError.from(caller.reason, `${verb} sandbox ${id}`);
  const { reason } = abort as { reason?: unknown };
  // The server that stops ends transitions, not sandboxes.
  if (reason instanceof AenvError && reason.code === "UNAVAILABLE") return reason;
  return abort.aborted ? goneWhile(id, past, e) : AenvError.from(e, `${verb} sandbox ${id}`);
}

export function goneWhile(id: SandboxId, what: string, cause?: unknown): AenvError {
  return new AenvError("NOT_FOUND", `sandbox ${id} ended while it was to be ${what}`, {
    cause,
    data: { sandboxId: id },
  });
}

/** Waits for a transition's end. One that ended and changed nothing is told as INTERNAL: asking again would never end. */
export async function untilMoved(
  sandbox: Sandbox,
  phase: Phase & { done: Promise<void> },
  signal: AbortSignal,
): Promise<void> {
  await orAborted(phase.done, signal);
  if (sandbox.phase === phase)
    throw new AenvError("INTERNAL", `sandbox ${sandbox.id} ended to be ${phase.t} and is nothing else`);
}

/** Never rejects by `promise`. */
export function orAborted(promise: Promise<void>, signal: AbortSignal): Promise<void> {
  return new Promise((resolve, reject) => {
    const onAbort = (): void => reject(AenvError.from(signal.reason, "wait for another transition"));
    if (signal.aborted) return onAbort();
    signal.addEventListener("abort", onAbort, { once: true });
    void promise.finally(() => {
      signal.removeEventListener("abort", onAbort);
      resolve();
    });
  });
}
