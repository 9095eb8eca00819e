import { stat } from "node:fs/promises";
import type { SnapshotId } from "@aenv/base";
import type { SnapshotRecord } from "@aenv/state";
import type { Context } from "./context.ts";
import type { Sandbox } from "./sandbox.ts";
import type { Lineage, LineageNode, LineageSize, VisibleState } from "./types.ts";

/** What a file takes on the disk is counted in these. */
const STAT_BLOCK_BYTES = 512;

/**
 * The states that a sandbox belongs to: those it stands on, up to the root, then all that were captured of it, and what
 * was captured from those. `live`: the sandboxes that are there.
 */
export async function lineageOf(ctx: Context, sandbox: Sandbox, live: readonly Sandbox[]): Promise<Lineage> {
  const all = new Map(ctx.state.snapshots.lineage().map((s) => [s.id, s]));
  const children = Map.groupBy(all.values(), (s) => s.parent);
  const wanted = new Set<SnapshotId>();
  const upwards = (id: SnapshotId | undefined): void => {
    for (let s = id; s !== undefined && all.has(s) && !wanted.has(s); s = all.get(s)?.parent) wanted.add(s);
  };
  // Chains are as long as a sandbox was checkpointed often: no recursion.
  const downwards = (id: SnapshotId): void => {
    for (const next = [id]; next.length > 0; ) {
      const at = next.pop();
      if (at === undefined || wanted.has(at)) continue;
      wanted.add(at);
      for (const child of children.get(at) ?? []) next.push(child.id);
    }
  };
  for (const s of all.values())
    if (s.sandbox === sandbox.id) {
      downwards(s.id);
      upwards(s.parent);
    }
  upwards(sandbox.snapshot.id);

  const isRoot = (id: SnapshotId): boolean => {
    const parent = all.get(id)?.parent;
    return parent === undefined || !wanted.has(parent);
  };
  const nodes: LineageNode[] = [];
  const names = namesOf(ctx);
  const blocks: Blocks = new Map();
  for (const next = [...wanted].filter(isRoot); next.length > 0; ) {
    const id = next.pop();
    const record = id && ctx.state.snapshots.get(id);
    if (!record) continue;
    nodes.push(await nodeOf(ctx, record, names.get(record.id) ?? [], blocks));
    const below = (children.get(record.id) ?? []).filter((c) => wanted.has(c.id));
    // The oldest is taken first.
    next.push(...below.toSorted((a, b) => b.createdAt - a.createdAt).map((c) => c.id));
  }

  const { team } = sandbox.record;
  const standing = live.filter(
    (s) =>
      s === sandbox ||
      // Others on the state of a template have nothing to do with this one.
      (s.record.team === team && wanted.has(s.snapshot.id) && s.snapshot.sandbox !== undefined),
  );
  return {
    sandboxId: sandbox.id,
    snapshotId: sandbox.snapshot.id,
    nodes,
    sandboxes: standing.map((s) => ({
      sandboxId: s.id,
      snapshotId: s.snapshot.id,
      state: s.state as VisibleState,
    })),
  };
}

async function nodeOf(ctx: Context, s: SnapshotRecord, names: string[], blocks: Blocks): Promise<LineageNode> {
  return {
    snapshotId: s.id,
    ...(s.parent === undefined ? {} : { parent: s.parent }),
    cause: s.cause,
    ...(s.sandbox === undefined ? {} : { sandboxId: s.sandbox }),
    names,
    createdAt: s.createdAt,
    ...(await sizeOf(ctx, s, blocks)),
  };
}

/** Of files that were looked at, by path: in blocks, and how many snapshots have it. */
type Blocks = Map<string, { count: number; users: number }>;

/** What the files of a snapshot take on the disk of this node. */
export async function sizeOf(
  ctx: Context,
  s: SnapshotRecord,
  blocks: Blocks = new Map(),
): Promise<{ memory: LineageSize; disk: LineageSize }> {
  const { layers, memory } = ctx.state;
  return {
    memory: await add(s.memory, (m) => memory.users(m.id), blocks),
    disk: await add(s.layers, (l) => layers.users(l.id), blocks),
  };
}

async function add<F extends { path: string }>(
  files: readonly F[],
  usersOf: (file: F) => number,
  blocks: Blocks,
): Promise<LineageSize> {
  const size = { ownBytes: 0, sharedBytes: 0 };
  for (const file of files) {
    let known = blocks.get(file.path);
    if (!known) {
      const info = await stat(file.path).catch(() => undefined);
      known = { count: info?.blocks ?? 0, users: usersOf(file) };
      blocks.set(file.path, known);
    }
    size[known.users > 1 ? "sharedBytes" : "ownBytes"] += known.count * STAT_BLOCK_BYTES;
  }
  return size;
}

function namesOf(ctx: Context): Map<SnapshotId, string[]> {
  const { templates, saved, checkpoints } = ctx.state;
  const names = new Map<SnapshotId, string[]>();
  const note = (id: SnapshotId, name: string): void => void names.set(id, [...(names.get(id) ?? []), name]);
  for (const t of templates.list()) note(t.snapshot, t.name);
  for (const s of saved.list()) for (const n of s.names) note(s.snapshot, `${n.team}/${n.alias}:${n.tag}`);
  for (const c of checkpoints.named()) note(c.snapshot, c.name);
  return names;
}
