import {
  AenvError,
  bytes,
  parseLayerId,
  parseMemoryId,
  parseSandboxId,
  parseSnapshotId,
  parseTemplateId,
} from "@aenv/base";
import type { LayerId, MemoryId, SandboxId, SnapshotId, TemplateId } from "@aenv/base";
import { bool, type Database, int, json, oneOf, optional, type Row, text } from "./database.ts";
import {
  type GuestDefaults,
  type LayerRecord,
  type MachineRecord,
  type MemoryFileRecord,
  SNAPSHOT_CAUSES,
  type SnapshotRecord,
  type TemplateRecord,
} from "./records.ts";

export class Layers {
  readonly #db: Database;

  constructor(db: Database) {
    this.#db = db;
  }

  /** Known already is fine: layers are immutable. */
  add(layer: LayerRecord): void {
    this.#db.run(
      "INSERT INTO layers (id, path, bytes, created_at) VALUES (?, ?, ?, ?) ON CONFLICT (id) DO NOTHING",
      layer.id,
      layer.path,
      layer.bytes,
      layer.createdAt,
    );
  }

  get(id: LayerId): LayerRecord | undefined {
    const row = this.#db.get("SELECT * FROM layers WHERE id = ?", id);
    return row && layer(row);
  }

  list(): LayerRecord[] {
    return this.#db.all("SELECT * FROM layers ORDER BY created_at, id").map(layer);
  }

  /** Layers that no snapshot and no running disk stands on. */
  unused(): LayerRecord[] {
    return this.#db
      .all(
        `SELECT * FROM layers l WHERE NOT EXISTS (SELECT 1 FROM snapshot_layers s WHERE s.layer = l.id)
           AND NOT EXISTS (SELECT 1 FROM run_layers r WHERE r.layer = l.id)`,
      )
      .map(layer);
  }

  /** How many snapshots stand on it. */
  users(id: LayerId): number {
    return int(this.#db.get("SELECT count(*) AS n FROM snapshot_layers WHERE layer = ?", id) ?? { n: 0 }, "n");
  }

  /** Only where no snapshot stands on it. */
  remove(id: LayerId): void {
    this.#db.run("DELETE FROM layers WHERE id = ?", id);
  }
}

/** Files of guest memory, each of them part of one snapshot or of several. */
export class MemoryFiles {
  readonly #db: Database;

  constructor(db: Database) {
    this.#db = db;
  }

  /** Known already is fine: a file never changes. */
  add(m: MemoryFileRecord): void {
    this.#db.run(
      "INSERT INTO memory_files (id, path, kind, bytes, created_at) VALUES (?, ?, ?, ?, ?) ON CONFLICT (id) DO NOTHING",
      m.id,
      m.path,
      m.kind,
      m.bytes,
      m.createdAt,
    );
  }

  get(id: MemoryId): MemoryFileRecord | undefined {
    const row = this.#db.get("SELECT * FROM memory_files WHERE id = ?", id);
    return row && memoryFile(row);
  }

  list(): MemoryFileRecord[] {
    return this.#db.all("SELECT * FROM memory_files ORDER BY created_at, id").map(memoryFile);
  }

  /** Files that no snapshot is made of and no VMM maps. */
  unused(): MemoryFileRecord[] {
    return this.#db
      .all(
        `SELECT * FROM memory_files m WHERE NOT EXISTS (SELECT 1 FROM snapshot_memory s WHERE s.file = m.id)
           AND NOT EXISTS (SELECT 1 FROM runs r WHERE r.maps = m.id)`,
      )
      .map(memoryFile);
  }

  /** How many snapshots are made of it. */
  users(id: MemoryId): number {
    return int(this.#db.get("SELECT count(*) AS n FROM snapshot_memory WHERE file = ?", id) ?? { n: 0 }, "n");
  }

  remove(id: MemoryId): void {
    this.#db.run("DELETE FROM memory_files WHERE id = ?", id);
  }
}

export class Snapshots {
  readonly #db: Database;

  constructor(db: Database) {
    this.#db = db;
  }

