import { chmodSync, existsSync, renameSync, rmSync, writeFileSync } from "node:fs";
import { type Clock, systemClock } from "@aenv/base";
import { Layers, MemoryFiles, Snapshots, TemplateRows } from "./artifacts.ts";
import { Database, text } from "./database.ts";
import { ApiKeys, DEFAULT_TEAM, Teams } from "./keys.ts";
import { Checkpoints, SavedSnapshots } from "./saved.ts";
import { Idempotency, Resources, Runs, Sandboxes } from "./sandboxes.ts";
import { Events, Samples } from "./series.ts";
import { Webhooks } from "./webhooks.ts";
import { isStoreFailure, sqliteCode } from "./store-failure.ts";

/** A path for a database that nobody will miss. */
const IN_MEMORY = ":memory:";

/** Waits before another attempt to write what could not be written: doubled from the first to the most. */
const LATE_RETRY_MS = { first: 1000, most: 15_000 } as const;
/** Given back when the disk is too full to open the database. */
const RESERVE_BYTES = 16 * 1024 * 1024;

export interface StateOptions {
  /** Keep room inside the database and beside it, so that a node on a full disk can be started and can end sandboxes. */
  room?: boolean;
  /** For tests: called before each write; may throw what sqlite would. */
  beforeWrite?: () => void;
}

function openDatabase(path: string, beforeWrite: (() => void) | undefined): Database {
  try {
    return new Database(path, beforeWrite);
  } catch (e) {
    if (path === IN_MEMORY || sqliteCode(e) === 0 || !existsSync(reserveOf(path))) throw e;
    rmSync(reserveOf(path));
    return new Database(path, beforeWrite);
  }
}

const reserveOf = (path: string): string => `${path}.reserve`;

/** Whole or not at all. */
function keepReserve(path: string): void {
  const reserve = reserveOf(path);
  if (existsSync(reserve)) return;
  const temp = `${reserve}.tmp`;
  try {
    writeFileSync(temp, Buffer.alloc(RESERVE_BYTES), { mode: 0o600 });
    renameSync(temp, reserve);
  } catch {
    rmSync(temp, { force: true });
  }
}

/** Everything that a node remembers: one sqlite file. The kernel, not this, is the truth about what runs. */
export class State implements Disposable {
  readonly #db: Database;
  readonly #clock: Clock;
  readonly #settled = new Set<() => void>();
  #cancelRetry: (() => void) | undefined;
  #closed = false;
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
  readonly webhooks: Webhooks;

  private constructor(db: Database, clock: Clock) {
    this.#db = db;
    this.#clock = clock;
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
    this.webhooks = new Webhooks(db, clock);
  }

  /**
   * Makes the file, or brings one of an older version up to date. The default team always exists. NO_SPACE where the disk
   * is so full that not even the room that is kept aside for this helps.
   */
  static open(path: string, clock: Clock = systemClock, { beforeWrite, room = false }: StateOptions = {}): State {
    const db = openDatabase(path, beforeWrite);
    // It holds the seed of the access tokens.
    if (path !== IN_MEMORY) chmodSync(path, 0o600);
    const state = new State(db, clock);
    state.teams.ensure(DEFAULT_TEAM);
    if (room) {
      state.keepRoom({ log: true });
      keepReserve(path);
    }
    return state;
  }

  tx<T>(fn: () => T): T {
    return this.#db.tx(fn);
  }

  /** A transaction that also survives a loss of power when it returns. */
  durable<T>(fn: () => T): T {
    return this.#db.durable(fn);
  }

  /**
   * A change that must not fail because the disk is full, such as an end: where it cannot be written it waits and is
   * tried again; later writes come after it. Until then reads do not see it, and a crash forgets it: the next start
   * believes the kernel. `fn` may run more than once.
   */
  surely(fn: () => void): void {
    // As after a crash.
    if (this.#closed) return;
    if (!this.#db.surely(fn)) this.#retry(LATE_RETRY_MS.first);
  }

  /** Changes that could not be written yet. */
  get late(): number {
    return this.#db.late;
  }

  /** Called when everything that waited is written. Returns the unsubscription. */
  onSettled(fn: () => void): () => void {
    this.#settled.add(fn);
    return () => this.#settled.delete(fn);
  }

  /** Free pages inside the file, for the time when its disk is full. Does nothing when that is now. */
  keepRoom(options?: { log?: boolean }): void {
    try {
      this.#db.keepRoom(options);
    } catch (e) {
      if (!isStoreFailure(e)) throw e;
    }
  }

  /** Undefined where it was never put. */
  getSetting(key: string): string | undefined {
    const row = this.#db.get("SELECT value FROM settings WHERE key = ?", key);
    return row && text(row, "value");
  }

  /** Unknown is fine. */
  removeSetting(key: string): void {
    this.#db.run("DELETE FROM settings WHERE key = ?", key);
  }

  /** The setting, made by `make` the first time. */
  setting(key: string, make: () => string): string {
    const known = this.getSetting(key);
    if (known !== undefined) return known;
    return this.#db.tx(() => {
      const other = this.getSetting(key);
      if (other !== undefined) return other;
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
    this.#closed = true;
    this.#cancelRetry?.();
    try {
      this.#db.settle();
    } catch {
      // The next start finds out by the kernel.
    }
    this.#db.close();
  }

  #retry(wait: number): void {
    this.#cancelRetry?.();
    if (this.#closed) return;
    this.#cancelRetry = this.#clock.after(wait, () => {
      try {
        this.#db.settle();
      } catch (e) {
        if (!isStoreFailure(e)) throw e;
        return this.#retry(Math.min(LATE_RETRY_MS.most, wait * 2));
      }
      for (const fn of this.#settled) fn();
    });
  }

  [Symbol.dispose](): void {
    this.close();
  }
}
