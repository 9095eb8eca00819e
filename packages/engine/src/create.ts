import { AenvError, messageOf, newSandboxId, type SandboxId } from "@aenv/base";
import { DEFAULT_TEAM, type SandboxRecord } from "@aenv/state";
import type { Context } from "./context.ts";
import { egressRules, isOpen, setEgress } from "./egress.ts";
import { initRun } from "./launch.ts";
import { Phases } from "./phases.ts";
import type { Pools } from "./pools.ts";
import { settleAll, type VmRun } from "./run.ts";
import { Sandbox } from "./sandbox.ts";
import type { Source, TemplateStore } from "./templates.ts";
import type { Tokens } from "./tokens.ts";
import type { CreateOptions, CreateTiming, LaunchSource, SandboxView } from "./types.ts";

/** Breakdowns of the latest creates that are kept. */
const TIMINGS_KEPT = 1000;

/** The engine's sandboxes, as far as a create is concerned. */
export interface Registry {
  readonly live: Map<SandboxId, Sandbox>;
  /** It runs from now on: its end and its metrics are watched. */
  follow(sandbox: Sandbox): void;
  readonly runEnded: (run: VmRun, sandbox: Sandbox) => void;
  view(sandbox: Sandbox, state?: "running"): SandboxView;
}

/** From a request to a running sandbox. */
export class Creator {
  readonly #ctx: Context;
  readonly #store: TemplateStore;
  readonly #pools: Pools;
  readonly #tokens: Tokens;
  readonly #registry: Registry;
  readonly #timings = new Map<SandboxId, CreateTiming>();

  constructor(ctx: Context, rooms: { store: TemplateStore; pools: Pools; tokens: Tokens }, registry: Registry) {
    this.#ctx = ctx;
    this.#store = rooms.store;
    this.#pools = rooms.pools;
    this.#tokens = rooms.tokens;
    this.#registry = registry;
  }

  timing(id: SandboxId): CreateTiming | undefined {
    return this.#timings.get(id);
  }

  /** One sandbox, visible when this resolves; when it rejects nothing of it is left. `commit` is part of the transaction. */
  async create(
    options: CreateOptions,
    caller: AbortSignal,
    commit?: (view: SandboxView) => void,
  ): Promise<SandboxView> {
    const phases = new Phases(this.#ctx.clock);
    using _foreground = this.#ctx.foreground.enter();
    const source = this.#store.source(options.template, options.team);
    if (this.#registry.live.size >= this.#ctx.config.maxSandboxes)
      throw new AenvError("RATE_LIMITED", `this node runs at most ${this.#ctx.config.maxSandboxes} sandboxes`, {
        hint: "Kill sandboxes that are not needed.",
      });
    const abort = new AbortController();
    const { promise: done, resolve } = Promise.withResolvers<void>();
    const record = this.#newRecord(options, source);
    const sandbox = Sandbox.creating(this.#ctx, { ...source, record }, { abort, done }, this.#registry.runEnded);
    this.#registry.live.set(sandbox.id, sandbox);
    try {
      const signal = AbortSignal.any([caller, abort.signal]);
      const { run, source: from } = await this.#launch(sandbox, phases, signal);
      await using undo = new AsyncDisposableStack();
      undo.defer(() => run.release());
      await this.#ctx.step("commit:before");
      signal.throwIfAborted();
      const now = this.#ctx.clock.now();
      sandbox.launched(run, now, now + options.timeoutMs, () => {
        this.#ctx.state.templates.countSpawn(source.template.id, now);
        commit?.(this.#registry.view(sandbox, "running"));
      });
      undo.move();
      this.#registry.follow(sandbox);
      this.#remember(sandbox.id, from, phases);
      return this.#registry.view(sandbox);
    } catch (e) {
      this.#registry.live.delete(sandbox.id);
      if (sandbox.state === "creating") sandbox.failed(e);
      throw AenvError.from(caller.aborted ? caller.reason : e, `create sandbox from ${options.template}`);
    } finally {
      resolve();
      this.#pools.refill();
    }
  }

  /** The fastest way that is there: an idle spare, else a waiting VMM, else everything anew. */
  async #launch(sandbox: Sandbox, phases: Phases, signal: AbortSignal): Promise<{ run: VmRun; source: LaunchSource }> {
    const { snapshot, template } = sandbox;
    const hot = this.#pools.takeHot(snapshot, template.name);
    if (hot) {
      try {
        await settleAll([
          hot.fullSpeed(),
          this.#handOver(hot, sandbox, this.#ctx.config.hotInitDeadlineMs, phases, signal),
        ]);
        return { run: hot, source: "hot" };
      } catch (e) {
        this.#ctx.tasks.spawn("release", () => hot.release());
        signal.throwIfAborted();
        this.#ctx.logger.warn({ run: hot.id, error: messageOf(e) }, "a hot spare failed; starting another");
      }
    }
    const { run, source } = await this.#pools.launch(snapshot, template.name, phases, signal);
    try {
      await this.#handOver(run, sandbox, this.#ctx.config.initDeadlineMs, phases, signal);
      return { run, source };
    } catch (e) {
      await run.release();
      throw e;
    }
  }

  /** The run becomes this sandbox's: in the journal first, then in the guest. */
  async #handOver(run: VmRun, sandbox: Sandbox, limitMs: number, phases: Phases, signal: AbortSignal): Promise<void> {
    const { record, snapshot, template } = sandbox;
    this.#ctx.state.tx(() => run.assign(sandbox.id));
    await this.#ctx.step("assign:after");
    if (!isOpen(record)) await phases.time("policy", () => setEgress(this.#ctx, run, record));
    await phases.time("init", () =>
      initRun(
        this.#ctx,
        run,
        {
          sandboxId: sandbox.id,
          templateId: template.id,
          envVars: record.envVars,
          accessToken: record.secure ? this.#tokens.access(sandbox.id) : "",
          defaults: snapshot.defaults,
          cause: "create",
        },
        limitMs,
        signal,
      ),
    );
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
      onTimeout: "kill",
      autoResume: false,
      ...egressRules({ allowInternetAccess: options.allowInternetAccess ?? null, ...options.network }),
      allowPublicTraffic: options.allowPublicTraffic ?? true,
    };
  }

  #remember(sandboxId: SandboxId, source: LaunchSource, phases: Phases): void {
    const timing: CreateTiming = { sandboxId, source, totalMs: phases.totalMs, phases: phases.phases };
    this.#timings.set(sandboxId, timing);
    if (this.#timings.size > TIMINGS_KEPT)
      for (const oldest of this.#timings.keys()) {
        this.#timings.delete(oldest);
        break;
      }
    this.#ctx.config.onCreate?.(timing);
    this.#ctx.logger.info({ sandbox: sandboxId, source, ms: timing.totalMs, ...timing.phases }, "sandbox created");
  }
}
