import { AenvError, messageOf } from "@aenv/base";
import type { SandboxRecord, SandboxState, SnapshotRecord, TemplateRecord } from "@aenv/state";
import type { VmExit } from "@aenv/vmm";
import type { Context } from "./context.ts";
import type { VmRun } from "./run.ts";

/**
 * The life of a sandbox. Only these moves are legal; a state without its row does not compile.
 * The states between two that last (creating, pausing, resuming, killing) are single flight: who wants the same joins,
 * who wants another thing waits or is told.
 */
export const MOVES: Readonly<Record<SandboxState, readonly SandboxState[]>> = {
  creating: ["running", "gone"],
  running: ["pausing", "killing", "gone"],
  pausing: ["paused", "running", "killing", "gone"],
  paused: ["resuming", "killing"],
  resuming: ["running", "paused", "killing", "gone"],
  killing: ["gone"],
  gone: [],
};

/** What is there in each state, and nothing else. */
export type Phase =
  | { t: "creating"; abort: AbortController; done: Promise<void> }
  | { t: "running"; run: VmRun }
  | { t: "killing"; done: Promise<void> }
  | { t: "gone"; cause: string };

/** One sandbox. #set is the only place that changes its state: table, database, log and listeners in one. */
export class Sandbox {
  readonly record: SandboxRecord;
  readonly template: TemplateRecord;
  readonly snapshot: SnapshotRecord;
  readonly #ctx: Context;
  readonly #onRunEnded: (run: VmRun, sandbox: Sandbox) => void;
  #phase: Phase;

  private constructor(
    ctx: Context,
    source: { record: SandboxRecord; template: TemplateRecord; snapshot: SnapshotRecord },
    phase: Phase,
    onRunEnded: (run: VmRun, sandbox: Sandbox) => void,
  ) {
    this.#ctx = ctx;
    this.record = source.record;
    this.template = source.template;
    this.snapshot = source.snapshot;
    this.#phase = phase;
    this.#onRunEnded = onRunEnded;
  }

  /** Writes the intent; the sandbox is not visible before `launched`. */
  static creating(
    ctx: Context,
    source: { record: SandboxRecord; template: TemplateRecord; snapshot: SnapshotRecord },
    flight: { abort: AbortController; done: Promise<void> },
    onRunEnded: (run: VmRun, sandbox: Sandbox) => void,
  ): Sandbox {
    ctx.state.sandboxes.insert(source.record);
    return new Sandbox(ctx, source, { t: "creating", ...flight }, onRunEnded);
  }

  /** After a restart of the server, with a VM that went on. */
  static adopted(
    ctx: Context,
    source: { record: SandboxRecord; template: TemplateRecord; snapshot: SnapshotRecord },
    run: VmRun,
    onRunEnded: (run: VmRun, sandbox: Sandbox) => void,
  ): Sandbox {
    const sandbox = new Sandbox(ctx, source, { t: "running", run }, onRunEnded);
    sandbox.#watch(run);
    return sandbox;
  }

  get id(): SandboxRecord["id"] {
    return this.record.id;
  }
  get phase(): Phase {
    return this.#phase;
  }
  get state(): SandboxState {
    return this.#phase.t;
  }
  /** The run it lives in now, if any. */
  get run(): VmRun | undefined {
    return this.#phase.t === "running" ? this.#phase.run : undefined;
  }

