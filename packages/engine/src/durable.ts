import { dirname } from "node:path";
import { syncPath } from "@aenv/host";
import type { SnapshotRecord } from "@aenv/state";
import type { Context } from "./context.ts";
import { settleAll } from "./run.ts";

/** Files that were synced in this life of the server: they never change afterwards. */
const synced = new WeakMap<Context, Set<string>>();

/** What a durable snapshot stands on survives a loss of power, too: captures before it may not have waited for that. */
export async function syncBefore(ctx: Context, { memory, layers }: SnapshotRecord): Promise<void> {
  const done = synced.get(ctx) ?? new Set();
  synced.set(ctx, done);
  await settleAll(
    [...memory, ...layers].map(async ({ path }) => {
      if (done.has(path)) return;
      await syncPath(path);
      // The entry of the file, and of its own folder.
      await settleAll([dirname(path), dirname(dirname(path))].map(syncPath));
      done.add(path);
    }),
  );
}
