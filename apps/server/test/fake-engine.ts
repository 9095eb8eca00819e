import { randomBytes } from "node:crypto";
import { AenvError, type Clock, newSandboxId, type SandboxId, systemClock, type TemplateId } from "@aenv/base";
import { encodeCursor, parseCursor } from "@aenv/contract";
import type {
  CheckpointOptions,
  CheckpointView,
  CreateOptions,
  EgressOptions,
  ForkOptions,
  ForkResult,
  Lineage,
  ListFilter,
  LogEntry,
  MetricSample,
  Page,
  PauseOptions,
  ResumeOptions,
  RewindOptions,
  SandboxView,
  SnapshotFilter,
  SnapshotOptions,
  SnapshotView,
  TemplateView,
  VisibleState,
} from "@aenv/engine";
import type { EventQuery } from "@aenv/state";
import type { EngineApi } from "../src/ports.ts";
import { FakeExchange } from "./fake-exchange.ts";
import { FakeStates } from "./fake-states.ts";

const MIB = 1024 * 1024;

function template(name: string, createdAt: number): TemplateView {
  const tail = name
    .padEnd(16, "0")
    .slice(0, 16)
    .replace(/[^a-z0-9]/g, "x");
  return {
    templateId: `t${tail}` as TemplateId,
    name,
    aliases: [name],
    snapshotId: `s${tail}` as TemplateView["snapshotId"],
    team: "default",
    public: true,
    cpuCount: 1,
    memoryMB: 512,
    diskSizeMB: 4096,
    envdVersion: "0.6.13",
    createdAt,
    updatedAt: createdAt,
    spawnCount: 0,
    buildCount: 1,
  };
}

const token = (): string => randomBytes(32).toString("hex");

/** An engine without machines: sandboxes are rows that end, or are paused, when their time is over. */
export class FakeEngine implements EngineApi {
  readonly clock: Clock;
  readonly sandboxes = new Map<string, SandboxView>();
  readonly templateRows: TemplateView[];
  readonly exchange = new FakeExchange(
    (nameOrId) => this.templates.resolve(nameOrId),
    (name) => {
      const made = template(name, this.clock.now());
      this.templateRows.push(made);
      return made;
    },
  );
  readonly states: FakeStates;
  readonly #byKey = new Map<string, { options: string; view: SandboxView }>();
  /** What the next create does instead of making a sandbox. */
  failCreate: AenvError | undefined;
  /** Creates wait for it. */
  gate: Promise<void> | undefined;
  /** These change their state for ever: whatever needs them still is refused. */
  readonly changing = new Set<SandboxId>();
  /** Their agents do not answer. */
  readonly silent = new Set<SandboxId>();
  /** Why the child with this number (from 0) of every fork does not start. */
  readonly failChild = new Map<number, AenvError>();
  /** Options of the last resume. */
  resumedWith: ResumeOptions | undefined;
  /** Options of the last snapshot. */
  snapshotWith: SnapshotOptions | undefined;

  constructor(clock: Clock = systemClock) {
    this.clock = clock;
    this.templateRows = [template("base", clock.now() - 1000), template("code-interpreter", clock.now() - 2000)];
    this.states = new FakeStates(clock);
  }

