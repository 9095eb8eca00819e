import { mkdir } from "node:fs/promises";
import {
  AenvError,
  type Clock,
  type Logger,
  messageOf,
  newLayerId,
  type RunId,
  type SandboxId,
  Semaphore,
  TaskGroup,
} from "@aenv/base";
import { isAlive, type ProcIdentity, procIdentity } from "@aenv/host";
import { DEFAULT_TEAM, type SandboxRecord, type State } from "@aenv/state";
import type { VmmDriver } from "@aenv/vmm";
import { buildTemplate } from "./build.ts";
import { type EngineConfigInput, engineConfig } from "./config.ts";
import type { Context } from "./context.ts";
import { Creator } from "./create.ts";
import { egressRules, setEgress } from "./egress.ts";
import { Deadlines } from "./expiry.ts";
import { Foreground } from "./foreground.ts";
import { IdempotentCreates } from "./idempotency.ts";
import { listPage } from "./list.ts";
import { Paths } from "./paths.ts";
import { Pools } from "./pools.ts";
import type { BlockdPort, CgroupsPort, GuestFactory, NetworkPort } from "./ports.ts";
import { recover } from "./recovery.ts";
import type { VmRun } from "./run.ts";
import { Sampler } from "./sampler.ts";
import { Sandbox } from "./sandbox.ts";
import { TemplateStore } from "./templates.ts";
import { Tokens } from "./tokens.ts";
import type {
  BuildTemplateOptions,
  CheckpointOptions,
  CheckpointView,
  CreateOptions,
  CreateTiming,
  EgressOptions,
  ForkOptions,
  ForkResult,
  LayerFile,
  Lineage,
  ListFilter,
  LogEntry,
  MetricSample,
  OwnedResource,
  Page,
  PauseOptions,
  PoolStatus,
  ResumeOptions,
  RewindOptions,
  Route,
  SandboxView,
  SnapshotFilter,
  SnapshotOptions,
  SnapshotView,
  TemplateView,
  VisibleState,
} from "./types.ts";
import { viewOf } from "./view.ts";

export interface EngineDeps {
  state: State;
  blockd: BlockdPort;
  driver: VmmDriver;
  network: NetworkPort;
  cgroups: CgroupsPort;
  guestFactory: GuestFactory;
  clock: Clock;
  logger: Logger;
  config: EngineConfigInput;
  /** For tests: called before and after every effect of a launch or capture; may throw or never return. */
  onStep?: (name: string) => Promise<void> | void;
}

export interface Templates {
  /** Newest first. */
  list(team?: string): TemplateView[];
  /** NOT_FOUND unless it is a template's id, name or alias. */
  get(nameOrId: string): TemplateView;
  resolve(nameOrId: string): TemplateView | undefined;
  exists(alias: string): boolean;
  /** False when there is none. Sandboxes that run from it go on. */
  delete(nameOrId: string): Promise<boolean>;
}

/** Sandboxes that end at the same moment end so many at a time. */
const EXPIRE_CONCURRENCY = 8;
const MAX_SAMPLES = 20_000;
const MAX_LOG_LINES = 1000;

/** The sandboxes of one node: see ARCHITECTURE.md. One instance per data folder at a time. */
export class Engine implements AsyncDisposable {
  readonly templates: Templates;
  readonly #ctx: Context;
  readonly #store: TemplateStore;
  readonly #pools: Pools;
  readonly #sampler: Sampler;
  readonly #creates: IdempotentCreates;
  readonly #deadlines: Deadlines<SandboxId>;
  readonly #expiring = new Semaphore(EXPIRE_CONCURRENCY);
  readonly #live = new Map<SandboxId, Sandbox>();
  readonly #listeners = new Set<(run: RunId, id: SandboxId) => void>();
  readonly #tokens: Tokens;
  readonly #creator: Creator;
  #closing: Promise<void> | undefined;

