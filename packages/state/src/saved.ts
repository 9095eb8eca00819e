import {
  type CheckpointId,
  parseCheckpointId,
  parseSandboxId,
  parseSnapshotId,
  parseTemplateId,
  type SandboxId,
  type SnapshotId,
  type TemplateId,
} from "@aenv/base";
import { type Database, int, optional, type Row, text } from "./database.ts";
import type { CheckpointRecord, SavedRecord } from "./records.ts";

export interface SavedName {
  team: string;
  alias: string;
  tag: string;
}

/** Snapshots that users keep, and their names. */
export class SavedSnapshots {
  readonly #db: Database;

  constructor(db: Database) {
    this.#db = db;
  }

  /** A name that another one had is this one's from now on. */
  put(s: SavedRecord): void {
    this.#db.tx(() => {
      this.#db.run(
        `INSERT INTO saved (id, snapshot, sandbox, team, created_at, template, last_spawned_at, spawn_count)
         VALUES (?, ?, ?, ?, ?, ?, ?, ?)
         ON CONFLICT (id) DO UPDATE SET snapshot = excluded.snapshot, sandbox = excluded.sandbox,
           created_at = excluded.created_at, template = excluded.template`,
        s.id,
        s.snapshot,
        s.sandbox,
        s.team,
        s.createdAt,
        s.template,
        s.lastSpawnedAt ?? null,
        s.spawnCount,
      );
      for (const { team, alias, tag } of s.names)
        this.#db.run(
          `INSERT INTO saved_names (team, alias, tag, saved) VALUES (?, ?, ?, ?)
           ON CONFLICT (team, alias, tag) DO UPDATE SET saved = excluded.saved`,
          team,
          alias,
          tag,
          s.id,
        );
    });
  }

  get(id: string): SavedRecord | undefined {
    const row = this.#db.get("SELECT * FROM saved WHERE id = ?", id);
    return row && this.#record(row);
  }

  byName({ team, alias, tag }: SavedName): SavedRecord | undefined {
    const row = this.#db.get(
      `SELECT s.* FROM saved_names n JOIN saved s ON s.id = n.saved WHERE n.team = ? AND n.alias = ? AND n.tag = ?`,
      team,
      alias,
      tag,
    );
    return row && this.#record(row);
  }

  bySnapshot(id: SnapshotId): SavedRecord | undefined {
    const row = this.#db.get("SELECT * FROM saved WHERE snapshot = ? ORDER BY created_at LIMIT 1", id);
    return row && this.#record(row);
  }

  /** Newest first. */
  list(): SavedRecord[] {
    return this.#db.all("SELECT * FROM saved ORDER BY created_at DESC, id DESC").map((r) => this.#record(r));
  }

  countSpawn(id: TemplateId, at: number): void {
    this.#db.run("UPDATE saved SET spawn_count = spawn_count + 1, last_spawned_at = ? WHERE id = ?", at, id);
  }

  remove(id: TemplateId): boolean {
    return this.#db.run("DELETE FROM saved WHERE id = ?", id) > 0;
  }

  #record(r: Row): SavedRecord {
    const id = parseTemplateId(text(r, "id"));
    return {
      id,
      snapshot: parseSnapshotId(text(r, "snapshot")),
      sandbox: parseSandboxId(text(r, "sandbox")),
      template: parseTemplateId(text(r, "template")),
      team: text(r, "team"),
      createdAt: int(r, "created_at"),
      ...optional(r, "last_spawned_at", "lastSpawnedAt", int),
      spawnCount: int(r, "spawn_count"),
      names: this.#db
        .all("SELECT team, alias, tag FROM saved_names WHERE saved = ? ORDER BY team, alias, tag", id)
        .map((n) => ({ team: text(n, "team"), alias: text(n, "alias"), tag: text(n, "tag") })),
    };
  }
}

/** States to which sandboxes can return. They go with their sandbox. */
export class Checkpoints {
  readonly #db: Database;

  constructor(db: Database) {
    this.#db = db;
  }

  /** A name that another one of the sandbox had is this one's from now on. */
  add(c: CheckpointRecord): void {
    if (c.name !== undefined)
      this.#db.run("UPDATE checkpoints SET name = NULL WHERE sandbox = ? AND name = ?", c.sandbox, c.name);
    this.#db.run(
      "INSERT INTO checkpoints (id, sandbox, snapshot, name, created_at) VALUES (?, ?, ?, ?, ?)",
      c.id,
      c.sandbox,
      c.snapshot,
      c.name ?? null,
      c.createdAt,
    );
  }

  get(id: CheckpointId): CheckpointRecord | undefined {
    const row = this.#db.get("SELECT * FROM checkpoints WHERE id = ?", id);
    return row && checkpoint(row);
  }

  /** Oldest first. */
  of(sandbox: SandboxId): CheckpointRecord[] {
    return this.#db.all("SELECT * FROM checkpoints WHERE sandbox = ? ORDER BY created_at, id", sandbox).map(checkpoint);
  }

  /** Those that have a name. */
  named(): (CheckpointRecord & { name: string })[] {
    const all = this.#db
      .all("SELECT * FROM checkpoints WHERE name IS NOT NULL ORDER BY created_at, id")
      .map(checkpoint);
    return all.flatMap((c) => (c.name === undefined ? [] : [{ ...c, name: c.name }]));
  }

  removeOf(sandbox: SandboxId): void {
    this.#db.run("DELETE FROM checkpoints WHERE sandbox = ?", sandbox);
  }
}

const checkpoint = (r: Row): CheckpointRecord => ({
  id: parseCheckpointId(text(r, "id")),
  sandbox: parseSandboxId(text(r, "sandbox")),
  snapshot: parseSnapshotId(text(r, "snapshot")),
  ...optional(r, "name", "name", text),
  createdAt: int(r, "created_at"),
});
