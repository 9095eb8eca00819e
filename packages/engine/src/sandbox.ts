import { AenvError, messageOf, Mutex, type SnapshotId } from "@aenv/base";
import {
  LIFECYCLE,
  type SandboxRecord,
  type SandboxState,
  type SnapshotRecord,
  type TemplateRecord,
} from "@aenv/state";
import type { VmExit } from "@aenv/vmm";
import type { Context } from "./context.ts";
import { hasMemory } from "./memory-stack.ts";
import type { VmRun } from "./run.ts";

/**
 * The life of a sandbox. Only these moves are legal; a state without its row does not compile.
 * The states between two that last (creating, pausing, resuming, rewinding, killing) are single flight: who wants the same joins,
 * who wants another thing waits or is told.
 */
export const MOVES: Readonly<Record<SandboxState, readonly SandboxState[]>> = {
  creating: ["running", "gone"],
  running: ["pausing", "rewinding", "killing", "gone"],
  pausing: ["paused", "running", "killing", "gone"],
  paused: ["resuming", "rewinding", "killing"],
  resuming: ["running", "paused", "killing", "gone"],
  rewinding: ["running", "paused"],
  killing: ["gone"],
  gone: [],
};

/** What is there in each state, and nothing else. `done` resolves when the transition has ended, either way. */
export type Phase =
  | ({ t: "creating" } & Flight)
  | { t: "running"; run: VmRun }
  | ({ t: "pausing"; run: VmRun } & Flight)
  | { t: "paused" }
  | ({ t: "resuming" } & Flight)
  /** `run`: of the state that is left; undefined where it was paused. */
  | ({ t: "rewinding"; run: VmRun | undefined } & Flight)
  | { t: "killing"; done: Promise<void> }
  | { t: "gone"; cause: string };

/** A transition that a kill can cut short. */
export interface Flight {
  abort: AbortController;
  done: Promise<void>;
}

/** What a sandbox tells the engine. */
export interface SandboxEvents {
  /** The VM of a run is about to end, or has ended. */
  runEnded(run: VmRun, sandbox: Sandbox): void;
  gone(sandbox: Sandbox): void;
}

export interface SandboxSource {
  record: SandboxRecord;
  template: TemplateRecord;
  snapshot: SnapshotRecord;
}

/** One sandbox. #set is the only place that changes its state: table, database, log and listeners in one. */
export class Sandbox {
  readonly record: SandboxRecord;
  readonly template: TemplateRecord;
  /** One capture at a time. */
  readonly captures = new Mutex();
  readonly #ctx: Context;
  readonly #events: SandboxEvents;
  /** How often it was paused in this life of the server. */
  pauses = 0;
  /** The run that its last rewind made, and of which state. */
  lastRewind: { run: VmRun; to: SnapshotId } | undefined;
  #snapshot: SnapshotRecord;
  #phase: Phase;

  private constructor(ctx: Context, source: SandboxSource, phase: Phase, events: SandboxEvents) {
    this.#ctx = ctx;
    this.record = source.record;
    this.template = source.template;
    this.#snapshot = source.snapshot;
    this.#phase = phase;
    this.#events = events;
  }

  /** Writes the intent; the sandbox is not visible before `launched`. */
  static creating(ctx: Context, source: SandboxSource, flight: Flight, events: SandboxEvents): Sandbox {
    ctx.state.sandboxes.insert(source.record);
    return new Sandbox(ctx, source, { t: "creating", ...flight }, events);
  }