  readonly templates: EngineApi["templates"] = {
    list: () => [...this.templateRows],
    get: (name) => {
      const t = this.templates.resolve(name);
      if (!t) throw new AenvError("NOT_FOUND", `there is no template ${name}`);
      return t;
    },
    resolve: (name) => {
      const bare = name.replace(/^[^/]*\//, "").replace(/:default$/, "");
      return this.templateRows.find((t) => t.templateId === bare || t.name === bare || t.aliases.includes(bare));
    },
    exists: (alias) => this.templates.resolve(alias) !== undefined,
    delete: (name) => {
      const at = this.templateRows.findIndex((t) => t.templateId === name || t.name === name);
      if (at >= 0) this.templateRows.splice(at, 1);
      return Promise.resolve(at >= 0);
    },
  };

  async create(o: CreateOptions, signal: AbortSignal): Promise<SandboxView> {
    if (this.failCreate) throw this.failCreate;
    const options = JSON.stringify({ ...o, idempotencyKey: undefined });
    const before = o.idempotencyKey === undefined ? undefined : this.#byKey.get(o.idempotencyKey);
    if (before) {
      if (before.options === options) return before.view;
      throw new AenvError("CONFLICT", "this Idempotency-Key was used for another sandbox");
    }
    const t = this.states.resolve(o.template)?.source ?? this.templates.get(o.template);
    await this.gate;
    signal.throwIfAborted();
    const now = this.clock.now();
    const view: SandboxView = {
      sandboxId: newSandboxId("fak"),
      templateId: t.templateId,
      ...("name" in t ? { alias: t.name } : {}),
      state: "running",
      startedAt: now,
      endAt: now + o.timeoutMs,
      cpuCount: t.cpuCount,
      memoryMB: t.memoryMB,
      diskSizeMB: t.diskSizeMB,
      metadata: o.metadata ?? {},
      envdVersion: t.envdVersion,
      ...(o.secure === false ? {} : { envdAccessToken: token() }),
      ...(o.allowPublicTraffic === false ? { trafficAccessToken: token() } : {}),
      lifecycle: { onTimeout: o.autoPause ? "pause" : "kill", autoResume: o.autoResume ?? false },
      allowInternetAccess: o.allowInternetAccess ?? null,
      network: o.network ?? {},
      ...(o.ingress === undefined ? {} : { ingress: o.ingress }),
    };
    this.sandboxes.set(view.sandboxId, view);
    if (o.idempotencyKey !== undefined) this.#byKey.set(o.idempotencyKey, { options, view });
    return view;
  }

  #alive(): SandboxView[] {
    const now = this.clock.now();
    for (const [id, v] of this.sandboxes) {
      if (v.state !== "running" || v.endAt > now) continue;
      if (v.lifecycle.onTimeout === "pause") v.state = "paused";
      else this.sandboxes.delete(id);
    }
    return [...this.sandboxes.values()];
  }

