import { AenvError, newCheckpointId, type SandboxId } from "@aenv/base";
import type { CheckpointRecord, SnapshotRecord } from "@aenv/state";
import type { Context } from "./context.ts";
import type { Sandbox } from "./sandbox.ts";
import { sizeOf } from "./lineage.ts";
import { takeState } from "./take.ts";
import type { CheckpointOptions, CheckpointView } from "./types.ts";

/** A state of the sandbox, kept for as long as the sandbox is; the sandbox goes on. */
export async function checkpoint(
  ctx: Context,
  sandbox: Sandbox,
  options: CheckpointOptions,
  signal: AbortSignal,
): Promise<CheckpointView> {
  let made: CheckpointRecord | undefined;
  const snapshot = await takeState(
    ctx,
    sandbox,
    {
      cause: "checkpoint",
      memory: true,
      durable: true,
      also: ({ id }) => {
        made = {
          id: newCheckpointId(),
          sandbox: sandbox.id,
          snapshot: id,
          createdAt: ctx.clock.now(),
          ...(options.name === undefined ? {} : { name: options.name }),
        };
        ctx.state.checkpoints.add(made);
      },
    },
    signal,
  );
  if (!made) throw new AenvError("INTERNAL", "a checkpoint was taken and not kept");
  return await viewOf(ctx, made, snapshot);
}

/** Oldest first. */
export async function listCheckpoints(ctx: Context, id: SandboxId): Promise<CheckpointView[]> {
  return await Promise.all(ctx.state.checkpoints.of(id).map((c) => viewOf(ctx, c, stateOf(ctx, c))));
}

/** Its state, by id or else by name; NOT_FOUND. */
export function findCheckpoint(ctx: Context, id: SandboxId, nameOrId: string): SnapshotRecord {
  const all = ctx.state.checkpoints.of(id);
  const found = all.find((c) => c.id === nameOrId) ?? all.find((c) => c.name === nameOrId);
  if (!found)
    throw new AenvError("NOT_FOUND", `sandbox ${id} has no checkpoint ${nameOrId.slice(0, 100)}`, {
      hint: "aenv checkpoint list shows what it has.",
      data: { sandboxId: id },
    });
  return stateOf(ctx, found);
}

function stateOf(ctx: Context, c: CheckpointRecord): SnapshotRecord {
  const snapshot = ctx.state.snapshots.get(c.snapshot);
  if (!snapshot) throw new AenvError("CORRUPT", `the checkpoint ${c.id} has no state ${c.snapshot}`);
  return snapshot;
}

async function viewOf(ctx: Context, c: CheckpointRecord, snapshot: SnapshotRecord): Promise<CheckpointView> {
  const { memory, disk } = await sizeOf(ctx, snapshot);
  return {
    checkpointId: c.id,
    sandboxId: c.sandbox,
    ...(c.name === undefined ? {} : { name: c.name }),
    createdAt: c.createdAt,
    ownBytes: memory.ownBytes + disk.ownBytes,
  };
}
