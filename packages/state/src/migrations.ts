/**
 * Schema by version: entry n brings version n to n + 1. An entry that was released is never edited; a database written
 * by any of them opens (test/fixtures holds one file per released version).
 */
export const MIGRATIONS: readonly string[] = [
  `
  CREATE TABLE settings (key TEXT PRIMARY KEY, value TEXT NOT NULL) STRICT;
  CREATE TABLE teams (id TEXT PRIMARY KEY, name TEXT NOT NULL UNIQUE, created_at INTEGER NOT NULL) STRICT;
  CREATE TABLE api_keys (
    id TEXT PRIMARY KEY, team TEXT NOT NULL REFERENCES teams(id), name TEXT NOT NULL, hash TEXT NOT NULL UNIQUE,
    mask TEXT NOT NULL, created_at INTEGER NOT NULL, last_used_at INTEGER
  ) STRICT;
  CREATE TABLE layers (id TEXT PRIMARY KEY, path TEXT NOT NULL, bytes INTEGER NOT NULL, created_at INTEGER NOT NULL) STRICT;
  CREATE TABLE snapshots (
    id TEXT PRIMARY KEY, parent TEXT, machine TEXT NOT NULL, device_path TEXT NOT NULL, memory_path TEXT NOT NULL,
    disk_bytes INTEGER NOT NULL, defaults TEXT NOT NULL, envd_version TEXT NOT NULL, created_at INTEGER NOT NULL
  ) STRICT;
  CREATE TABLE snapshot_layers (
    snapshot TEXT NOT NULL REFERENCES snapshots(id) ON DELETE CASCADE, position INTEGER NOT NULL,
    layer TEXT NOT NULL REFERENCES layers(id), PRIMARY KEY (snapshot, position)
  ) STRICT, WITHOUT ROWID;
  CREATE INDEX snapshot_layers_layer ON snapshot_layers(layer);
  CREATE TABLE templates (
    id TEXT PRIMARY KEY, team TEXT NOT NULL REFERENCES teams(id), name TEXT NOT NULL, public INTEGER NOT NULL,
    snapshot TEXT NOT NULL REFERENCES snapshots(id), created_at INTEGER NOT NULL, updated_at INTEGER NOT NULL,
    last_spawned_at INTEGER, spawn_count INTEGER NOT NULL, build_count INTEGER NOT NULL, UNIQUE (team, name)
  ) STRICT;
  CREATE TABLE aliases (
    alias TEXT PRIMARY KEY, template TEXT NOT NULL REFERENCES templates(id) ON DELETE CASCADE
  ) STRICT, WITHOUT ROWID;
  CREATE TABLE sandboxes (
    id TEXT PRIMARY KEY, team TEXT NOT NULL, template TEXT NOT NULL, snapshot TEXT NOT NULL, alias TEXT,
    state TEXT NOT NULL, run TEXT, started_at INTEGER NOT NULL, end_at INTEGER NOT NULL, metadata TEXT NOT NULL,
    env_vars TEXT NOT NULL, secure INTEGER NOT NULL, on_timeout TEXT NOT NULL, auto_resume INTEGER NOT NULL,
    internet INTEGER, public_traffic INTEGER NOT NULL, ended_at INTEGER, cause TEXT
  ) STRICT;
  CREATE INDEX sandboxes_state ON sandboxes(state, ended_at);
  CREATE TABLE runs (
    id TEXT PRIMARY KEY, purpose TEXT NOT NULL, snapshot TEXT, sandbox TEXT, handle TEXT, created_at INTEGER NOT NULL
  ) STRICT;
  CREATE TABLE resources (
    run TEXT NOT NULL, kind TEXT NOT NULL, name TEXT NOT NULL, phase TEXT NOT NULL, PRIMARY KEY (run, kind)
  ) STRICT, WITHOUT ROWID;
  CREATE TABLE idempotency (
    team TEXT NOT NULL, key TEXT NOT NULL, hash TEXT NOT NULL, sandbox TEXT NOT NULL, answer TEXT NOT NULL,
    created_at INTEGER NOT NULL, PRIMARY KEY (team, key)
  ) STRICT, WITHOUT ROWID;
  CREATE INDEX idempotency_age ON idempotency(created_at);
  CREATE TABLE samples (sandbox TEXT NOT NULL, at INTEGER NOT NULL, sample TEXT NOT NULL, PRIMARY KEY (sandbox, at)) STRICT, WITHOUT ROWID;
  CREATE INDEX samples_age ON samples(at);
  CREATE TABLE events (
    id INTEGER PRIMARY KEY, sandbox TEXT NOT NULL, at INTEGER NOT NULL, level TEXT NOT NULL, message TEXT NOT NULL,
    fields TEXT NOT NULL
  ) STRICT;
  CREATE INDEX events_sandbox ON events(sandbox, id);
  CREATE INDEX events_age ON events(at);
  `,
  // Lineage: what a snapshot was taken for, and of which sandbox.
  `
  ALTER TABLE snapshots ADD COLUMN cause TEXT NOT NULL DEFAULT 'build';
  ALTER TABLE snapshots ADD COLUMN sandbox TEXT;
  CREATE INDEX snapshots_sandbox ON snapshots(sandbox) WHERE sandbox IS NOT NULL;
  CREATE INDEX snapshots_parent ON snapshots(parent) WHERE parent IS NOT NULL;
  `,
  // Egress rules of a sandbox.
  `
  ALTER TABLE sandboxes ADD COLUMN network TEXT;
  `,
  // Memory in files that snapshots share, paused sandboxes, saved snapshots and checkpoints.
  `
  CREATE TABLE memory_files (
    id TEXT PRIMARY KEY, path TEXT NOT NULL, kind TEXT NOT NULL, bytes INTEGER NOT NULL, created_at INTEGER NOT NULL
  ) STRICT;
  CREATE TABLE snapshot_memory (
    snapshot TEXT NOT NULL REFERENCES snapshots(id) ON DELETE CASCADE, position INTEGER NOT NULL,
    file TEXT NOT NULL REFERENCES memory_files(id), PRIMARY KEY (snapshot, position)
  ) STRICT, WITHOUT ROWID;
  CREATE INDEX snapshot_memory_file ON snapshot_memory(file);
  INSERT INTO memory_files SELECT 'm' || substr(id, 2), memory_path, 'flat', 0, created_at FROM snapshots;
  INSERT INTO snapshot_memory SELECT id, 0, 'm' || substr(id, 2) FROM snapshots;
  ALTER TABLE snapshots DROP COLUMN memory_path;
  ALTER TABLE sandboxes ADD COLUMN pause_memory INTEGER NOT NULL DEFAULT 1;
  ALTER TABLE runs ADD COLUMN memory_file TEXT;
  CREATE TABLE run_layers (
    run TEXT NOT NULL, position INTEGER NOT NULL, layer TEXT NOT NULL REFERENCES layers(id), PRIMARY KEY (run, position)
  ) STRICT, WITHOUT ROWID;
  CREATE INDEX run_layers_layer ON run_layers(layer);
  CREATE TABLE saved (
    id TEXT PRIMARY KEY, snapshot TEXT NOT NULL REFERENCES snapshots(id), sandbox TEXT NOT NULL, team TEXT NOT NULL,
    created_at INTEGER NOT NULL, template TEXT NOT NULL, last_spawned_at INTEGER, spawn_count INTEGER NOT NULL
  ) STRICT;
  CREATE INDEX saved_snapshot ON saved(snapshot);
  CREATE TABLE saved_names (
    team TEXT NOT NULL, alias TEXT NOT NULL, tag TEXT NOT NULL, saved TEXT NOT NULL REFERENCES saved(id) ON DELETE CASCADE,
    PRIMARY KEY (team, alias, tag)
  ) STRICT, WITHOUT ROWID;
  CREATE INDEX saved_names_saved ON saved_names(saved);
  CREATE TABLE checkpoints (
    id TEXT PRIMARY KEY, sandbox TEXT NOT NULL, snapshot TEXT NOT NULL REFERENCES snapshots(id), name TEXT,
    created_at INTEGER NOT NULL
  ) STRICT;
  CREATE INDEX checkpoints_sandbox ON checkpoints(sandbox, created_at);
  CREATE INDEX checkpoints_snapshot ON checkpoints(snapshot);
  `,
  // What a sandbox that traffic wakes gets again.
  `
  ALTER TABLE sandboxes ADD COLUMN timeout_ms INTEGER NOT NULL DEFAULT 0;
  `,
  // A node that stops pauses what runs. A device state is checked before it is loaded.
  `
  ALTER TABLE sandboxes ADD COLUMN interrupted INTEGER NOT NULL DEFAULT 0;
  ALTER TABLE snapshots ADD COLUMN device_crc INTEGER;
  `,
  // How requests from outside reach a sandbox.
  `
  ALTER TABLE sandboxes ADD COLUMN ingress TEXT;
  `,
  // The memory file that a VMM has mapped is kept, whatever files the snapshots are made of by now.
  `
  ALTER TABLE runs ADD COLUMN maps TEXT;
  UPDATE runs SET maps = (SELECT file FROM snapshot_memory WHERE snapshot = runs.snapshot AND position = 0)
    WHERE memory_file IS NULL;
  CREATE INDEX runs_maps ON runs(maps) WHERE maps IS NOT NULL;
  `,
  // Who is told of what happens to a team's sandboxes, up to which event each was told.
  `
  CREATE TABLE webhooks (
    id TEXT PRIMARY KEY, team TEXT NOT NULL REFERENCES teams(id), name TEXT NOT NULL, url TEXT NOT NULL,
    enabled INTEGER NOT NULL, events TEXT NOT NULL, secret TEXT NOT NULL, created_at INTEGER NOT NULL,
    told INTEGER NOT NULL
  ) STRICT;
  CREATE INDEX webhooks_team ON webhooks(team, created_at);
  `,
];