  /** Its layers and memory files are recorded with it. The caller commits: a snapshot that is not here does not exist. */
  add(s: SnapshotRecord): void {
    this.#db.tx(() => {
      this.#db.run(
        `INSERT INTO snapshots (id, parent, cause, sandbox, machine, device_path, device_crc, disk_bytes, defaults,
           envd_version, created_at)
         VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)`,
        s.id,
        s.parent ?? null,
        s.cause,
        s.sandbox ?? null,
        JSON.stringify(s.machine),
        s.devicePath,
        s.deviceCrc ?? null,
        s.diskBytes,
        JSON.stringify(s.defaults),
        s.envdVersion,
        s.createdAt,
      );
      this.#putLayers(s.id, s.layers);
      this.#putMemory(s.id, s.memory);
    });
  }

  get(id: SnapshotId): SnapshotRecord | undefined {
    const row = this.#db.get("SELECT * FROM snapshots WHERE id = ?", id);
    return row && this.#record(row);
  }

  list(): SnapshotRecord[] {
    return this.#db.all("SELECT * FROM snapshots ORDER BY created_at, id").map((row) => this.#record(row));
  }

  /** What each of them was captured from. */
  lineage(): { id: SnapshotId; parent?: SnapshotId; sandbox?: SandboxId; createdAt: number }[] {
    return this.#db.all("SELECT id, parent, sandbox, created_at FROM snapshots").map((r) => ({
      id: parseSnapshotId(text(r, "id")),
      ...optional(r, "parent", "parent", (row, c) => parseSnapshotId(text(row, c))),
      ...optional(r, "sandbox", "sandbox", (row, c) => parseSandboxId(text(row, c))),
      createdAt: int(r, "created_at"),
    }));
  }

  /**
   * The same content in other files: in every snapshot whose memory begins with `before`, bottom first, these files are
   * replaced by `after`. Returns those snapshots. Part of a transaction.
   */
  replaceMemory(before: readonly MemoryFileRecord[], after: readonly MemoryFileRecord[]): SnapshotRecord[] {
    const top = before.at(-1);
    if (!top) return [];
    const found = this.#db
      .all("SELECT snapshot FROM snapshot_memory WHERE file = ? AND position = ?", top.id, before.length - 1)
      .map((r) => this.get(parseSnapshotId(text(r, "snapshot"))))
      .filter((s) => s !== undefined)
      .filter((s) => before.every((m, i) => s.memory[i]?.id === m.id));
    for (const { id, memory } of found) {
      this.#db.run("DELETE FROM snapshot_memory WHERE snapshot = ?", id);
      this.#putMemory(id, [...after, ...memory.slice(before.length)]);
    }
    return found.map((s) => this.get(s.id) ?? s);
  }

  /** The same for layers of a disk. */
  replaceLayers(before: readonly LayerRecord[], after: readonly LayerRecord[]): SnapshotRecord[] {
    const top = before.at(-1);
    if (!top) return [];
    const found = this.#db
      .all("SELECT snapshot FROM snapshot_layers WHERE layer = ? AND position = ?", top.id, before.length - 1)
      .map((r) => this.get(parseSnapshotId(text(r, "snapshot"))))
      .filter((s) => s !== undefined)
      .filter((s) => before.every((l, i) => s.layers[i]?.id === l.id));
    for (const { id, layers } of found) {
      this.#db.run("DELETE FROM snapshot_layers WHERE snapshot = ?", id);
      this.#putLayers(id, [...after, ...layers.slice(before.length)]);
    }
    return found.map((s) => this.get(s.id) ?? s);
  }

  /** Snapshots that nothing stands on: no template, no saved snapshot, no checkpoint, no sandbox and no run. */
  unused(): SnapshotRecord[] {
    return this.#db
      .all(
        `SELECT * FROM snapshots s WHERE NOT EXISTS (SELECT 1 FROM templates t WHERE t.snapshot = s.id)
           AND NOT EXISTS (SELECT 1 FROM saved v WHERE v.snapshot = s.id)
           AND NOT EXISTS (SELECT 1 FROM checkpoints c WHERE c.snapshot = s.id)
           AND NOT EXISTS (SELECT 1 FROM sandboxes b WHERE b.snapshot = s.id AND b.state <> 'gone')
           AND NOT EXISTS (SELECT 1 FROM runs r WHERE r.snapshot = s.id)`,
      )
      .map((row) => this.#record(row));
  }

  /** What was captured from it descends from its parent from now on. */
  remove(id: SnapshotId): void {
    this.#db.tx(() => {
      this.#db.run(
        "UPDATE snapshots SET parent = (SELECT parent FROM snapshots WHERE id = ?) WHERE parent = ?",
        id,
        id,
      );
      this.#db.run("DELETE FROM snapshots WHERE id = ?", id);
    });
  }

  #putLayers(id: SnapshotId, list: readonly LayerRecord[]): void {
    const layers = new Layers(this.#db);
    for (const [position, l] of list.entries()) {
      layers.add(l);
      this.#db.run("INSERT INTO snapshot_layers (snapshot, position, layer) VALUES (?, ?, ?)", id, position, l.id);
    }
  }

  #putMemory(id: SnapshotId, memory: readonly MemoryFileRecord[]): void {
    const files = new MemoryFiles(this.#db);
    for (const [position, m] of memory.entries()) {
      files.add(m);
      this.#db.run("INSERT INTO snapshot_memory (snapshot, position, file) VALUES (?, ?, ?)", id, position, m.id);
    }
  }

  #record(r: Row): SnapshotRecord {
    const id = parseSnapshotId(text(r, "id"));
    return {
      id,
      ...optional(r, "parent", "parent", (row, c) => parseSnapshotId(text(row, c))),
      cause: oneOf(SNAPSHOT_CAUSES, text(r, "cause"), "cause"),
      ...optional(r, "sandbox", "sandbox", (row, c) => parseSandboxId(text(row, c))),
      machine: json<MachineRecord>(r, "machine"),
      devicePath: text(r, "device_path"),
      ...optional(r, "device_crc", "deviceCrc", int),
      memory: this.#db
        .all(
          "SELECT m.* FROM snapshot_memory s JOIN memory_files m ON m.id = s.file WHERE s.snapshot = ? ORDER BY s.position",
          id,
        )
        .map(memoryFile),
      diskBytes: bytes(int(r, "disk_bytes")),
      layers: this.#db
        .all(
          "SELECT l.* FROM snapshot_layers s JOIN layers l ON l.id = s.layer WHERE s.snapshot = ? ORDER BY s.position",
          id,
        )
        .map(layer),
      defaults: json<GuestDefaults>(r, "defaults"),
      envdVersion: text(r, "envd_version"),
      createdAt: int(r, "created_at"),
    };
  }
}

