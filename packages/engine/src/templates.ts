import { rm, rmdir } from "node:fs/promises";
import { dirname } from "node:path";
import { AenvError, errnoOf, type LayerId, messageOf, parseSnapshotId, type SnapshotId } from "@aenv/base";
import { DEFAULT_TEAM, type SavedRecord, type SnapshotRecord, type State, type TemplateRecord } from "@aenv/state";
import type { Context } from "./context.ts";
import type { Artifact } from "./holds.ts";
import type { TemplateView } from "./types.ts";

export interface Source {
  template: TemplateRecord;
  snapshot: SnapshotRecord;
}

/** The tag that every template has; others come with named snapshots. */
const DEFAULT_TAGS: readonly string[] = ["default", "latest"];

/** Templates by every name they have, and the artifacts that nobody needs any more. */
export class TemplateStore {
  readonly #ctx: Context;
  readonly #dropPool: (snapshot: SnapshotId) => Promise<void>;
  readonly #imported = new Set<LayerId>();

  constructor(ctx: Context, dropPool: (snapshot: SnapshotId) => Promise<void>) {
    this.#ctx = ctx;
    this.#dropPool = dropPool;
  }

  /** A layer that no build has used yet: kept until one has, or the server ends. */
  imported(id: LayerId): void {
    this.#imported.add(id);
  }

  used(id: LayerId): void {
    this.#imported.delete(id);
  }

  /** Protects an artifact from collection until the disposal. */
  hold(id: Artifact): Disposable {
    return this.#ctx.holds.hold(id);
  }

  /** A template, or a saved snapshot in its form. */
  find(nameOrId: string, team = DEFAULT_TEAM): TemplateRecord | undefined {
    return this.#template(nameOrId, team) ?? this.#saved(nameOrId, team);
  }

  #saved(nameOrId: string, team: string): TemplateRecord | undefined {
    const saved = findSaved(this.#ctx.state, nameOrId, team);
    if (!saved) return undefined;
    const { id, snapshot, createdAt, spawnCount } = saved;
    const name = saved.names[0]?.alias ?? id;
    return {
      id,
      team: saved.team,
      name,
      public: false,
      snapshot,
      createdAt,
      updatedAt: createdAt,
      spawnCount,
      buildCount: 1,
    };
  }

