import { AenvError, messageOf, newSandboxId, type SandboxId } from "@aenv/base";
import { DEFAULT_TEAM, type SandboxRecord } from "@aenv/state";
import type { Context } from "./context.ts";
import { checkDisk } from "./disk-reserve.ts";
import { egressRules } from "./egress.ts";
import { handOver } from "./hand-over.ts";
import type { Identity } from "./launch.ts";
import { Phases } from "./phases.ts";
import type { Pools } from "./pools.ts";
import { settleAll, type VmRun } from "./run.ts";
import { Sandbox, type SandboxEvents } from "./sandbox.ts";
import type { Source, TemplateStore } from "./templates.ts";
import type { CreateOptions, Operation, SandboxView } from "./types.ts";

/** Breakdowns of the latest creates that are kept. */
const TIMINGS_KEPT = 1000;

/** The engine's sandboxes, for the rooms that move them. */
export interface Registry {
  readonly live: Map<SandboxId, Sandbox>;
  readonly events: SandboxEvents;
  /** It runs from now on: its end and its metrics are watched. */
  follow(sandbox: Sandbox): void;
  view(sandbox: Sandbox, state?: "running"): SandboxView;
}

/** RATE_LIMITED where one more would be too many. */
export function checkRoom(ctx: Context, registry: Registry, more = 1): void {
  let running = 0;
  for (const s of registry.live.values()) if (s.state !== "paused") running++;
  if (running + more > ctx.config.maxSandboxes)
    throw new AenvError("RATE_LIMITED", `this node runs at most ${ctx.config.maxSandboxes} sandboxes`, {
      hint: "Kill or pause sandboxes that are not needed.",
    });
}

/** A sandbox that is about to be: what it is, and what it is launched from. */
export interface Birth {
  record: SandboxRecord;
  source: Source;
  cause: "create" | "fork";
  fork?: Identity["fork"];
  /** False: its state is not worth keeping spares for. */
  spares: boolean;
  timeoutMs: number;
  /** Its VM runs: what resolves before its guest is asked for anything. */
  launched?: () => Promise<void>;
  /** Part of the transaction that makes it visible. */
  commit?: (view: SandboxView) => void;
}

/** From a request to a running sandbox. */
export class Creator {
  readonly #ctx: Context;
  readonly #store: TemplateStore;
  readonly #pools: Pools;
  readonly #registry: Registry;
  readonly #timings = new Map<SandboxId, Operation>();

  constructor(ctx: Context, rooms: { store: TemplateStore; pools: Pools }, registry: Registry) {
    this.#ctx = ctx;
    this.#store = rooms.store;
    this.#pools = rooms.pools;
    this.#registry = registry;
  }

  timing(id: SandboxId): Operation | undefined {
    return this.#timings.get(id);
  }