  /** One that nothing happens to now. */
  #still(id: SandboxId): SandboxView {
    const v = this.get(id);
    if (this.changing.has(id)) throw new AenvError("IN_TRANSITION", `sandbox ${id} is changing its state`);
    return v;
  }

  #running(id: SandboxId): SandboxView {
    const v = this.#still(id);
    if (v.state !== "running") throw new AenvError("CONFLICT", `sandbox ${id} is ${v.state}`);
    return v;
  }

  get(id: SandboxId): SandboxView {
    const v = this.#alive().find((s) => s.sandboxId === id);
    if (!v) throw new AenvError("NOT_FOUND", `there is no sandbox ${id}`);
    return v;
  }

  list(f: ListFilter = {}): Page<SandboxView> {
    const order = f.order ?? "desc";
    const after = f.cursor === undefined ? undefined : parseCursor(f.cursor);
    const sign = order === "asc" ? 1 : -1;
    const compare = (a: { at: number; id: string }, b: { at: number; id: string }): number =>
      sign * (a.at - b.at || (a.id < b.id ? -1 : a.id > b.id ? 1 : 0));
    const key = (v: SandboxView) => ({ at: v.startedAt, id: v.sandboxId });
    const templateId = f.template === undefined ? undefined : this.templates.resolve(f.template)?.templateId;
    const matching = this.#alive()
      .filter((v) => Object.entries(f.metadata ?? {}).every(([k, x]) => v.metadata[k] === x))
      .filter((v) => f.startedAfter === undefined || v.startedAt >= f.startedAfter)
      .filter((v) => f.template === undefined || v.templateId === templateId);
    const rest = matching
      .filter((v) => !f.states || f.states.includes(v.state))
      .filter((v) => !after || compare(key(v), after) > 0)
      .toSorted((a, b) => compare(key(a), key(b)));
    const items = rest.slice(0, f.limit ?? 100);
    const last = items.at(-1);
    return {
      items,
      totalRunning: matching.filter((v) => v.state === "running").length,
      ...(last && rest.length > items.length ? { next: encodeCursor({ ...key(last), order }) } : {}),
    };
  }

  count(): Record<VisibleState, number> {
    const n = { creating: 0, running: 0, pausing: 0, paused: 0, resuming: 0, rewinding: 0, killing: 0 };
    for (const v of this.#alive()) n[v.state]++;
    return n;
  }

  kill(id: SandboxId): Promise<boolean> {
    this.#alive();
    this.states.ended(id);
    return Promise.resolve(this.sandboxes.delete(id));
  }

  async setTimeout(id: SandboxId, ms: number): Promise<void> {
    (await Promise.resolve(this.#running(id))).endAt = this.clock.now() + ms;
  }

  setNetwork(id: SandboxId, { allowInternetAccess, ...network }: EgressOptions): Promise<void> {
    Object.assign(this.get(id), { allowInternetAccess: allowInternetAccess ?? null, network });
    return Promise.resolve();
  }

  async extend(id: SandboxId, ms: number): Promise<void> {
    const v = await Promise.resolve(this.#running(id));
    v.endAt = Math.max(v.endAt, this.clock.now() + ms);
  }

  async connect(
    id: SandboxId,
    timeoutMs: number,
    _signal: AbortSignal,
    options: ResumeOptions = {},
  ): Promise<{ view: SandboxView; resumed: boolean }> {
    const view = this.#still(id);
    const resumed = view.state === "paused";
    if (resumed) {
      this.resumedWith = options;
      view.endAt = 0;
      if (options.autoPause !== undefined) view.lifecycle.onTimeout = options.autoPause ? "pause" : "kill";
    }
    view.state = "running";
    await this.#extended(view, timeoutMs);
    return { view, resumed };
  }

  #extended(v: SandboxView, ms: number): Promise<void> {
    v.endAt = Math.max(v.endAt, this.clock.now() + ms);
    return Promise.resolve();
  }

  async pause(id: SandboxId, options: PauseOptions): Promise<boolean> {
    const v = await Promise.resolve(this.#still(id));
    if (v.state === "paused") return false;
    if (options.requireHealthyGuest && this.silent.has(id))
      throw new AenvError("UNAVAILABLE", "the agent in the sandbox does not answer");
    v.state = "paused";
    this.states.paused(v, options.memory !== false);
    return true;
  }

  async fork(id: SandboxId, o: ForkOptions): Promise<ForkResult[]> {
    const source = await Promise.resolve(this.#still(id));
    const now = this.clock.now();
    const results = Array.from({ length: o.count }, (_, i): ForkResult => {
      const error = this.failChild.get(i);
      if (error) return { error };
      const { envdAccessToken, trafficAccessToken, ...same } = structuredClone(source);
      return {
        view: {
          ...same,
          sandboxId: newSandboxId("fak"),
          state: "running",
          startedAt: now,
          endAt: now + o.timeoutMs,
          ...(envdAccessToken === undefined ? {} : { envdAccessToken: token() }),
          ...(trafficAccessToken === undefined ? {} : { trafficAccessToken: token() }),
        },
      };
    });
    const failed = results.find((r) => "error" in r);
    if (o.atomic && failed) {
      const others = { error: new AenvError("CANCELLED", "another child of this fork failed") };
      return results.map((r) => ("error" in r ? r : others));
    }
    const at = this.states.capture(source, "fork");
    for (const r of results) {
      if (!("view" in r)) continue;
      this.sandboxes.set(r.view.sandboxId, r.view);
      this.states.goesOnFrom(r.view.sandboxId, at);
    }
    return results;
  }

  async snapshot(id: SandboxId, o: SnapshotOptions): Promise<SnapshotView> {
    const v = await Promise.resolve(this.#still(id));
    const alias = o.name?.replace(/^[^/]*\//, "").replace(/:.*/, "");
    if (alias !== undefined && this.templates.exists(alias))
      throw new AenvError("CONFLICT", `${alias} is the name of a template`);
    this.snapshotWith = o;
    return this.states.keep(v, o);
  }

  listSnapshots(f: SnapshotFilter = {}): { items: SnapshotView[]; next?: string } {
    return this.states.list(f);
  }

  deleteSnapshot(idOrName: string): Promise<boolean> {
    return Promise.resolve(this.states.delete(idOrName));
  }

  async checkpoint(id: SandboxId, o: CheckpointOptions): Promise<CheckpointView> {
    return this.states.checkpoint(await Promise.resolve(this.#still(id)), o);
  }

  async listCheckpoints(id: SandboxId): Promise<CheckpointView[]> {
    const { sandboxId } = await Promise.resolve(this.get(id));
    return this.states.checkpoints(sandboxId);
  }

  async rewind(id: SandboxId, checkpoint: string, o: RewindOptions): Promise<SandboxView> {
    const v = this.#still(id);
    this.states.rewind(id, checkpoint);
    if (v.state === "paused") v.endAt = 0;
    v.state = "running";
    if (o.timeoutMs !== undefined) await this.#extended(v, o.timeoutMs);
    return v;
  }

  async lineage(id: SandboxId): Promise<Lineage> {
    return this.states.lineage(await Promise.resolve(this.get(id)), this.#alive());
  }

  #sample(v: SandboxView): MetricSample {
    return {
      timestamp: v.startedAt,
      cpuCount: v.cpuCount,
      cpuUsedPct: 1.5,
      memUsed: 50 * MIB,
      memTotal: v.memoryMB * MIB,
      memCache: 10 * MIB,
      diskUsed: 500 * MIB,
      diskTotal: v.diskSizeMB * MIB,
    };
  }

  metrics(id: SandboxId, range: { start?: number; end?: number } = {}): MetricSample[] {
    const s = this.#sample(this.get(id));
    const inside = s.timestamp >= (range.start ?? 0) && s.timestamp <= (range.end ?? Number.MAX_SAFE_INTEGER);
    return inside ? [s] : [];
  }

  latestMetrics(ids: readonly SandboxId[]): Map<SandboxId, MetricSample> {
    return new Map(this.#alive().flatMap((v) => (ids.includes(v.sandboxId) ? [[v.sandboxId, this.#sample(v)]] : [])));
  }

  logs(id: SandboxId, range: { start?: number; limit?: number } = {}): LogEntry[] {
    const v = this.get(id);
    const all: LogEntry[] = [
      { timestamp: v.startedAt, level: "info", message: "sandbox started", fields: { logger: "engine", phases: 3 } },
      { timestamp: v.startedAt + 1, level: "debug", message: "[    0.000000] Linux", fields: { logger: "console" } },
    ];
    return all.filter((e) => e.timestamp >= (range.start ?? 0)).slice(0, range.limit ?? 1000);
  }

  logPage(id: SandboxId, q: EventQuery): ReturnType<EngineApi["logPage"]> {
    const all = this.logs(id).map((e, n) => ({ ...e, id: n + 1 }));
    const fits = all.filter(
      (e) =>
        (q.levels ?? [e.level]).includes(e.level) &&
        e.message.includes(q.search ?? "") &&
        (q.backward ? e.id < (q.after ?? 99) : e.id > (q.after ?? 0)),
    );
    const entries = (q.backward ? fits.toReversed() : fits).slice(0, q.limit);
    const last = entries.length < q.limit ? undefined : entries.at(-1);
    return { entries, ...(last ? { next: last.id } : {}) };
  }

  pools(): ReturnType<EngineApi["pools"]> {
    return [];
  }
}