  /** After a restart of the server: with a VM that went on, or paused. */
  static adopted(ctx: Context, source: SandboxSource, run: VmRun | undefined, events: SandboxEvents): Sandbox {
    const sandbox = new Sandbox(ctx, source, run ? { t: "running", run } : { t: "paused" }, events);
    if (run) sandbox.#watch(run);
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
  /** Its latest captured state: what it was launched from, or would be launched from now. */
  get snapshot(): SnapshotRecord {
    return this.#snapshot;
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
      this.#event("info", LIFECYCLE.created, { template: this.template.name, run: run.id })();
      also?.();
    });
    this.#watch(run);
  }

  /** creating -> gone. */
  failed(cause: unknown): void {
    const why = messageOf(cause);
    this.#setSurely(
      { t: "gone", cause: why },
      this.#ended(`create-failed: ${why}`, "error", "sandbox was not created"),
    );
  }

  /** What it may reach from now on, in this run and in later ones. */
  setEgress(rules: Required<Pick<SandboxRecord, "allowInternetAccess" | "network">>): void {
    this.#ctx.state.sandboxes.setNetwork(this.id, rules.allowInternetAccess, rules.network);
    Object.assign(this.record, rules);
  }

  /** running -> pausing. The returned function ends the transition for those who wait for it. */
  beginPause(): { run: VmRun; abort: AbortController; end: () => void } {
    const { run } = this;
    if (!run) throw new AenvError("INTERNAL", `sandbox ${this.id} does not run`);
    const { promise: done, resolve } = Promise.withResolvers<void>();
    const abort = new AbortController();
    this.#set({ t: "pausing", run, abort, done }, () => {});
    return { run, abort, end: resolve };
  }

  /** pausing -> paused, in the transaction that commits the snapshot. Returns what to do once that is committed. */
  pausedWith(snapshot: SnapshotRecord, interrupted: boolean): () => void {
    return this.#prepareSet(
      { t: "paused" },
      () => {
        this.#ctx.state.sandboxes.setSnapshot(this.id, snapshot.id);
        this.#ctx.state.sandboxes.setInterrupted(this.id, interrupted);
        this.#event("info", LIFECYCLE.paused, { snapshot: snapshot.id, memory: hasMemory(snapshot) })();
      },
      () => {
        this.pauses++;
        this.record.interrupted = interrupted;
        this.#tookSnapshot(snapshot);
      },
    );
  }

  /** Its time is over: from now on it is paused as if that had been asked for. */
  settle(): void {
    this.record.interrupted = false;
    this.#ctx.state.surely(() => this.#ctx.state.sandboxes.setInterrupted(this.id, false));
  }

  /** pausing -> running: nothing has changed. */
  pauseFailed(run: VmRun, why: unknown): void {
    this.#setSurely({ t: "running", run }, this.#event("error", "sandbox was not paused", { error: messageOf(why) }));
  }

  /** paused -> resuming. */
  beginResume(): { abort: AbortController; end: () => void } {
    const { promise: done, resolve } = Promise.withResolvers<void>();
    const abort = new AbortController();
    this.#set({ t: "resuming", abort, done }, () => {});
    return { abort, end: resolve };
  }

  /** resuming -> running. */
  resumed(run: VmRun, endAt: number, autoPause: boolean | undefined): void {
    this.#set({ t: "running", run }, () => {
      this.record.interrupted = false;
      this.#ctx.state.sandboxes.setInterrupted(this.id, false);
      if (autoPause !== undefined) {
        this.record.onTimeout = autoPause ? "pause" : "kill";
        this.#ctx.state.sandboxes.setOnTimeout(this.id, this.record.onTimeout);
      }
      this.record.endAt = endAt;
      this.#ctx.state.sandboxes.setTimes(this.id, this.record.startedAt, endAt);
      this.#event("info", LIFECYCLE.resumed, { run: run.id, snapshot: this.#snapshot.id })();
    });
    this.#watch(run);
  }

  /** resuming -> paused: it can be tried again. */
  resumeFailed(why: unknown): void {
    this.#setSurely({ t: "paused" }, this.#event("error", "sandbox was not resumed", { error: messageOf(why) }));
  }

  /** running or paused -> rewinding. The run stays its own until `rewound`. */
  beginRewind(): { run: VmRun | undefined; abort: AbortController; end: () => void } {
    const { run } = this;
    const { promise: done, resolve } = Promise.withResolvers<void>();
    const abort = new AbortController();
    this.#set({ t: "rewinding", run, abort, done }, () => {});
    return { run, abort, end: resolve };
  }

  /** rewinding -> running, in another VM. */
  rewound(run: VmRun, snapshot: SnapshotRecord, endAt: number): void {
    const { startedAt } = this.record;
    const also = (): void => {
      this.#ctx.state.sandboxes.setSnapshot(this.id, snapshot.id);
      this.#ctx.state.sandboxes.setTimes(this.id, startedAt, endAt);
      this.#ctx.state.sandboxes.setInterrupted(this.id, false);
      this.#event("info", "sandbox rewound", { run: run.id, snapshot: snapshot.id })();
    };
    this.#set({ t: "running", run }, also, () => {
      this.record.endAt = endAt;
      this.record.interrupted = false;
      this.lastRewind = { run, to: snapshot.id };
      this.#tookSnapshot(snapshot);
    });
    this.#watch(run);
  }

  /** rewinding -> what it was before. */
  rewindFailed(run: VmRun | undefined, why: unknown): void {
    const event = this.#event("error", "sandbox was not rewound", { error: messageOf(why) });
    this.#setSurely(run ? { t: "running", run } : { t: "paused" }, event);
    // An end meanwhile was nobody's business.
    if (run) this.#watch(run);
  }

  /** A capture of it while it goes on, in the capture's transaction. Returns what to do once that is committed. */
  capturedAs(snapshot: SnapshotRecord): () => void {
    this.#ctx.state.sandboxes.setSnapshot(this.id, snapshot.id);
    return () => this.#tookSnapshot(snapshot);
  }

  /** Also on a full disk: an earlier end is what frees it. */
  setEnd(endAt: number): void {
    this.record.endAt = endAt;
    const { startedAt } = this.record;
    this.#ctx.state.surely(() => this.#ctx.state.sandboxes.setTimes(this.id, startedAt, endAt));
  }

  /**
   * Ends it; resolves when its VM is dead, the rest is freed in the background. False when it had ended or another kill
   * was first (then it resolves when that one is done).
   */
  async kill(cause: string): Promise<boolean> {
    for (;;) {
      const phase = this.#phase;
      switch (phase.t) {
        case "running":
        case "paused":
          await this.#kill(cause);
          return true;
        case "pausing":
          phase.abort.abort(new AenvError("CANCELLED", `sandbox ${this.id} was killed while it was paused`));
          await this.#kill(cause);
          return true;
        case "creating":
        case "resuming":
        case "rewinding":
          phase.abort.abort(new AenvError("CANCELLED", `sandbox ${this.id} was killed while it was ${phase.t}`));
          await phase.done;
          // It may have been past the last moment at which it could be stopped.
          if (this.state === "gone") return true;
          if (this.#phase === phase)
            throw new AenvError("INTERNAL", `sandbox ${this.id} ended to be ${phase.t} and is nothing else`);
          break;
        case "killing":
          await phase.done;
          return false;
        case "gone":
          return false;
      }
    }
  }

  async #kill(cause: string): Promise<void> {
    const run = this.#phase.t === "running" || this.#phase.t === "pausing" ? this.#phase.run : undefined;
    const { promise: done, resolve } = Promise.withResolvers<void>();
    this.#setSurely({ t: "killing", done }, () => this.#ctx.state.sandboxes.setCause(this.id, cause));
    if (run) {
      this.#events.runEnded(run, this);
      try {
        await run.killVm();
      } catch (e) {
        this.#ctx.logger.error({ sandbox: this.id, run: run.id, error: messageOf(e) }, "kill of a VM failed");
      }
      // release() tries again to kill what did not die, and frees nothing before.
      this.#ctx.tasks.spawn("release", () => run.release());
    }
    try {
      this.#setSurely({ t: "gone", cause }, this.#ended(cause, "info", LIFECYCLE.killed));
    } finally {
      resolve();
    }
  }

  #watch(run: VmRun): void {
    void run.vm.exited.then((exit) => this.#onExit(run, exit));
  }

  /** Its VM ended though nobody asked: it is over, with its cause. The run is pinned: a later one is not touched. */
  #onExit(run: VmRun, exit: VmExit): void {
    const phase = this.#phase;
    if ((phase.t !== "running" && phase.t !== "pausing") || phase.run !== run) return;
    if (phase.t === "pausing")
      phase.abort.abort(new AenvError("VMM_FAILED", `its virtual machine ended: ${exit.cause}`));
    this.#ctx.tasks.spawn("release", async () => {
      this.#setSurely(
        { t: "gone", cause: exit.cause },
        this.#ended(exit.cause, "error", LIFECYCLE.died, { detail: exit.detail }),
      );
      this.#events.runEnded(run, this);
      const console = await run.consoleTail();
      if (console) this.#ctx.state.surely(this.#event("info", "last lines of its console", { console }));
      await run.release();
    });
  }

  /** A move that somebody wants: it does not happen where it cannot be recorded. */
  #set(next: Phase, also: () => void, then?: () => void): void {
    this.#ctx.state.tx(() => this.#prepareSet(next, also, then))();
  }

  /** A move that happens whether its record can be written now or later: an end, or the way back to what was. */
  #setSurely(next: Phase, also: () => void): void {
    const { write, after } = this.#move(next, also);
    this.#ctx.state.surely(write);
    after();
  }

  /** The part of a move that belongs into a transaction. Returns the rest, for after it. */
  #prepareSet(next: Phase, also: () => void, then?: () => void): () => void {
    const move = this.#move(next, also, then);
    move.write();
    return move.after;
  }

  #move(next: Phase, also: () => void, then?: () => void): { write: () => void; after: () => void } {
    const from = this.#phase.t;
    if (!MOVES[from].includes(next.t))
      throw new AenvError("INTERNAL", `sandbox ${this.id} cannot go from ${from} to ${next.t}`);
    const run = "run" in next ? next.run?.id : next.t === "killing" ? this.record.run : undefined;
    return {
      write: () => {
        this.#ctx.state.sandboxes.setState(this.id, next.t, run);
        also();
      },
      after: () => {
        this.#phase = next;
        this.record.state = next.t;
        if (run === undefined) delete this.record.run;
        else this.record.run = run;
        then?.();
        this.#ctx.logger.info({ sandbox: this.id, run, from, to: next.t }, "sandbox moved");
        if (next.t === "gone") this.#events.gone(this);
      },
    };
  }

  #tookSnapshot(snapshot: SnapshotRecord): void {
    this.#snapshot = snapshot;
    this.record.snapshot = snapshot.id;
  }

  /** What to write about an end that is now. */
  #ended(cause: string, level: "info" | "error", message: string, fields: Record<string, unknown> = {}): () => void {
    const at = this.#ctx.clock.now();
    const event = this.#event(level, message, { cause, ...fields });
    return () => {
      this.#ctx.state.sandboxes.end(this.id, at, cause);
      this.#ctx.state.checkpoints.removeOf(this.id);
      event();
    };
  }

  /** What to write about something that happens now. */
  #event(level: "info" | "error", message: string, fields: Record<string, unknown>): () => void {
    const timestamp = this.#ctx.clock.now();
    return () => this.#ctx.state.events.add(this.id, { timestamp, level, message, fields });
  }
}