  /** One sandbox, visible when this resolves; when it rejects nothing of it is left. `commit` is part of the transaction. */
  async create(
    options: CreateOptions,
    caller: AbortSignal,
    commit?: (view: SandboxView) => void,
  ): Promise<SandboxView> {
    const source = this.#store.source(options.template, options.team);
    checkRoom(this.#ctx, this.#registry);
    checkDisk(this.#ctx, "no sandbox is made");
    const birth: Birth = {
      record: this.#newRecord(options, source),
      source,
      cause: "create",
      spares: true,
      timeoutMs: options.timeoutMs,
      commit: (view) => {
        const now = this.#ctx.clock.now();
        this.#ctx.state.templates.countSpawn(source.template.id, now);
        this.#ctx.state.saved.countSpawn(source.template.id, now);
        commit?.(view);
      },
    };
    try {
      return await this.bring(birth, caller);
    } catch (e) {
      throw AenvError.from(caller.aborted ? caller.reason : e, `create sandbox from ${options.template}`);
    }
  }

  /** As create, of a record that is there already. */
  async bring(birth: Birth, caller: AbortSignal): Promise<SandboxView> {
    const { record, source, timeoutMs, commit } = birth;
    const phases = new Phases(this.#ctx.clock);
    using _foreground = this.#ctx.foreground.enter();
    const abort = new AbortController();
    const { promise: done, resolve } = Promise.withResolvers<void>();
    const sandbox = Sandbox.creating(this.#ctx, { ...source, record }, { abort, done }, this.#registry.events);
    this.#registry.live.set(sandbox.id, sandbox);
    try {
      const signal = AbortSignal.any([caller, abort.signal]);
      const run = await this.#launch(sandbox, birth, phases, signal);
      await using undo = new AsyncDisposableStack();
      undo.defer(() => run.release());
      await this.#ctx.step("commit:before");
      signal.throwIfAborted();
      const now = this.#ctx.clock.now();
      sandbox.launched(run, now, now + timeoutMs, () => commit?.(this.#registry.view(sandbox, "running")));
      undo.move();
      this.#registry.follow(sandbox);
      this.#remember(birth.cause === "fork" ? "child" : "create", sandbox.id, phases);
      return this.#registry.view(sandbox);
    } catch (e) {
      this.#registry.live.delete(sandbox.id);
      if (sandbox.state === "creating") sandbox.failed(e);
      throw caller.aborted ? (caller.reason as Error) : e;
    } finally {
      resolve();
      this.#pools.refill();
    }
  }

  /** The fastest way that is there: an idle spare, else a waiting VMM, else everything anew. */
  async #launch(sandbox: Sandbox, birth: Birth, phases: Phases, signal: AbortSignal): Promise<VmRun> {
    const { snapshot, template } = sandbox;
    const hot = birth.spares ? this.#pools.takeHot(snapshot, template.name) : undefined;
    if (hot) {
      phases.mark("running");
      phases.source = "hot";
      try {
        await settleAll([
          hot.fullSpeed(),
          this.#handOver(hot, sandbox, birth, this.#ctx.config.hotInitDeadlineMs, phases, signal),
        ]);
        return hot;
      } catch (e) {
        this.#ctx.tasks.spawn("release", () => hot.release());
        signal.throwIfAborted();
        this.#ctx.logger.warn({ run: hot.id, error: messageOf(e) }, "a hot spare failed; starting another");
      }
    }
    const run = birth.spares
      ? await this.#pools.launch(snapshot, template.name, phases, signal)
      : await this.#pools.launchAlone(snapshot, phases, signal);
    try {
      await birth.launched?.();
      await this.#handOver(run, sandbox, birth, this.#ctx.config.initDeadlineMs, phases, signal);
      return run;
    } catch (e) {
      await run.release();
      throw e;
    }
  }

  async #handOver(
    run: VmRun,
    sandbox: Sandbox,
    { cause, fork }: Birth,
    limitMs: number,
    phases: Phases,
    signal: AbortSignal,
  ): Promise<void> {
    await handOver(this.#ctx, run, sandbox, { cause, ...(fork ? { fork } : {}) }, limitMs, phases, signal);
  }

  #newRecord(options: CreateOptions, source: Source): SandboxRecord {
    return {
      id: newSandboxId(this.#ctx.config.node),
      team: options.team ?? DEFAULT_TEAM,
      template: source.template.id,
      snapshot: source.snapshot.id,
      alias: source.template.name,
      state: "creating",
      startedAt: this.#ctx.clock.now(),
      endAt: this.#ctx.clock.now() + options.timeoutMs,
      metadata: options.metadata ?? {},
      envVars: options.envVars ?? {},
      secure: options.secure ?? true,
      onTimeout: options.autoPause === true ? "pause" : "kill",
      pauseMemory: options.autoPauseMemory ?? true,
      autoResume: options.autoResume ?? false,
      interrupted: false,
      timeoutMs: options.timeoutMs,
      ...egressRules(this.#ctx, { allowInternetAccess: options.allowInternetAccess ?? null, ...options.network }),
      allowPublicTraffic: options.allowPublicTraffic ?? true,
      ...(options.ingress === undefined ? {} : { ingress: options.ingress }),
    };
  }

  #remember(op: Operation["op"], sandboxId: SandboxId, phases: Phases): void {
    const timing = phases.timing(op, sandboxId);
    this.#timings.set(sandboxId, timing);
    if (this.#timings.size > TIMINGS_KEPT)
      for (const oldest of this.#timings.keys()) {
        this.#timings.delete(oldest);
        break;
      }
    this.#ctx.config.onOperation?.(timing);
    this.#ctx.logger.info(
      { sandbox: sandboxId, source: phases.source, ms: timing.totalMs, ...timing.phases },
      "sandbox created",
    );
  }
}