  /** creating -> running: from here on it is visible. `also` is part of the same transaction. */
  launched(run: VmRun, startedAt: number, endAt: number, also?: () => void): void {
    this.#set({ t: "running", run }, () => {
      this.record.startedAt = startedAt;
      this.record.endAt = endAt;
      this.#ctx.state.sandboxes.setTimes(this.id, startedAt, endAt);
      this.#event("info", "sandbox created", { template: this.template.name, run: run.id });
      also?.();
    });
    this.#watch(run);
  }

  /** creating -> gone. */
  failed(cause: unknown): void {
    const why = messageOf(cause);
    this.#set({ t: "gone", cause: why }, () =>
      this.#ended(`create-failed: ${why}`, "error", "sandbox was not created"),
    );
  }

  /** What it may reach from now on, in this run and in later ones. */
  setEgress(rules: Required<Pick<SandboxRecord, "allowInternetAccess" | "network">>): void {
    Object.assign(this.record, rules);
    this.#ctx.state.sandboxes.setNetwork(this.id, rules.allowInternetAccess, rules.network);
  }

  setEnd(endAt: number): void {
    this.record.endAt = endAt;
    this.#ctx.state.sandboxes.setTimes(this.id, this.record.startedAt, endAt);
  }

  /**
   * Ends it; resolves when its VM is dead, the rest is freed in the background. False when it had ended or another kill
   * was first (then it resolves when that one is done).
   */
  async kill(cause: string): Promise<boolean> {
    const phase = this.#phase;
    if (phase.t === "running") {
      await this.#kill(phase.run, cause);
      return true;
    }
    if (phase.t === "creating") {
      phase.abort.abort(new AenvError("CANCELLED", `sandbox ${this.id} was killed while it was created`));
      await phase.done;
      // It may have been past the last moment at which it could be stopped.
      return this.state === "gone" || (await this.kill(cause));
    }
    if (phase.t === "killing") await phase.done;
    return false;
  }

  async #kill(run: VmRun, cause: string): Promise<void> {
    const { promise: done, resolve } = Promise.withResolvers<void>();
    this.#set({ t: "killing", done }, () => this.#ctx.state.sandboxes.setCause(this.id, cause));
    this.#onRunEnded(run, this);
    try {
      await run.killVm();
    } catch (e) {
      this.#ctx.logger.error({ sandbox: this.id, run: run.id, error: messageOf(e) }, "kill of a VM failed");
    }
    // release() tries again to kill what did not die, and frees nothing before.
    this.#ctx.tasks.spawn("release", () => run.release());
    try {
      this.#set({ t: "gone", cause }, () => this.#ended(cause, "info", "sandbox ended"));
    } finally {
      resolve();
    }
  }

  #watch(run: VmRun): void {
    void run.vm.exited.then((exit) => this.#onExit(run, exit));
  }

  /** Its VM ended though nobody asked: it is over, with its cause. The run is pinned: a later one is not touched. */
  #onExit(run: VmRun, exit: VmExit): void {
    if (this.#phase.t !== "running" || this.#phase.run !== run) return;
    this.#ctx.tasks.spawn("release", async () => {
      this.#set({ t: "gone", cause: exit.cause }, () =>
        this.#ended(exit.cause, "error", "sandbox ended: its virtual machine is gone", { detail: exit.detail }),
      );
      this.#onRunEnded(run, this);
      const console = await run.consoleTail();
      if (console) this.#event("info", "last lines of its console", { console });
      await run.release();
    });
  }

  #set(next: Phase, also: () => void): void {
    const from = this.#phase.t;
    if (!MOVES[from].includes(next.t))
      throw new AenvError("INTERNAL", `sandbox ${this.id} cannot go from ${from} to ${next.t}`);
    const run = next.t === "running" ? next.run.id : this.record.run;
    this.#ctx.state.tx(() => {
      this.#ctx.state.sandboxes.setState(this.id, next.t, run);
      also();
    });
    this.#phase = next;
    this.record.state = next.t;
    if (next.t === "running") this.record.run = next.run.id;
    this.#ctx.logger.info({ sandbox: this.id, run, from, to: next.t }, "sandbox moved");
  }

  #ended(cause: string, level: "info" | "error", message: string, fields: Record<string, unknown> = {}): void {
    this.#ctx.state.sandboxes.end(this.id, this.#ctx.clock.now(), cause);
    this.#event(level, message, { cause, ...fields });
  }

  #event(level: "info" | "error", message: string, fields: Record<string, unknown>): void {
    this.#ctx.state.events.add(this.id, { timestamp: this.#ctx.clock.now(), level, message, fields });
  }
}