  private constructor(ctx: Context) {
    this.#ctx = ctx;
    this.#tokens = new Tokens(ctx.state);
    this.#pools = new Pools(ctx);
    this.#store = new TemplateStore(ctx, (id) => this.#pools.drop(id));
    this.#sampler = new Sampler(ctx);
    this.#creates = new IdempotentCreates(ctx);
    this.#deadlines = new Deadlines(ctx.clock, (id) =>
      ctx.tasks.spawn("expire", (signal) => this.#expiring.run(() => this.#expire(id), signal)),
    );
    const store = this.#store;
    this.#creator = new Creator(
      ctx,
      { store, pools: this.#pools, tokens: this.#tokens },
      {
        live: this.#live,
        follow: (sandbox) => this.#follow(sandbox),
        runEnded: (run, sandbox) => this.#runEnded(run, sandbox),
        view: (sandbox, state) => this.#view(sandbox, state),
      },
    );
    const resolve = (nameOrId: string): TemplateView | undefined => {
      const found = store.find(nameOrId);
      return found && store.view(found);
    };
    this.templates = {
      list: (team) => store.list(team),
      get: (nameOrId) => store.view(store.source(nameOrId).template),
      resolve,
      exists: (alias) => resolve(alias) !== undefined,
      delete: (nameOrId) => store.delete(nameOrId),
    };
  }

