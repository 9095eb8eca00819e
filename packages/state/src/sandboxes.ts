import {
  AenvError,
  type LayerId,
  parseLayerId,
  parseMemoryId,
  parseRunId,
  parseSandboxId,
  parseSnapshotId,
  parseTemplateId,
  type RunId,
  type SandboxId,
  type SnapshotId,
} from "@aenv/base";
import { bool, type Database, int, json, oneOf, optional, type Row, text } from "./database.ts";
import {
  type NetworkRecord,
  RESOURCE_KINDS,
  type ResourceKind,
  type ResourceRecord,
  type RunPurpose,
  type IngressRecord,
  type RunRecord,
  SANDBOX_STATES,
  type SandboxRecord,
  type SandboxState,
} from "./records.ts";

export class Sandboxes {
  readonly #db: Database;

  constructor(db: Database) {
    this.#db = db;
  }

  insert(s: SandboxRecord): void {
    this.#db.run(
      `INSERT INTO sandboxes (id, team, template, snapshot, alias, state, run, started_at, end_at, metadata, env_vars,
         secure, on_timeout, pause_memory, auto_resume, interrupted, timeout_ms, internet, public_traffic, ingress,
         ended_at, cause)
       VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)`,
      s.id,
      s.team,
      s.template,
      s.snapshot,
      s.alias ?? null,
      s.state,
      s.run ?? null,
      s.startedAt,
      s.endAt,
      JSON.stringify(s.metadata),
      JSON.stringify(s.envVars),
      s.secure ? 1 : 0,
      s.onTimeout,
      s.pauseMemory ? 1 : 0,
      s.autoResume ? 1 : 0,
      s.interrupted ? 1 : 0,
      s.timeoutMs,
      s.allowInternetAccess === null ? null : s.allowInternetAccess ? 1 : 0,
      s.allowPublicTraffic ? 1 : 0,
      s.ingress ? JSON.stringify(s.ingress) : null,
      s.endedAt ?? null,
      s.cause ?? null,
    );
    if (s.network) this.setNetwork(s.id, s.allowInternetAccess, s.network);
  }

  setNetwork(id: SandboxId, allowInternetAccess: boolean | null, network: NetworkRecord): void {
    const internet = allowInternetAccess === null ? null : allowInternetAccess ? 1 : 0;
    const rules = JSON.stringify(network);
    this.#db.run("UPDATE sandboxes SET internet = ?, network = ? WHERE id = ?", internet, rules, id);
  }

  setState(id: SandboxId, state: SandboxState, run: RunId | undefined): void {
    this.#db.run("UPDATE sandboxes SET state = ?, run = ? WHERE id = ?", state, run ?? null, id);
  }

  setTimes(id: SandboxId, startedAt: number, endAt: number): void {
    this.#db.run("UPDATE sandboxes SET started_at = ?, end_at = ? WHERE id = ?", startedAt, endAt, id);
  }

  setInterrupted(id: SandboxId, interrupted: boolean): void {
    this.#db.run("UPDATE sandboxes SET interrupted = ? WHERE id = ?", interrupted ? 1 : 0, id);
  }

  setOnTimeout(id: SandboxId, what: SandboxRecord["onTimeout"]): void {
    this.#db.run("UPDATE sandboxes SET on_timeout = ? WHERE id = ?", what, id);
  }

  /** What it would be launched from now. */
  setSnapshot(id: SandboxId, snapshot: SnapshotId): void {
    this.#db.run("UPDATE sandboxes SET snapshot = ? WHERE id = ?", snapshot, id);
  }

  /** The first cause stands. */
  end(id: SandboxId, endedAt: number, cause: string): void {
    this.#db.run(
      "UPDATE sandboxes SET state = 'gone', run = NULL, ended_at = ?, cause = coalesce(cause, ?) WHERE id = ?",
      endedAt,
      cause,
      id,
    );
  }

  setCause(id: SandboxId, cause: string): void {
    this.#db.run("UPDATE sandboxes SET cause = coalesce(cause, ?) WHERE id = ?", cause, id);
  }

  get(id: SandboxId): SandboxRecord | undefined {
    const row = this.#db.get("SELECT * FROM sandboxes WHERE id = ?", id);
    return row && sandbox(row);
  }

  /** All but those that ended. */
  live(): SandboxRecord[] {
    return this.#db.all("SELECT * FROM sandboxes WHERE state <> 'gone' ORDER BY started_at, id").map(sandbox);
  }

  remove(id: SandboxId): void {
    this.#db.run("DELETE FROM sandboxes WHERE id = ?", id);
  }

  /** Forgets at most `limit` sandboxes that ended before. */
  pruneEnded(before: number, limit: number): number {
    return this.#db.run(
      "DELETE FROM sandboxes WHERE id IN (SELECT id FROM sandboxes WHERE state = 'gone' AND ended_at < ? LIMIT ?)",
      before,
      limit,
    );
  }
}

