import { randomBytes } from "node:crypto";
import { AenvError, type Clock, newSandboxId, type SandboxId, systemClock, type TemplateId } from "@aenv/base";
import { encodeCursor, parseCursor } from "@aenv/contract";
import type { CreateOptions, ListFilter, LogEntry, MetricSample, Page, SandboxView, TemplateView } from "@aenv/engine";
import type { EngineApi } from "../src/ports.ts";

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

/** An engine without machines: sandboxes are rows that end when their time is over. */
export class FakeEngine implements EngineApi {
  readonly clock: Clock;
  readonly sandboxes = new Map<string, SandboxView>();
  readonly templateRows: TemplateView[];
  readonly #byKey = new Map<string, { options: string; view: SandboxView }>();
  /** What the next create does instead of making a sandbox. */
  failCreate: AenvError | undefined;
  /** Creates wait for it. */
  gate: Promise<void> | undefined;

  constructor(clock: Clock = systemClock) {
    this.clock = clock;
    this.templateRows = [template("base", clock.now() - 1000), template("code-interpreter", clock.now() - 2000)];
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
    const t = this.templates.get(o.template);
    await this.gate;
    signal.throwIfAborted();
    const now = this.clock.now();
    const view: SandboxView = {
      sandboxId: newSandboxId("fak"),
      templateId: t.templateId,
      alias: t.name,
      state: "running",
      startedAt: now,
      endAt: now + o.timeoutMs,
      cpuCount: t.cpuCount,
      memoryMB: t.memoryMB,
      diskSizeMB: t.diskSizeMB,
      metadata: o.metadata ?? {},
      envdVersion: t.envdVersion,
      ...(o.secure === false ? {} : { envdAccessToken: randomBytes(32).toString("hex") }),
      ...(o.allowPublicTraffic === false ? { trafficAccessToken: randomBytes(32).toString("hex") } : {}),
      lifecycle: { onTimeout: o.autoPause ? "pause" : "kill", autoResume: o.autoResume ?? false },
      allowInternetAccess: o.allowInternetAccess ?? null,
    };
    this.sandboxes.set(view.sandboxId, view);
    if (o.idempotencyKey !== undefined) this.#byKey.set(o.idempotencyKey, { options, view });
    return view;
  }

  #alive(): SandboxView[] {
    const now = this.clock.now();
    for (const [id, v] of this.sandboxes) if (v.state === "running" && v.endAt <= now) this.sandboxes.delete(id);
    return [...this.sandboxes.values()];
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

  kill(id: SandboxId): Promise<boolean> {
    this.#alive();
    return Promise.resolve(this.sandboxes.delete(id));
  }

  setTimeout(id: SandboxId, ms: number): Promise<void> {
    this.get(id).endAt = this.clock.now() + ms;
    return Promise.resolve();
  }

  extend(id: SandboxId, ms: number): Promise<void> {
    const v = this.get(id);
    v.endAt = Math.max(v.endAt, this.clock.now() + ms);
    return Promise.resolve();
  }

  async connect(id: SandboxId, timeoutMs: number): Promise<{ view: SandboxView; resumed: boolean }> {
    const view = this.get(id);
    const resumed = view.state === "paused";
    view.state = "running";
    await this.extend(id, timeoutMs);
    return { view, resumed };
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

  pools(): ReturnType<EngineApi["pools"]> {
    return [];
  }
}