  /** Recovers: adopts the VMs that run, frees what nobody owns, then warms the pools in the background. */
  static async open(deps: EngineDeps): Promise<Engine> {
    const { config: given, onStep, ...ports } = deps;
    const config = engineConfig(given);
    const paths = new Paths(config.home, config.instance, config.runRoot);
    takeOwnership(deps.state);
    const logger = deps.logger;
    const ctx: Context = {
      ...ports,
      config,
      paths,
      tasks: new TaskGroup((name, e) => logger.error({ task: name, error: messageOf(e) }, "background work failed")),
      foreground: new Foreground(),
      runs: new Map(),
      released: () => {},
      step: onStep ?? (() => {}),
    };
    // VMMs pass through these to files that their uid may read; nobody else can list them.
    for (const dir of [paths.runDirs, paths.dataDirs, paths.snapshots, paths.layers])
      await mkdir(dir, { recursive: true, mode: 0o711 });
    const { survivors } = await recover(ctx, new AbortController().signal);
    const engine = new Engine(ctx);
    ctx.released = (run) => engine.#released(run);
    for (const s of survivors) {
      const sandbox = Sandbox.adopted(ctx, s, s.run, (run, ended) => engine.#runEnded(run, ended));
      engine.#live.set(sandbox.id, sandbox);
      engine.#follow(sandbox);
    }
    await engine.#store.collect();
    ctx.tasks.spawn("slots", (signal) => ctx.network.ensure(config.readySlots, signal));
    for (const name of config.pool.pinned) engine.#warm(name);
    return engine;
  }

  async create(options: CreateOptions, signal: AbortSignal): Promise<SandboxView> {
    this.#assertOpen();
    checkCreate(options, this.#ctx.config.maxTimeoutMs);
    const { idempotencyKey } = options;
    if (idempotencyKey === undefined) return await this.#creator.create(options, signal);
    return await this.#creates.run(options.team ?? DEFAULT_TEAM, idempotencyKey, options, signal, (commit) =>
      this.#creator.create(options, signal, commit),
    );
  }

  /** NOT_FOUND (with the cause of its end in `data`, where known) when there is none or it is being killed. */
  get(id: SandboxId): SandboxView {
    return this.#view(this.#visible(id));
  }

  list(filter: ListFilter = {}): Page<SandboxView> {
    const template = filter.template === undefined ? undefined : this.#store.find(filter.template, filter.team);
    if (filter.template !== undefined && !template) return { items: [], totalRunning: 0 };
    const page = listPage([...this.#live.values()].filter(isVisible), { ...filter, templateId: template?.id });
    return { ...page, items: page.items.map((s) => this.#view(s)) };
  }

  /** How many sandboxes there are in each state. */
  count(): Record<VisibleState, number> {
    const n: Record<VisibleState, number> = {
      creating: 0,
      running: 0,
      pausing: 0,
      paused: 0,
      resuming: 0,
      killing: 0,
    };
    for (const { state } of this.#live.values()) if (state !== "gone") n[state]++;
    return n;
  }

  /** False when there is none or somebody else kills it. Resolves when its VM is dead. */
  async kill(id: SandboxId): Promise<boolean> {
    const sandbox = this.#live.get(id);
    return sandbox ? await sandbox.kill("killed") : false;
  }

  /** The end becomes now + ms, also earlier; 0 or less ends it now. */
  async setTimeout(id: SandboxId, ms: number): Promise<void> {
    checkTimeout(ms, this.#ctx.config.maxTimeoutMs);
    const sandbox = this.#running(id);
    if (ms <= 0) {
      await sandbox.kill("expired");
      return;
    }
    this.#setEnd(sandbox, this.#ctx.clock.now() + ms);
  }

  /** The end becomes now + ms unless that is earlier. */
  async extend(id: SandboxId, ms: number): Promise<void> {
    checkTimeout(ms, this.#ctx.config.maxTimeoutMs);
    const sandbox = this.#running(id);
    const endAt = this.#ctx.clock.now() + ms;
    if (endAt > sandbox.record.endAt) this.#setEnd(sandbox, endAt);
  }

  /**
   * Replaces what it may reach as a whole. Holds when this resolves, for connections that are open too; when it rejects
   * the rules before it hold.
   */
  async setNetwork(id: SandboxId, options: EgressOptions): Promise<void> {
    const rules = egressRules(options);
    const sandbox = this.#running(id);
    const { run, record } = sandbox;
    if (!run) throw notFound(id);
    const before = { allowInternetAccess: record.allowInternetAccess, network: record.network ?? {} };
    // Recorded first: a server that dies in between makes it true when it recovers.
    sandbox.setEgress(rules);
    try {
      await setEgress(this.#ctx, run, rules);
    } catch (e) {
      if (record.network === rules.network && sandbox.run === run) sandbox.setEgress(before);
      throw AenvError.from(e, `set the network rules of ${id}`);
    }
  }

  /** As extend for a running sandbox; resumes a paused one. */
  async connect(
    id: SandboxId,
    timeoutMs: number,
    _signal: AbortSignal,
    _options: ResumeOptions = {},
  ): Promise<{ view: SandboxView; resumed: boolean }> {
    await this.extend(id, timeoutMs);
    return { view: this.get(id), resumed: false };
  }

  /** False: it was paused already. Joins a pause that runs. */
  pause(_id: SandboxId, _options: PauseOptions, _signal: AbortSignal): Promise<boolean> {
    return Promise.reject(notYet());
  }

  /** The state of a running or paused sandbox, kept under a name or without; the sandbox goes on. */
  snapshot(_id: SandboxId, _options: SnapshotOptions, _signal: AbortSignal): Promise<SnapshotView> {
    return Promise.reject(notYet());
  }

  /** Newest first. */
  listSnapshots(_filter: SnapshotFilter = {}): { items: SnapshotView[]; next?: string } {
    return { items: [] };
  }

  /** By snapshot id or name. False when there is none. */
  deleteSnapshot(_idOrName: string): Promise<boolean> {
    return Promise.resolve(false);
  }

  /**
   * One capture, then children of it; results in the order of the children. The source goes on first. Where it throws,
   * or is aborted before it has answered, no child is left.
   */
  fork(_id: SandboxId, _options: ForkOptions, _signal: AbortSignal): Promise<ForkResult[]> {
    return Promise.reject(notYet());
  }

  /** The state of a running or paused sandbox, to rewind to; the sandbox goes on. */
  checkpoint(_id: SandboxId, _options: CheckpointOptions, _signal: AbortSignal): Promise<CheckpointView> {
    return Promise.reject(notYet());
  }

  /** Oldest first. */
  async listCheckpoints(id: SandboxId): Promise<CheckpointView[]> {
    this.#visible(id);
    return await Promise.resolve([]);
  }

  /** In place: id and tokens stay, the VM is another one. By the checkpoint's id or name; NOT_FOUND when there is none. */
  rewind(_id: SandboxId, _checkpoint: string, _options: RewindOptions, _signal: AbortSignal): Promise<SandboxView> {
    return Promise.reject(notYet());
  }

  lineage(_id: SandboxId): Promise<Lineage> {
    return Promise.reject(notYet());
  }

  /** For the edge: resumes a paused sandbox with autoResume; undefined when there is none, or it is not one of these. */
  resumeForTraffic(id: SandboxId, _signal: AbortSignal): Promise<Route | undefined> {
    return Promise.resolve(this.route(id));
  }

  /** Oldest first; a sandbox that ended has none (NOT_FOUND). Times in milliseconds, inclusive. */
  metrics(id: SandboxId, range: { start?: number; end?: number } = {}): MetricSample[] {
    this.#visible(id);
    return this.#ctx.state.samples.range(id, range.start ?? 0, range.end ?? Number.MAX_SAFE_INTEGER, MAX_SAMPLES);
  }

  latestMetrics(ids: readonly SandboxId[]): Map<SandboxId, MetricSample> {
    const out = new Map<SandboxId, MetricSample>();
    for (const id of ids) {
      const sample = this.#sampler.latest(id);
      if (sample) out.set(id, sample);
    }
    return out;
  }

  /** Its events, oldest first; also of a sandbox that ended lately. */
  logs(id: SandboxId, range: { start?: number; limit?: number } = {}): LogEntry[] {
    if (!this.#live.has(id) && !this.#ctx.state.sandboxes.get(id)) throw notFound(id);
    const limit = Math.min(MAX_LOG_LINES, range.limit ?? MAX_LOG_LINES);
    return this.#ctx.state.events.list(id, range.start ?? 0, limit);
  }

  /** Synchronous, for the edge. undefined: no such sandbox runs now. */
  route(id: SandboxId): Route | undefined {
    const sandbox = this.#live.get(id);
    const run = sandbox?.run;
    if (!sandbox || !run) return undefined;
    return {
      run: run.id,
      host: run.slot.hostIp,
      ...(sandbox.record.secure ? { accessToken: this.#tokens.access(id) } : {}),
      ...(sandbox.record.allowPublicTraffic ? {} : { trafficToken: this.#tokens.traffic(id) }),
    };
  }

  /** Called at the moment at which a run's VM is about to end or has ended. Returns the unsubscription. */
  onRunEnded(fn: (run: RunId, id: SandboxId) => void): () => void {
    this.#listeners.add(fn);
    return () => this.#listeners.delete(fn);
  }

  /** What one of the latest creates cost. */
  timing(id: SandboxId): CreateTiming | undefined {
    return this.#creator.timing(id);
  }

  async buildTemplate(options: BuildTemplateOptions, signal: AbortSignal): Promise<TemplateView> {
    this.#assertOpen();
    const built = await buildTemplate(this.#ctx, this.#store, options, signal);
    if (built.replaced !== undefined) await this.#pools.drop(built.replaced);
    await this.#store.collect();
    if (this.#ctx.config.pool.pinned.includes(options.name)) this.#warm(options.name);
    return this.#store.view(built.template);
  }

  /** A raw disk image becomes a sealed layer that a template can stand on; unused ones are freed at the next start. */
  async importLayer(rawPath: string, _signal: AbortSignal): Promise<LayerFile> {
    this.#assertOpen();
    const id = newLayerId();
    const { paths, state, blockd, clock } = this.#ctx;
    const path = paths.layerFile(id);
    // Until a build has used it (which lets it go) or the server ends.
    this.#store.hold(id);
    await mkdir(paths.layerDir(id), { recursive: true, mode: 0o700 });
    state.layers.add({ id, path, bytes: 0, createdAt: clock.now() });
    const { bytes } = await blockd.importRaw(rawPath, { id, path });
    state.durable(() => {
      state.layers.remove(id);
      state.layers.add({ id, path, bytes, createdAt: clock.now() });
    });
    return { id, path };
  }

  pools(): PoolStatus[] {
    return this.#pools.status();
  }

  /** Every host resource this engine holds now, and for whom. */
  resources(): OwnedResource[] {
    return [...this.#ctx.runs.values()].flatMap((run) => run.resources());
  }

  /** The server leaves: sandboxes go on, spares end. */
  close(): Promise<void> {
    this.#closing ??= this.#close();
    return this.#closing;
  }

  async [Symbol.asyncDispose](): Promise<void> {
    await this.close();
  }

  /** What a running sandbox needs: its end, its metrics. */
  #follow(sandbox: Sandbox): void {
    const { run } = sandbox;
    if (!run) return;
    this.#deadlines.set(sandbox.id, sandbox.record.endAt);
    this.#sampler.watch(sandbox, () =>
      this.#ctx.guestFactory({
        host: run.slot.hostIp,
        ...(sandbox.record.secure ? { accessToken: this.#tokens.access(sandbox.id) } : {}),
      }),
    );
  }

  #runEnded(run: VmRun, sandbox: Sandbox): void {
    this.#deadlines.delete(sandbox.id);
    this.#sampler.unwatch(sandbox.id);
    if (sandbox.state === "gone") this.#live.delete(sandbox.id);
    else if (sandbox.phase.t === "killing") void sandbox.phase.done.then(() => this.#live.delete(sandbox.id));
    for (const fn of this.#listeners) {
      try {
        fn(run.id, sandbox.id);
      } catch (e) {
        this.#ctx.logger.error({ run: run.id, error: messageOf(e) }, "a listener for ended runs failed");
      }
    }
  }

  /** The last one that ran from a deleted template takes its files along. */
  #released(run: VmRun): void {
    if (run.snapshot === undefined || this.#ctx.state.templates.bySnapshot(run.snapshot)) return;
    this.#ctx.tasks.spawn("collect", async () => void (await this.#store.collect()));
  }

  async #expire(id: SandboxId): Promise<void> {
    const sandbox = this.#live.get(id);
    // It may have been extended while it waited for its turn.
    if (sandbox?.state !== "running" || sandbox.record.endAt > this.#ctx.clock.now()) return;
    await sandbox.kill("expired");
  }

  #setEnd(sandbox: Sandbox, endAt: number): void {
    sandbox.setEnd(endAt);
    this.#deadlines.set(sandbox.id, endAt);
  }

  #warm(name: string): void {
    const template = this.#store.find(name);
    const snapshot = template && this.#ctx.state.snapshots.get(template.snapshot);
    if (snapshot) this.#pools.warm(snapshot, template.name);
  }

  #visible(id: SandboxId): Sandbox {
    const sandbox = this.#live.get(id);
    if (sandbox && isVisible(sandbox)) return sandbox;
    throw notFound(id, this.#ctx.state.sandboxes.get(id));
  }

  #running(id: SandboxId): Sandbox {
    const sandbox = this.#visible(id);
    if (sandbox.state !== "running")
      throw new AenvError("IN_TRANSITION", `sandbox ${id} is ${sandbox.state}`, { data: { state: sandbox.state } });
    return sandbox;
  }

  #view(sandbox: Sandbox, state?: "running"): SandboxView {
    const { id } = sandbox;
    return viewOf(sandbox, state, { access: this.#tokens.access(id), traffic: this.#tokens.traffic(id) });
  }

  #assertOpen(): void {
    if (this.#closing) throw new AenvError("UNAVAILABLE", "the server is stopping");
  }

  async #close(): Promise<void> {
    this.#deadlines.close();
    this.#sampler.close();
    const creating = [...this.#live.values()].flatMap(({ phase }) => (phase.t === "creating" ? [phase] : []));
    for (const { abort } of creating) abort.abort(new AenvError("UNAVAILABLE", "the server is stopping"));
    await Promise.all(creating.map(({ done }) => done));
    await this.#pools.close();
    await this.#ctx.tasks.close();
    for (const { run } of this.#live.values()) run?.detach();
    this.#ctx.state.putSetting(OWNER, "");
  }
}

/** Being created or killed is nobody's business but ours. */
function isVisible(sandbox: Sandbox): boolean {
  return sandbox.state !== "creating" && sandbox.state !== "killing" && sandbox.state !== "gone";
}

function notFound(id: SandboxId, record?: SandboxRecord): AenvError {
  const cause = record?.state === "gone" ? record.cause : undefined;
  return new AenvError("NOT_FOUND", `sandbox ${id} not found${cause === undefined ? "" : `: it ended (${cause})`}`, {
    data: { sandboxId: id, ...(cause === undefined ? {} : { cause, endedAt: record?.endedAt }) },
  });
}

function checkTimeout(ms: number, max: number): void {
  if (!Number.isFinite(ms) || ms > max)
    throw new AenvError("INVALID_ARGUMENT", `a timeout is at most ${Math.floor(max / 1000)} s`);
}

function checkCreate(options: CreateOptions, maxTimeoutMs: number): void {
  checkTimeout(options.timeoutMs, maxTimeoutMs);
  if (options.timeoutMs <= 0) throw new AenvError("INVALID_ARGUMENT", "the timeout must be more than 0");
  if (options.autoPause || options.autoResume)
    throw new AenvError("UNIMPLEMENTED", "this node does not pause sandboxes yet", {
      hint: "Create it without autoPause; it is killed when its time is over.",
    });
}

function notYet(): AenvError {
  return new AenvError("UNIMPLEMENTED", "this node does not pause sandboxes yet");
}

const OWNER = "owner";

/** Two engines on one data folder would free each other's sandboxes. */
function takeOwnership(state: State): void {
  const me = procIdentity(process.pid);
  const text = state.setting(OWNER, () => "");
  const owner = text === "" ? undefined : (JSON.parse(text) as ProcIdentity);
  if (owner && owner.pid !== process.pid && isAlive(owner))
    throw new AenvError("CONFLICT", `process ${owner.pid} runs this node already`, {
      hint: "Stop it first: npm run down.",
    });
  state.putSetting(OWNER, JSON.stringify(me));
}