/** VM incarnations. A row exists from before its first resource until its last one is released. */
export class Runs {
  readonly #db: Database;

  constructor(db: Database) {
    this.#db = db;
  }

  insert(r: RunRecord): void {
    this.#db.run(
      `INSERT INTO runs (id, purpose, snapshot, memory_file, maps, sandbox, handle, created_at)
       VALUES (?, ?, ?, ?, ?, ?, ?, ?)`,
      r.id,
      r.purpose,
      r.snapshot ?? null,
      r.memoryFile ?? null,
      r.maps ?? null,
      r.sandbox ?? null,
      r.handle === undefined ? null : JSON.stringify(r.handle),
      r.createdAt,
    );
  }

  setHandle(id: RunId, handle: object): void {
    this.#db.run("UPDATE runs SET handle = ? WHERE id = ?", JSON.stringify(handle), id);
  }

  /** A spare becomes a sandbox's. */
  assign(id: RunId, sandboxId: SandboxId): void {
    const changed = this.#db.run(
      "UPDATE runs SET purpose = 'sandbox', sandbox = ? WHERE id = ? AND sandbox IS NULL",
      sandboxId,
      id,
    );
    if (changed !== 1) throw new AenvError("INTERNAL", `run ${id} is not free to be assigned`);
  }

  get(id: RunId): RunRecord | undefined {
    const row = this.#db.get("SELECT * FROM runs WHERE id = ?", id);
    return row && run(row);
  }

  list(): RunRecord[] {
    return this.#db.all("SELECT * FROM runs ORDER BY created_at, id").map(run);
  }

  /** A capture was taken of it: its disk stands on the layers of that snapshot. Part of a transaction. */
  captured(id: RunId, snapshot: SnapshotId): void {
    this.#db.run("UPDATE runs SET snapshot = ? WHERE id = ?", snapshot, id);
    this.#db.run("DELETE FROM run_layers WHERE run = ?", id);
  }

  /** The disk of a run was sealed into a layer that no snapshot has. Part of a transaction. */
  addLayer(id: RunId, layer: LayerId): void {
    this.#db.run(
      "INSERT INTO run_layers (run, position, layer) SELECT ?, coalesce(max(position), -1) + 1, ? FROM run_layers WHERE run = ?",
      id,
      layer,
      id,
    );
  }

  /** Layers of its disk above those of its snapshot, bottom first. */
  layers(id: RunId): LayerId[] {
    return this.#db
      .all("SELECT layer FROM run_layers WHERE run = ? ORDER BY position", id)
      .map((r) => parseLayerId(text(r, "layer")));
  }

  remove(id: RunId): void {
    this.#db.tx(() => {
      this.#db.run("DELETE FROM run_layers WHERE run = ?", id);
      this.#db.run("DELETE FROM runs WHERE id = ?", id);
    });
  }
}

/** The journal of host resources: an `intent` before each effect, `held` after it, no row once it is released. */
export class Resources {
  readonly #db: Database;

  constructor(db: Database) {
    this.#db = db;
  }

  intent(runId: RunId, kind: ResourceKind, name: string): void {
    this.#put(runId, kind, name, "intent");
  }

  held(runId: RunId, kind: ResourceKind, name: string): void {
    this.#put(runId, kind, name, "held");
  }

  released(runId: RunId, kind: ResourceKind): void {
    this.#db.run("DELETE FROM resources WHERE run = ? AND kind = ?", runId, kind);
  }

  of(runId: RunId): ResourceRecord[] {
    return this.#db.all("SELECT * FROM resources WHERE run = ?", runId).map(resource);
  }