export class TemplateRows {
  readonly #db: Database;

  constructor(db: Database) {
    this.#db = db;
  }

  /** A new template, or a new build of the one that has its id. */
  put(t: TemplateRecord): void {
    this.#db.run(
      `INSERT INTO templates (id, team, name, public, snapshot, created_at, updated_at, last_spawned_at, spawn_count, build_count)
       VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?)
       ON CONFLICT (id) DO UPDATE SET public = excluded.public, snapshot = excluded.snapshot,
         updated_at = excluded.updated_at, build_count = excluded.build_count`,
      t.id,
      t.team,
      t.name,
      t.public ? 1 : 0,
      t.snapshot,
      t.createdAt,
      t.updatedAt,
      t.lastSpawnedAt ?? null,
      t.spawnCount,
      t.buildCount,
    );
  }

  get(id: string): TemplateRecord | undefined {
    const row = this.#db.get("SELECT * FROM templates WHERE id = ?", id);
    return row && template(row);
  }

  byName(team: string, name: string): TemplateRecord | undefined {
    const row = this.#db.get("SELECT * FROM templates WHERE team = ? AND name = ?", team, name);
    return row && template(row);
  }

  /** By alias, then by the name of a public template. */
  byAlias(alias: string): TemplateRecord | undefined {
    const row =
      this.#db.get("SELECT t.* FROM aliases a JOIN templates t ON t.id = a.template WHERE a.alias = ?", alias) ??
      this.#db.get("SELECT * FROM templates WHERE name = ? AND public = 1 ORDER BY created_at LIMIT 1", alias);
    return row && template(row);
  }

  bySnapshot(snapshot: SnapshotId): TemplateRecord | undefined {
    const row = this.#db.get("SELECT * FROM templates WHERE snapshot = ?", snapshot);
    return row && template(row);
  }

  list(): TemplateRecord[] {
    return this.#db.all("SELECT * FROM templates ORDER BY created_at DESC, id").map(template);
  }

  aliases(id: TemplateId): string[] {
    return this.#db
      .all("SELECT alias FROM aliases WHERE template = ? ORDER BY alias", id)
      .map((row) => text(row, "alias"));
  }

  /** CONFLICT when another template has it. */
  addAlias(alias: string, id: TemplateId): void {
    this.#db.run("INSERT INTO aliases (alias, template) VALUES (?, ?) ON CONFLICT (alias) DO NOTHING", alias, id);
    const row = this.#db.get("SELECT template FROM aliases WHERE alias = ?", alias);
    if (row?.["template"] !== id) throw new AenvError("CONFLICT", `the alias ${alias} belongs to another template`);
  }

  countSpawn(id: TemplateId, at: number): void {
    this.#db.run("UPDATE templates SET spawn_count = spawn_count + 1, last_spawned_at = ? WHERE id = ?", at, id);
  }

  remove(id: TemplateId): boolean {
    return this.#db.run("DELETE FROM templates WHERE id = ?", id) > 0;
  }
}

const layer = (r: Row): LayerRecord => ({
  id: parseLayerId(text(r, "id")),
  path: text(r, "path"),
  bytes: int(r, "bytes"),
  createdAt: int(r, "created_at"),
});

const memoryFile = (r: Row): MemoryFileRecord => ({
  id: parseMemoryId(text(r, "id")),
  path: text(r, "path"),
  kind: oneOf(["flat", "delta"], text(r, "kind"), "memory file"),
  bytes: int(r, "bytes"),
  createdAt: int(r, "created_at"),
});

const template = (r: Row): TemplateRecord => ({
  id: parseTemplateId(text(r, "id")),
  team: text(r, "team"),
  name: text(r, "name"),
  public: bool(r, "public"),
  snapshot: parseSnapshotId(text(r, "snapshot")),
  createdAt: int(r, "created_at"),
  updatedAt: int(r, "updated_at"),
  ...optional(r, "last_spawned_at", "lastSpawnedAt", int),
  spawnCount: int(r, "spawn_count"),
  buildCount: int(r, "build_count"),
});
