import { mkdir } from "node:fs/promises";
import {
  AenvError,
  type Clock,
  deadline,
  type Logger,
  messageOf,
  newLayerId,
  type RunId,
  type SandboxId,
  Semaphore,
  TaskGroup,
} from "@aenv/base";
import type { Authority } from "@aenv/network";
import { type MemoryPort, MemoryWorkers } from "@aenv/memory";
import { isAlive, type ProcIdentity, procIdentity } from "@aenv/host";
import { DEFAULT_TEAM, type EventQuery, LIFECYCLE, type State } from "@aenv/state";
import type { VmmDriver } from "@aenv/vmm";
import { buildTemplate } from "./build.ts";
import { type EngineConfigInput, engineConfig } from "./config.ts";
import { Compactor } from "./compaction.ts";
import type { Context } from "./context.ts";
import { checkCreate, checkLifetime, checkTimeout, notFound } from "./checks.ts";
import { checkpoint, findCheckpoint, listCheckpoints } from "./checkpoints.ts";
import { Creator, type Registry } from "./create.ts";
import { egressRules, setEgress } from "./egress.ts";
import { checkDisk, freeBytes as freeBytesOf } from "./disk-reserve.ts";
import { Exchange } from "./exchange.ts";
import { Deadlines } from "./expiry.ts";
import { fork } from "./fork.ts";
import { Holds } from "./holds.ts";
import { Foreground } from "./foreground.ts";
import { IdempotentCreates } from "./idempotency.ts";
import { lineageOf } from "./lineage.ts";
import { listPage } from "./list.ts";
import { hasMemory } from "./memory-stack.ts";
import { Paths } from "./paths.ts";
import { type PausedAll, pauseAll } from "./pause-all.ts";
import { orAborted, Pauser } from "./pause.ts";
import { Pools } from "./pools.ts";
import type { BlockdPort, CgroupsPort, GuestFactory, NetworkPort } from "./ports.ts";
import { recover } from "./recovery.ts";
import { rewind } from "./rewind.ts";
import type { VmRun } from "./run.ts";
import { Sampler } from "./sampler.ts";
import { Sandbox } from "./sandbox.ts";
import { Snapshots } from "./snapshots.ts";
import { TemplateStore } from "./templates.ts";
import { Tokens } from "./tokens.ts";
import type {
  BuildTemplateOptions,
  CheckpointOptions,
  CheckpointView,
  CreateOptions,
  EgressOptions,
  ForkOptions,
  ForkResult,
  LayerFile,
  Lineage,
  ListFilter,
  LogEntry,
  MetricSample,
  Operation,
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
  /** Default: in worker threads. */
  memory?: MemoryPort;
  clock: Clock;
  logger: Logger;
  config: EngineConfigInput;
  /** A certificate authority for one sandbox; without it there are no transforms. */
  makeAuthority?: (name: string) => Authority;
  /** Bytes that the file system of a path has left; for tests. */
  freeBytes?: (path: string) => number;
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

/** An end that failed, such as a pause on a full disk, is tried again after so long. */
const EXPIRE_RETRY_MS = 30_000;
/** Unused artifacts that could not be collected are tried again after so long. */
const COLLECT_RETRY_MS = 15_000;
const MAX_SAMPLES = 20_000;
const MAX_LOG_LINES = 1000;

/** The sandboxes of one node: see ARCHITECTURE.md. One instance per data folder at a time. */
export class Engine implements AsyncDisposable {
  readonly templates: Templates;
  /** Snapshots that come and go. */
  readonly exchange: Exchange;
  readonly #ctx: Context;
  readonly #store: TemplateStore;
  readonly #pools: Pools;
  readonly #sampler: Sampler;
  readonly #creates: IdempotentCreates;
  readonly #deadlines: Deadlines<SandboxId>;
  /** Sandboxes that end at the same moment end so many at a time. */
  readonly #expiring: Semaphore;
  readonly #live = new Map<SandboxId, Sandbox>();
  readonly #listeners = new Set<(run: RunId, id: SandboxId) => void>();
  readonly #registry: Registry;
  readonly #creator: Creator;
  readonly #pauser: Pauser;
  readonly #snapshots: Snapshots;
  readonly #compactor: Compactor;
  #unsubscribe = (): void => {};
  #closing: Promise<void> | undefined;
  #draining = false;

  private constructor(ctx: Context) {
    this.#ctx = ctx;
    this.#pools = new Pools(ctx);
    this.#store = new TemplateStore(ctx, (id) => this.#pools.drop(id));
    this.#sampler = new Sampler(ctx);
    this.#creates = new IdempotentCreates(ctx);
    this.#expiring = new Semaphore(ctx.config.pauseConcurrency);
    this.#deadlines = new Deadlines(ctx.clock, (id) =>
      ctx.tasks.spawn("expire", (signal) => this.#expiring.run(() => this.#expire(id, signal), signal)),
    );
    const store = this.#store;
    this.#registry = {
      live: this.#live,
      events: {
        runEnded: (run, sandbox) => this.#runEnded(run, sandbox),
        gone: (sandbox) => this.#gone(sandbox),
      },
      follow: (sandbox) => this.#follow(sandbox),
      view: (sandbox, state) => this.#view(sandbox, state),
    };
    this.#creator = new Creator(ctx, { store, pools: this.#pools }, this.#registry);
    this.#pauser = new Pauser(ctx, this.#pools, this.#registry);
    this.exchange = new Exchange(ctx, store);
    this.#snapshots = new Snapshots(ctx, store, (id) => this.#pools.drop(id));
    this.#compactor = new Compactor(ctx, () => store.collect());
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
    const { config: given, onStep, freeBytes = freeBytesOf, ...ports } = deps;
    const config = engineConfig(given);
    const paths = new Paths(config.home, config.instance, config.runRoot);
    takeOwnership(deps.state);
    const logger = deps.logger;
    let freed = (): void => {};
    const ctx: Context = {
      ...ports,
      config,
      paths,
      tasks: new TaskGroup((name, e) => logger.error({ task: name, error: messageOf(e) }, "background work failed")),
      foreground: new Foreground(),
      inits: new Semaphore(2 * config.launchConcurrency),
      tokens: new Tokens(deps.state),
      memory: deps.memory ?? new MemoryWorkers(),
      runs: new Map(),
      freeBytes,
      holds: new Holds(() => freed()),
      captured: () => {},
      launched: () => {},
      released: () => {},
      step: onStep ?? (() => {}),
    };
    // VMMs pass through these to files that their uid may read; nobody else can list them.
    for (const dir of [paths.runDirs, paths.dataDirs, paths.snapshots, paths.layers, paths.memory])
      await mkdir(dir, { recursive: true, mode: 0o711 });
    const { survivors } = await recover(ctx, new AbortController().signal);
    const engine = new Engine(ctx);
    ctx.released = (run) => engine.#released(run);
    freed = () => engine.#collect();
    ctx.captured = (s) => engine.#compactor.captured(s);
    ctx.launched = (s, injected) => engine.#compactor.launched(s, injected);
    for (const s of survivors) {
      const sandbox = Sandbox.adopted(ctx, s, s.run, engine.#registry.events);
      engine.#live.set(sandbox.id, sandbox);
      engine.#follow(sandbox);
      if (sandbox.record.interrupted) engine.#deadlines.set(sandbox.id, sandbox.record.endAt);
    }
    await engine.#store.collect().catch((e: unknown) => {
      logger.warn({ error: messageOf(e) }, "unused artifacts were not collected");
    });
    await engine.exchange.recover();
    engine.#unsubscribe = deps.state.onSettled(() => engine.#collect());
    for (const s of deps.state.snapshots.list()) ctx.captured(s);
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
      rewinding: 0,
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
    const sandbox = this.#timed(id);
    if (ms <= 0) {
      await sandbox.kill("expired");
      return;
    }
    this.#setEnd(sandbox, this.#ctx.clock.now() + ms);
  }

  /** The end becomes now + ms unless that is earlier. */
  async extend(id: SandboxId, ms: number): Promise<void> {
    checkTimeout(ms, this.#ctx.config.maxTimeoutMs);
    const sandbox = this.#timed(id);
    const endAt = this.#ctx.clock.now() + ms;
    if (endAt > sandbox.record.endAt) this.#setEnd(sandbox, endAt);
  }

  /**
   * Replaces what it may reach as a whole. Holds when this resolves, for connections that are open too; when it rejects
   * the rules before it hold.
   */
  async setNetwork(id: SandboxId, options: EgressOptions): Promise<void> {
    const sandbox = this.#running(id);
    const { run, record } = sandbox;
    if (!run) throw notFound(id);
    const rules = egressRules(this.#ctx, options, record.network);
    const { authority } = rules.network;
    const before = { allowInternetAccess: record.allowInternetAccess, network: record.network ?? {} };
    // Recorded first: a server that dies in between makes it true when it recovers.
    sandbox.setEgress(rules);
    try {
      if (authority && !before.network.authority) {
        const token = record.secure ? this.#ctx.tokens.access(id) : "";
        await run.guest.trust(authority.cert, token, deadline(this.#ctx.config.initDeadlineMs));
      }
      await setEgress(this.#ctx, run, rules);
      this.#note(id, LIFECYCLE.updated, { set: "network" });
    } catch (e) {
      if (record.network === rules.network && sandbox.run === run) sandbox.setEgress(before);
      throw AenvError.from(e, `set the network rules of ${id}`);
    }
  }

  /** As extend for a running sandbox; resumes a paused one. Waits for a pause or resume that runs. */
  async connect(
    id: SandboxId,
    timeoutMs: number,
    signal: AbortSignal,
    options: ResumeOptions = {},
  ): Promise<{ view: SandboxView; resumed: boolean }> {
    checkLifetime(timeoutMs, this.#ctx.config.maxTimeoutMs);
    const sandbox = this.#visible(id);
    if (sandbox.state !== "running") this.#assertOpen();
    const resumed = await this.#resume(sandbox, timeoutMs, options, signal);
    return { view: this.#view(sandbox), resumed };
  }

  /** False: it was paused already. Joins a pause that runs. */
  async pause(id: SandboxId, options: PauseOptions, signal: AbortSignal): Promise<boolean> {
    this.#assertOpen();
    const sandbox = this.#visible(id);
    if (sandbox.state === "paused" && sandbox.record.interrupted) {
      // To its owner it ran until now.
      sandbox.settle();
      this.#deadlines.delete(id);
      return true;
    }
    return await this.#pauser.pause(sandbox, options, signal);
  }

  /** The state of a running or paused sandbox, kept under a name or without; the sandbox goes on. */
  async snapshot(id: SandboxId, options: SnapshotOptions, signal: AbortSignal): Promise<SnapshotView> {
    this.#assertOpen();
    const view = await this.#snapshots.create(this.#visible(id), options, signal);
    this.#note(id, LIFECYCLE.checkpointed, { snapshot: view.snapshotId });
    return view;
  }

  /** Newest first. */
  listSnapshots(filter: SnapshotFilter = {}): { items: SnapshotView[]; next?: string } {
    return this.#snapshots.list(filter);
  }

  /** By snapshot id or name. False when there is none. */
  async deleteSnapshot(idOrName: string): Promise<boolean> {
    return await this.#snapshots.delete(idOrName);
  }

  /**
   * One capture, then children of it; results in the order of the children. The source goes on first. Where it throws,
   * or is aborted before it has answered, no child is left.
   */
  async fork(id: SandboxId, options: ForkOptions, signal: AbortSignal): Promise<ForkResult[]> {
    this.#assertOpen();
    checkLifetime(options.timeoutMs, this.#ctx.config.maxTimeoutMs);
    const rooms = { store: this.#store, creator: this.#creator, registry: this.#registry };
    return await fork(this.#ctx, rooms, this.#visible(id), options, signal);
  }

  /** The state of a running or paused sandbox, to rewind to; the sandbox goes on. */
  async checkpoint(id: SandboxId, options: CheckpointOptions, signal: AbortSignal): Promise<CheckpointView> {
    this.#assertOpen();
    const view = await checkpoint(this.#ctx, this.#visible(id), options, signal);
    this.#note(id, LIFECYCLE.checkpointed, { checkpoint: view.checkpointId });
    return view;
  }

  /** Oldest first. */
  async listCheckpoints(id: SandboxId): Promise<CheckpointView[]> {
    this.#visible(id);
    return await listCheckpoints(this.#ctx, id);
  }

  /** In place: id and tokens stay, the VM is another one. By the checkpoint's id or name; NOT_FOUND when there is none. */
  async rewind(id: SandboxId, nameOrId: string, options: RewindOptions, signal: AbortSignal): Promise<SandboxView> {
    this.#assertOpen();
    const { timeoutMs } = options;
    if (timeoutMs !== undefined) checkLifetime(timeoutMs, this.#ctx.config.maxTimeoutMs);
    const sandbox = this.#visible(id);
    const to = findCheckpoint(this.#ctx, id, nameOrId);
    await rewind(this.#ctx, { pools: this.#pools, registry: this.#registry }, sandbox, to, signal);
    const endAt = timeoutMs === undefined ? 0 : this.#ctx.clock.now() + timeoutMs;
    if (sandbox.state === "running" && endAt > sandbox.record.endAt) this.#setEnd(sandbox, endAt);
    this.#collect();
    return this.#view(sandbox);
  }

  async lineage(id: SandboxId): Promise<Lineage> {
    return await lineageOf(this.#ctx, this.#visible(id), [...this.#live.values()].filter(isVisible));
  }

  /** For the edge: the tokens of a sandbox that does not run now and that traffic waits for or wakes; undefined: no such one. */
  asleep(id: SandboxId): Pick<Route, "accessToken" | "trafficToken"> | undefined {
    const sandbox = this.#live.get(id);
    return sandbox && wakes(sandbox) ? this.#tokensOf(sandbox) : undefined;
  }

  /** Resumes a sandbox that is asleep; undefined when it does not run afterwards. */
  async resumeForTraffic(id: SandboxId, signal: AbortSignal): Promise<Route | undefined> {
    const sandbox = this.#live.get(id);
    const phase = sandbox?.phase;
    // What comes of it is known afterwards.
    if (phase?.t === "pausing" || phase?.t === "rewinding" || (phase?.t === "resuming" && !sandbox?.record.autoResume))
      await orAborted(phase.done, signal);
    if (!sandbox || sandbox.run || !wakes(sandbox)) return this.route(id);
    this.#assertOpen();
    const { record } = sandbox;
    const timeoutMs = record.autoResume ? Math.max(record.timeoutMs, this.#ctx.config.trafficTimeoutMs) : 0;
    await this.#resume(sandbox, timeoutMs, {}, signal);
    return this.route(id);
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

  /** Its events by search and page; `next` is `after` of the next page, absent where there may be no more. */
  logPage(id: SandboxId, query: EventQuery): { entries: LogEntry[]; next?: number } {
    if (!this.#live.has(id) && !this.#ctx.state.sandboxes.get(id)) throw notFound(id);
    const entries = this.#ctx.state.events.page(id, query);
    const last = entries.length < query.limit ? undefined : entries.at(-1);
    return { entries, ...(last ? { next: last.id } : {}) };
  }

  /** Synchronous, for the edge. undefined: no such sandbox runs now. */
  route(id: SandboxId): Route | undefined {
    const sandbox = this.#live.get(id);
    const run = sandbox?.run;
    if (!sandbox || !run) return undefined;
    const { ingress } = sandbox.record;
    return { run: run.id, host: run.slot.hostIp, ...this.#tokensOf(sandbox), ...(ingress ? { ingress } : {}) };
  }

  /** The agents' tokens of all sandboxes that traffic can reach or wake: a signed URL names none, but fits one. */
  *accessTokens(): Generator<readonly [SandboxId, string]> {
    for (const sandbox of this.#live.values())
      if (sandbox.record.secure && (sandbox.run || wakes(sandbox)))
        yield [sandbox.id, this.#ctx.tokens.access(sandbox.id)];
  }

  /** Called at the moment at which a run's VM is about to end or has ended. Returns the unsubscription. */
  onRunEnded(fn: (run: RunId, id: SandboxId) => void): () => void {
    this.#listeners.add(fn);
    return () => this.#listeners.delete(fn);
  }

  /** What one of the latest creates cost. */
  timing(id: SandboxId): Operation | undefined {
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
  async importLayer(rawPath: string, signal: AbortSignal): Promise<LayerFile> {
    this.#assertOpen();
    const id = newLayerId();
    checkDisk(this.#ctx, "no layer is imported");
    const { paths, state, blockd, clock } = this.#ctx;
    const path = paths.layerFile(id);
    this.#store.imported(id);
    await mkdir(paths.layerDir(id), { recursive: true, mode: 0o700 });
    state.layers.add({ id, path, bytes: 0, createdAt: clock.now() });
    try {
      const { bytes } = await blockd.importRaw(rawPath, { id, path }, signal);
      state.durable(() => {
        state.layers.remove(id);
        state.layers.add({ id, path, bytes, createdAt: clock.now() });
      });
    } catch (e) {
      this.#store.used(id);
      this.#collect();
      throw e;
    }
    return { id, path };
  }

  pools(): PoolStatus[] {
    return this.#pools.status();
  }

  /** Every host resource this engine holds now, and for whom. */
  resources(): OwnedResource[] {
    return [...this.#ctx.runs.values()].flatMap((run) => run.resources());
  }

  /**
   * Before the node stops: nothing new is begun, and what runs is paused, so many at once, until the signal aborts. What
   * is not paused by then goes on running. After the next start traffic wakes them, and their time goes on.
   */
  async pauseAll(signal: AbortSignal): Promise<PausedAll> {
    this.#draining = true;
    await this.#pools.close();
    return await pauseAll(this.#ctx, { pauser: this.#pauser, live: this.#live, turns: this.#expiring }, signal);
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
        ...(sandbox.record.secure ? { accessToken: this.#ctx.tokens.access(sandbox.id) } : {}),
      }),
    );
  }

  #runEnded(run: VmRun, sandbox: Sandbox): void {
    this.#deadlines.delete(sandbox.id);
    this.#sampler.unwatch(sandbox.id);
    for (const fn of this.#listeners) {
      try {
        fn(run.id, sandbox.id);
      } catch (e) {
        this.#ctx.logger.error({ run: run.id, error: messageOf(e) }, "a listener for ended runs failed");
      }
    }
  }

  #gone(sandbox: Sandbox): void {
    this.#live.delete(sandbox.id);
    this.#deadlines.delete(sandbox.id);
    if (!this.#ctx.state.templates.bySnapshot(sandbox.snapshot.id)) this.#collect();
  }

  /** The last one that ran from a state that nobody keeps takes its files along, and each the layers of its own disk. */
  #released(run: VmRun): void {
    const { templates, snapshots } = this.#ctx.state;
    const template = run.snapshot === undefined ? undefined : templates.bySnapshot(run.snapshot);
    const kept = template && snapshots.get(template.snapshot);
    if (!kept || run.layers.length > kept.layers.length) this.#collect();
  }

  #collect(): void {
    if (this.#closing) return;
    this.#ctx.tasks.spawn("collect", async () => {
      try {
        await this.#store.collect();
      } catch (e) {
        // Nobody else would ask again for what is unused since.
        this.#ctx.clock.after(COLLECT_RETRY_MS, () => this.#collect());
        throw e;
      }
    });
  }

  async #expire(id: SandboxId, signal: AbortSignal): Promise<void> {
    const sandbox = this.#live.get(id);
    // It may have been extended while it waited for its turn.
    if (!sandbox || !isTimed(sandbox) || sandbox.record.endAt > this.#ctx.clock.now()) return;
    const { onTimeout, pauseMemory } = sandbox.record;
    try {
      if (onTimeout === "kill") await sandbox.kill("expired");
      else if (sandbox.state === "paused") sandbox.settle();
      else if (!this.#draining) await this.#pauser.pause(sandbox, { memory: pauseMemory }, signal);
    } catch (e) {
      if (sandbox.state !== "running" || signal.aborted) return;
      this.#ctx.logger.error({ sandbox: id, onTimeout, error: messageOf(e) }, "a sandbox did not end; trying again");
      this.#deadlines.set(id, this.#ctx.clock.now() + EXPIRE_RETRY_MS);
    }
  }

  /** Runs when it resolves, for timeoutMs at least. False: it ran already. */
  async #resume(sandbox: Sandbox, timeoutMs: number, options: ResumeOptions, signal: AbortSignal): Promise<boolean> {
    const { clock } = this.#ctx;
    // The time of one that only its node paused goes on.
    const endBefore = sandbox.record.interrupted ? sandbox.record.endAt : 0;
    const end = (): number => Math.max(endBefore, clock.now() + timeoutMs);
    const resumed = await this.#pauser.resume(sandbox, end, options, signal);
    const endAt = clock.now() + timeoutMs;
    if (sandbox.state === "running" && endAt > sandbox.record.endAt) this.#setEnd(sandbox, endAt);
    return resumed;
  }

  #setEnd(sandbox: Sandbox, endAt: number): void {
    sandbox.setEnd(endAt);
    this.#deadlines.set(sandbox.id, endAt);
    this.#note(sandbox.id, LIFECYCLE.updated, { set_timeout: new Date(endAt).toISOString() });
  }

  #note(id: SandboxId, message: string, fields: Record<string, unknown>): void {
    const { clock, state } = this.#ctx;
    const timestamp = clock.now();
    state.surely(() => state.events.add(id, { timestamp, level: "info", message, fields }));
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

  /** One whose time runs. */
  #timed(id: SandboxId): Sandbox {
    const sandbox = this.#visible(id);
    return isTimed(sandbox) ? sandbox : this.#running(id);
  }

  #running(id: SandboxId): Sandbox {
    const sandbox = this.#visible(id);
    if (sandbox.state !== "running")
      throw new AenvError("IN_TRANSITION", `sandbox ${id} is ${sandbox.state}`, { data: { state: sandbox.state } });
    return sandbox;
  }

  #view(sandbox: Sandbox, state?: "running"): SandboxView {
    const { id } = sandbox;
    return viewOf(sandbox, state, { access: this.#ctx.tokens.access(id), traffic: this.#ctx.tokens.traffic(id) });
  }

  #tokensOf({ id, record }: Sandbox): Pick<Route, "accessToken" | "trafficToken"> {
    const { tokens } = this.#ctx;
    return {
      ...(record.secure ? { accessToken: tokens.access(id) } : {}),
      ...(record.allowPublicTraffic ? {} : { trafficToken: tokens.traffic(id) }),
    };
  }

  #assertOpen(): void {
    if (this.#closing || this.#draining) throw new AenvError("UNAVAILABLE", "the server is stopping");
  }

  async #close(): Promise<void> {
    this.#unsubscribe();
    this.#deadlines.close();
    this.#sampler.close();
    const moving = [...this.#live.values()].flatMap(({ phase }) => ("abort" in phase ? [phase] : []));
    for (const { abort } of moving) abort.abort(new AenvError("UNAVAILABLE", "the server is stopping"));
    await Promise.all(moving.map(({ done }) => done));
    await this.#pools.close();
    await this.#ctx.tasks.close();
    await this.#ctx.memory.close();
    for (const { run } of this.#live.values()) run?.detach();
    this.#ctx.state.surely(() => this.#ctx.state.putSetting(OWNER, ""));
  }
}

/** Being created or killed is nobody's business but ours. */
function isVisible(sandbox: Sandbox): boolean {
  return sandbox.state !== "creating" && sandbox.state !== "killing" && sandbox.state !== "gone";
}

/** It runs soon in any case, or traffic makes it: not one without its memory, which would have to boot. */
function wakes({ state, record, snapshot }: Sandbox): boolean {
  if (state === "resuming" || state === "rewinding") return true;
  if (state === "pausing") return record.autoResume;
  return (record.autoResume || record.interrupted) && state === "paused" && hasMemory(snapshot);
}

/** Its end is the business of the engine. */
const isTimed = ({ state, record }: Sandbox): boolean =>
  state === "running" || (state === "paused" && record.interrupted);

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
  state.surely(() => state.putSetting(OWNER, JSON.stringify(me)));
}