  list(): ResourceRecord[] {
    return this.#db.all("SELECT * FROM resources ORDER BY run, kind").map(resource);
  }

  #put(runId: RunId, kind: ResourceKind, name: string, phase: "intent" | "held"): void {
    this.#db.run(
      `INSERT INTO resources (run, kind, name, phase) VALUES (?, ?, ?, ?)
       ON CONFLICT (run, kind) DO UPDATE SET name = excluded.name, phase = excluded.phase`,
      runId,
      kind,
      name,
      phase,
    );
  }
}

export interface IdempotencyRecord {
  hash: string;
  sandbox: SandboxId;
  answer: object;
}

export class Idempotency {
  readonly #db: Database;

  constructor(db: Database) {
    this.#db = db;
  }

  get(team: string, key: string): IdempotencyRecord | undefined {
    const row = this.#db.get("SELECT * FROM idempotency WHERE team = ? AND key = ?", team, key);
    return (
      row && { hash: text(row, "hash"), sandbox: parseSandboxId(text(row, "sandbox")), answer: json(row, "answer") }
    );
  }

  put(team: string, key: string, record: IdempotencyRecord, at: number): void {
    this.#db.run(
      "INSERT INTO idempotency (team, key, hash, sandbox, answer, created_at) VALUES (?, ?, ?, ?, ?, ?)",
      team,
      key,
      record.hash,
      record.sandbox,
      JSON.stringify(record.answer),
      at,
    );
  }

  prune(before: number, limit: number): number {
    return this.#db.run(
      `DELETE FROM idempotency WHERE (team, key) IN
         (SELECT team, key FROM idempotency WHERE created_at < ? LIMIT ?)`,
      before,
      limit,
    );
  }
}

const sandbox = (r: Row): SandboxRecord => ({
  id: parseSandboxId(text(r, "id")),
  team: text(r, "team"),
  template: parseTemplateId(text(r, "template")),
  snapshot: parseSnapshotId(text(r, "snapshot")),
  ...optional(r, "alias", "alias", text),
  state: oneOf(SANDBOX_STATES, text(r, "state"), "state"),
  ...optional(r, "run", "run", (row, c) => parseRunId(text(row, c))),
  startedAt: int(r, "started_at"),
  endAt: int(r, "end_at"),
  metadata: json(r, "metadata"),
  envVars: json(r, "env_vars"),
  secure: bool(r, "secure"),
  onTimeout: oneOf(["kill", "pause"], text(r, "on_timeout"), "end action"),
  pauseMemory: bool(r, "pause_memory"),
  autoResume: bool(r, "auto_resume"),
  interrupted: bool(r, "interrupted"),
  timeoutMs: int(r, "timeout_ms"),
  allowInternetAccess: r["internet"] === null ? null : bool(r, "internet"),
  allowPublicTraffic: bool(r, "public_traffic"),
  ...optional(r, "ingress", "ingress", (row, c) => json<IngressRecord>(row, c)),
  ...optional(r, "network", "network", (row, c) => json<NetworkRecord>(row, c)),
  ...optional(r, "ended_at", "endedAt", int),
  ...optional(r, "cause", "cause", text),
});

const PURPOSES: readonly RunPurpose[] = ["sandbox", "spare", "build"];

const run = (r: Row): RunRecord => ({
  id: parseRunId(text(r, "id")),
  purpose: oneOf(PURPOSES, text(r, "purpose"), "purpose"),
  ...optional(r, "snapshot", "snapshot", (row, c) => parseSnapshotId(text(row, c))),
  ...optional(r, "memory_file", "memoryFile", text),
  ...optional(r, "maps", "maps", (row, c) => parseMemoryId(text(row, c))),
  ...optional(r, "sandbox", "sandbox", (row, c) => parseSandboxId(text(row, c))),
  ...optional(r, "handle", "handle", (row, c) => json<object>(row, c)),
  createdAt: int(r, "created_at"),
});

const resource = (r: Row): ResourceRecord => ({
  run: parseRunId(text(r, "run")),
  kind: oneOf(RESOURCE_KINDS, text(r, "kind"), "resource"),
  name: text(r, "name"),
  phase: oneOf(["intent", "held"], text(r, "phase"), "phase"),
});
