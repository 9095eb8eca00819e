import { rm } from "node:fs/promises";
import { parseLayerId, parseMemoryId, parseSnapshotId } from "@aenv/base";
import type { ResourceKind, ResourceRecord } from "@aenv/state";
import type { Context } from "./context.ts";

/** What a capture journals before it writes there. */
export const CAPTURED: ReadonlySet<ResourceKind> = new Set(["snapshot", "layer", "memory"]);

/** Frees the folders of captures that came to nothing: journalled, and without a record. Returns how many. */
export async function removeCaptured(ctx: Context, journalled: readonly ResourceRecord[]): Promise<number> {
  const folders = journalled.flatMap((r) => folderWithoutRecord(ctx, r) ?? []);
  for (const folder of folders) await rm(folder, { recursive: true, force: true });
  return folders.length;
}

function folderWithoutRecord({ state, paths }: Context, { kind, name }: ResourceRecord): string | undefined {
  if (kind === "snapshot") {
    const id = parseSnapshotId(name);
    return state.snapshots.get(id) ? undefined : paths.snapshotDir(id);
  }
  if (kind === "memory") {
    const id = parseMemoryId(name);
    return state.memory.get(id) ? undefined : paths.memoryDir(id);
  }
  if (kind !== "layer") return undefined;
  const id = parseLayerId(name);
  return state.layers.get(id) ? undefined : paths.layerDir(id);
}
