import { AenvError, newTemplateId, type SnapshotId, type TemplateId } from "@aenv/base";
import { DEFAULT_TEAM, type SavedRecord } from "@aenv/state";
import type { Context } from "./context.ts";
import { Phases } from "./phases.ts";
import type { Sandbox } from "./sandbox.ts";
import { takeState } from "./take.ts";
import { findSaved, parseSnapshotName, type SnapshotName, sizes, type TemplateStore } from "./templates.ts";
import type { SnapshotFilter, SnapshotOptions, SnapshotView } from "./types.ts";

const MAX_PAGE = 100;

/** The states of sandboxes that users keep. */
export class Snapshots {
  readonly #ctx: Context;
  readonly #store: TemplateStore;
  readonly #dropPool: (snapshot: SnapshotId) => Promise<void>;

  constructor(ctx: Context, store: TemplateStore, dropPool: (snapshot: SnapshotId) => Promise<void>) {
    this.#ctx = ctx;
    this.#store = store;
    this.#dropPool = dropPool;
  }

  async create(sandbox: Sandbox, options: SnapshotOptions, signal: AbortSignal): Promise<SnapshotView> {
    const { state, clock } = this.#ctx;
    const team = options.team ?? sandbox.record.team;
    const name = options.name === undefined ? undefined : this.#nameOf(options.name, team);
    const phases = new Phases(this.#ctx.clock);
    let saved: SavedRecord | undefined;
    let replaced: SnapshotId | undefined;
    await takeState(
      this.#ctx,
      sandbox,
      {
        cause: "snapshot",
        memory: options.memory ?? true,
        durable: true,
        also: (snapshot) => {
          const before = name && state.saved.byName(name);
          if (before && before.snapshot !== snapshot.id) replaced = before.snapshot;
          saved = {
            id: before?.id ?? newTemplateId(),
            snapshot: snapshot.id,
            sandbox: sandbox.id,
            template: sandbox.record.template,
            team,
            createdAt: clock.now(),
            spawnCount: before?.spawnCount ?? 0,
            names: name ? [name] : [],
          };
          state.saved.put(saved);
        },
      },
      signal,
      phases,
    );
    this.#ctx.config.onOperation?.(phases.timing("snapshot", sandbox.id));
    if (!saved) throw new AenvError("INTERNAL", "a snapshot was taken and not saved");
    if (replaced !== undefined) await this.#dropPool(replaced);
    this.#ctx.tasks.spawn("collect", async () => void (await this.#store.collect()));
    return this.#view(saved);
  }

  list(filter: SnapshotFilter): { items: SnapshotView[]; next?: string } {
    const limit = filter.limit ?? MAX_PAGE;
    if (!Number.isInteger(limit) || limit < 1 || limit > MAX_PAGE)
      throw new AenvError("INVALID_ARGUMENT", `limit is 1 to ${MAX_PAGE}`);
    const after = filter.cursor === undefined ? undefined : parseCursor(filter.cursor);
    const rest = this.#ctx.state.saved.list().filter((s) => this.#matches(s, filter) && (!after || isAfter(s, after)));
    const page = rest.slice(0, limit);
    const last = page.at(-1);
    return { items: page.map((s) => this.#view(s)), ...(rest.length > limit && last ? { next: cursorOf(last) } : {}) };
  }

  async delete(idOrName: string, team = DEFAULT_TEAM): Promise<boolean> {
    const { state } = this.#ctx;
    const saved = findSaved(state, idOrName, team);
    if (!saved || !state.durable(() => state.saved.remove(saved.id))) return false;
    await this.#dropPool(saved.snapshot);
    await this.#store.collect();
    return true;
  }

  #nameOf(text: string, team: string): SnapshotName {
    const name = parseSnapshotName(text, team);
    if (!name)
      throw new AenvError("INVALID_ARGUMENT", `${JSON.stringify(text.slice(0, 100))} is not a name for a snapshot`, {
        hint: "A name is alias, alias:tag or team/alias:tag, of lower-case letters, digits, dots, hyphens and underscores.",
      });
    if (name.team !== team) throw new AenvError("PERMISSION_DENIED", `${name.team} is not the team of this snapshot`);
    if (this.#ctx.state.templates.byName(team, name.alias))
      throw new AenvError("CONFLICT", `${name.alias} is the name of a template`, { hint: "Choose another name." });
    return name;
  }

  #matches(s: SavedRecord, filter: SnapshotFilter): boolean {
    if (filter.team !== undefined && s.team !== filter.team) return false;
    if (filter.sandboxId !== undefined && s.sandbox !== filter.sandboxId) return false;
    if (filter.name === undefined) return true;
    if (filter.name === s.id || filter.name === `${s.id}:default`) return true;
    const name = parseSnapshotName(filter.name, s.team);
    // Without a tag every tag of the alias is meant.
    const anyTag = !filter.name.includes(":");
    return s.names.some((n) => n.team === name?.team && n.alias === name.alias && (anyTag || n.tag === name.tag));
  }

  #view(s: SavedRecord): SnapshotView {
    const snapshot = this.#ctx.state.snapshots.get(s.snapshot);
    if (!snapshot) throw new AenvError("CORRUPT", `the snapshot ${s.id} has no state ${s.snapshot}`);
    const names = s.names.map((n) => `${n.team}/${n.alias}:${n.tag}`);
    return {
      snapshotId: names[0] ?? `${s.id}:default`,
      templateId: s.id,
      names,
      sandboxId: s.sandbox,
      team: s.team,
      ...sizes(snapshot),
      createdAt: s.createdAt,
    };
  }
}

interface Place {
  createdAt: number;
  id: TemplateId;
}

/** In the order of the list: newest first. */
const isAfter = (s: Place, p: Place): boolean =>
  s.createdAt < p.createdAt || (s.createdAt === p.createdAt && s.id < p.id);

const cursorOf = (s: Place): string => Buffer.from(`${s.createdAt}__${s.id}`).toString("base64url");

function parseCursor(cursor: string): Place {
  const match = /^(\d{1,16})__(t[a-z0-9]{16})$/.exec(Buffer.from(cursor, "base64url").toString());
  if (!match) throw new AenvError("INVALID_ARGUMENT", "the page token is not one of ours");
  return { createdAt: Number(match[1]), id: match[2] as TemplateId };
}
