import { rm } from "node:fs/promises";
import { AenvError, type LayerId, messageOf, parseSnapshotId, type SnapshotId } from "@aenv/base";
import { DEFAULT_TEAM, type SnapshotRecord, type TemplateRecord } from "@aenv/state";
import type { Context } from "./context.ts";
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
  /** In use by something that is not in the database yet: builds, imports. */
  readonly #held = new Set<LayerId | SnapshotId>();

  constructor(ctx: Context, dropPool: (snapshot: SnapshotId) => Promise<void>) {
    this.#ctx = ctx;
    this.#dropPool = dropPool;
  }

  /** Protects an artifact from collection until the disposal. */
  hold(id: LayerId | SnapshotId): Disposable {
    this.#held.add(id);
    return { [Symbol.dispose]: () => void this.#held.delete(id) };
  }

  find(nameOrId: string, team = DEFAULT_TEAM): TemplateRecord | undefined {
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
    const template = this.find(nameOrId);
    if (!template) return false;
    const removed = this.#ctx.state.durable(() => this.#ctx.state.templates.remove(template.id));
    await this.#dropPool(template.snapshot);
    await this.collect();
    return removed;
  }

  /** Frees snapshots and layers that nothing stands on. The record goes first: what has none does not exist. */
  async collect(): Promise<number> {
    const { state, paths } = this.#ctx;
    const folders: string[] = [];
    state.durable(() => {
      for (const s of state.snapshots.unused()) {
        if (this.#held.has(s.id)) continue;
        state.snapshots.remove(s.id);
        folders.push(paths.snapshotDir(s.id));
      }
      for (const l of state.layers.unused()) {
        if (this.#held.has(l.id)) continue;
        state.layers.remove(l.id);
        folders.push(paths.layerDir(l.id));
      }
    });
    for (const folder of folders) {
      try {
        await rm(folder, { recursive: true, force: true });
      } catch (e) {
        // The next start sweeps it: it has no record.
        this.#ctx.logger.warn({ folder, error: messageOf(e) }, "unused artifact was not deleted");
      }
    }
    return folders.length;
  }
}

const MIB = 1024 * 1024;

export function sizes(s: SnapshotRecord): { cpuCount: number; memoryMB: number; diskSizeMB: number } {
  return {
    cpuCount: s.machine.vcpus,
    memoryMB: Math.round(s.machine.memoryBytes / MIB),
    diskSizeMB: Math.round(s.diskBytes / MIB),
  };
}
