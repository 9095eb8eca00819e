import { chmodSync } from "node:fs";
import { type Clock, systemClock } from "@aenv/base";
import { Layers, MemoryFiles, Snapshots, TemplateRows } from "./artifacts.ts";
import { Database, text } from "./database.ts";
import { ApiKeys, DEFAULT_TEAM, Teams } from "./keys.ts";
import { Checkpoints, SavedSnapshots } from "./saved.ts";
import { Idempotency, Resources, Runs, Sandboxes } from "./sandboxes.ts";
import { Events, Samples } from "./series.ts";

/** A path for a database that nobody will miss. */
const IN_MEMORY = ":memory:";

/** Everything that a node remembers: one sqlite file. The kernel, not this, is the truth about what runs. */
export class State implements Disposable {
  readonly #db: Database;
  readonly teams: Teams;
  readonly keys: ApiKeys;
  readonly layers: Layers;
  readonly memory: MemoryFiles;
  readonly snapshots: Snapshots;
  readonly saved: SavedSnapshots;
  readonly checkpoints: Checkpoints;
  readonly templates: TemplateRows;
  readonly sandboxes: Sandboxes;
  readonly runs: Runs;
  readonly resources: Resources;
  readonly idempotency: Idempotency;
  readonly samples: Samples;
  readonly events: Events;

  private constructor(db: Database, clock: Clock) {
    this.#db = db;
    this.teams = new Teams(db, clock);
    this.keys = new ApiKeys(db, clock);
    this.layers = new Layers(db);
    this.memory = new MemoryFiles(db);
    this.snapshots = new Snapshots(db);
    this.saved = new SavedSnapshots(db);
    this.checkpoints = new Checkpoints(db);
    this.templates = new TemplateRows(db);
    this.sandboxes = new Sandboxes(db);
    this.runs = new Runs(db);
    this.resources = new Resources(db);
    this.idempotency = new Idempotency(db);
    this.samples = new Samples(db);
    this.events = new Events(db);
  }

  /** Makes the file, or brings one of an older version up to date. The default team always exists. */
  static open(path: string, clock: Clock = systemClock): State {
    const db = new Database(path);
    // It holds the seed of the access tokens.
    if (path !== IN_MEMORY) chmodSync(path, 0o600);
    const state = new State(db, clock);
    state.teams.ensure(DEFAULT_TEAM);
    return state;
  }

  tx<T>(fn: () => T): T {
    return this.#db.tx(fn);
  }

  /** A transaction that also survives a loss of power when it returns. */
  durable<T>(fn: () => T): T {
    return this.#db.durable(fn);
  }

  /** The setting, made by `make` the first time. */
  setting(key: string, make: () => string): string {
    return this.#db.tx(() => {
      const row = this.#db.get("SELECT value FROM settings WHERE key = ?", key);
      if (row) return text(row, "value");
      const value = make();
      this.putSetting(key, value);
      return value;
    });
  }

  putSetting(key: string, value: string): void {
    this.#db.run(
      "INSERT INTO settings (key, value) VALUES (?, ?) ON CONFLICT (key) DO UPDATE SET value = excluded.value",
      key,
      value,
    );
  }

  close(): void {
    this.#db.close();
  }

  [Symbol.dispose](): void {
    this.close();
  }
}