  #template(nameOrId: string, team: string): TemplateRecord | undefined {
    const { templates } = this.#ctx.state;
    const byId = templates.get(nameOrId);
    if (byId) return byId;
    if (/^s[a-z0-9]{16}$/.test(nameOrId)) {
      const bySnapshot = templates.bySnapshot(parseSnapshotId(nameOrId));
      if (bySnapshot) return bySnapshot;
    }
    const colon = nameOrId.indexOf(":");
    if (colon >= 0 && !DEFAULT_TAGS.includes(nameOrId.slice(colon + 1))) return undefined;
    const path = colon >= 0 ? nameOrId.slice(0, colon) : nameOrId;
    const slash = path.indexOf("/");
    if (slash >= 0) return templates.byName(path.slice(0, slash), path.slice(slash + 1));
    return templates.get(path) ?? templates.byName(team, path) ?? templates.byAlias(path);
  }

  source(nameOrId: string, team?: string): Source {
    const template = this.find(nameOrId, team);
    const snapshot = template && this.#ctx.state.snapshots.get(template.snapshot);
    if (!template || !snapshot)
      throw new AenvError("NOT_FOUND", `template '${nameOrId}' not found`, {
        hint: "aenv template list shows what this node has.",
        data: { template: nameOrId.slice(0, 200) },
      });
    return { template, snapshot };
  }

  view(t: TemplateRecord): TemplateView {
    const snapshot = this.#ctx.state.snapshots.get(t.snapshot);
    if (!snapshot) throw new AenvError("CORRUPT", `template ${t.id} has no snapshot ${t.snapshot}`);
    return {
      templateId: t.id,
      name: t.name,
      aliases: [t.name, ...this.#ctx.state.templates.aliases(t.id)],
      snapshotId: t.snapshot,
      team: t.team,
      public: t.public,
      ...sizes(snapshot),
      envdVersion: snapshot.envdVersion,
      createdAt: t.createdAt,
      updatedAt: t.updatedAt,
      ...(t.lastSpawnedAt === undefined ? {} : { lastSpawnedAt: t.lastSpawnedAt }),
      spawnCount: t.spawnCount,
      buildCount: t.buildCount,
    };
  }

  list(team?: string): TemplateView[] {
    return this.#ctx.state.templates
      .list()
      .filter((t) => team === undefined || t.team === team || t.public)
      .map((t) => this.view(t));
  }

  async delete(nameOrId: string): Promise<boolean> {
    const template = this.#template(nameOrId, DEFAULT_TEAM);
    if (!template) return false;
    const removed = this.#ctx.state.durable(() => this.#ctx.state.templates.remove(template.id));
    await this.#dropPool(template.snapshot);
    await this.collect();
    return removed;
  }

  /** Frees snapshots, layers and memory files that nothing stands on. The record goes first: what has none does not exist. */
  async collect(): Promise<number> {
    const { state, paths } = this.#ctx;
    const free = { files: [] as string[], folders: [] as string[], trees: [] as string[] };
    state.tx(() => {
      for (const s of state.snapshots.unused()) {
        if (this.#ctx.holds.spares(s.id)) continue;
        state.snapshots.remove(s.id);
        this.#ctx.tokens.forgetCaptured(s.id);
        free.files.push(s.devicePath, paths.manifest(s.id));
        free.folders.push(paths.snapshotDir(s.id));
      }
      for (const l of state.layers.unused()) {
        if (this.#ctx.holds.spares(l.id) || this.#imported.has(l.id)) continue;
        state.layers.remove(l.id);
        free.trees.push(paths.layerDir(l.id));
      }
      for (const m of state.memory.unused()) {
        if (this.#ctx.holds.spares(m.id)) continue;
        state.memory.remove(m.id);
        free.files.push(m.path);
        free.folders.push(dirname(m.path));
      }
    });
    for (const file of free.files) await this.#remove(() => rm(file, { force: true }), file);
    // A folder of an older version may hold the memory of others still.
    for (const folder of free.folders) await this.#remove(() => removeEmpty(folder), folder);
    // An import that was cut off leaves a file under another name.
    for (const tree of free.trees) await this.#remove(() => rm(tree, { recursive: true, force: true }), tree);
    return free.folders.length + free.trees.length;
  }

  async #remove(fn: () => Promise<void>, path: string): Promise<void> {
    try {
      await fn();
    } catch (e) {
      // The next start sweeps it: it has no record.
      this.#ctx.logger.warn({ path, error: messageOf(e) }, "unused artifact was not deleted");
    }
  }
}

async function removeEmpty(folder: string): Promise<void> {
  try {
    await rmdir(folder);
  } catch (e) {
    const errno = errnoOf(e);
    if (errno !== "ENOENT" && errno !== "ENOTEMPTY") throw e;
  }
}

export interface SnapshotName {
  team: string;
  alias: string;
  tag: string;
}

const ALIAS = /^[a-z0-9][a-z0-9._-]{0,62}$/;

/** `alias`, `alias:tag` or `team/alias:tag`; undefined for anything else. */
export function parseSnapshotName(text: string, team: string): SnapshotName | undefined {
  const match = /^(?:([^/:]+)\/)?([^/:]+)(?::([^/:]+))?$/.exec(text);
  const [, owner = team, alias = "", tag = "default"] = match ?? [];
  return match && ALIAS.test(alias) && ALIAS.test(tag) ? { team: owner, alias, tag } : undefined;
}

/** By its id, `<id>:default`, the id of its state, or one of its names. */
export function findSaved(state: State, nameOrId: string, team: string): SavedRecord | undefined {
  const id = /^(t[a-z0-9]{16})(?::default)?$/.exec(nameOrId)?.[1];
  const byId = id === undefined ? undefined : state.saved.get(id);
  if (byId) return byId;
  if (/^s[a-z0-9]{16}$/.test(nameOrId)) return state.saved.bySnapshot(parseSnapshotId(nameOrId));
  const name = parseSnapshotName(nameOrId, team);
  return name && state.saved.byName(name);
}

const MIB = 1024 * 1024;

export function sizes(s: SnapshotRecord): { cpuCount: number; memoryMB: number; diskSizeMB: number } {
  return {
    cpuCount: s.machine.vcpus,
    memoryMB: Math.round(s.machine.memoryBytes / MIB),
    diskSizeMB: Math.round(s.diskBytes / MIB),
  };
}
