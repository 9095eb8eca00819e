import { AenvError } from "@aenv/base";
import type { SnapshotRepository } from "./repository.ts";

const HOUR_MS = 3_600_000;

export interface CollectOptions {
  /** Only tells what would be done. */
  dryRun?: boolean;
  /** A blob is deleted by the first run that comes so much later than the one that found it without a reference. */
  graceMs?: number;
  /** A publication that takes longer than this counts as dead. */
  publishMs?: number;
  now?: number;
  signal?: AbortSignal;
}

export interface Collected {
  /** Referenced by no snapshot; deleted by a later run unless they are used again. */
  doomed: { key: string; bytes: number }[];
  /** Deleted now (or, in a dry run, what would be). */
  deleted: { key: string; bytes: number; modifiedAt: number }[];
  kept: { blobs: number; bytes: number };
  /** Uploads and notes that were cut off. */
  swept: number;
}

/**
 * Deletes blobs that no snapshot has, in two steps: one run dooms them, a later one deletes what is still without a
 * reference. A publisher uses no doomed blob, and says before it looks what it will use, so that nothing is deleted
 * under it.
 */
export async function collectGarbage(repository: SnapshotRepository, o: CollectOptions = {}): Promise<Collected> {
  const { dryRun = false, graceMs = HOUR_MS, publishMs = 24 * HOUR_MS, now = Date.now(), signal } = o;
  const { store } = repository;
  const before = await repository.doomed(signal);
  const pending = await repository.pending(now - publishMs, signal);
  // Snapshots last: one that is published meanwhile still has its note, or is here.
  const used = new Set(pending.keys);
  for (const m of await repository.list(signal)) for (const b of m.blobs) used.add(b.key);
  const out: Collected = { doomed: [], deleted: [], kept: { blobs: 0, bytes: 0 }, swept: 0 };
  const since = new Map<string, number>();
  for await (const { key, bytes, modifiedAt } of store.list("blobs/", signal)) {
    if (used.has(key)) {
      out.kept.blobs++;
      out.kept.bytes += bytes;
      continue;
    }
    const found = before.get(key);
    if (found !== undefined && now - found >= graceMs) out.deleted.push({ key, bytes, modifiedAt });
    else {
      out.doomed.push({ key, bytes });
      since.set(key, found ?? now);
    }
  }
  if (dryRun) return out;
  // A blob stays doomed until it is gone.
  await repository.setDoomed(
    new Map([...since, ...out.deleted.map((d) => [d.key, before.get(d.key) ?? now] as const)]),
  );
  for (const { key, modifiedAt } of out.deleted) {
    // Another collector may have deleted it already, and a publisher have put it again.
    if ((await store.stat(key, signal))?.modifiedAt === modifiedAt) await store.delete(key, signal);
  }
  await repository.setDoomed(since, signal);
  for (const key of pending.dead) await store.delete(key, signal);
  out.swept = pending.dead.length + (await store.sweep(now - publishMs, signal));
  return out;
}

export interface SnapshotUse {
  id: string;
  bytes: number;
  /** Bytes that no other snapshot has: what removing it frees. */
  aloneBytes: number;
}

/** What each published snapshot holds, and holds alone. */
export async function storeUse(repository: SnapshotRepository, signal?: AbortSignal): Promise<SnapshotUse[]> {
  const manifests = await repository.list(signal);
  const users = new Map<string, number>();
  const own = manifests.map((m) => new Map(m.blobs.map((b) => [b.key, b.bytes])));
  for (const blobs of own) for (const key of blobs.keys()) users.set(key, (users.get(key) ?? 0) + 1);
  return manifests.map(({ id }, i) => {
    const blobs = own[i];
    if (!blobs) throw new AenvError("INTERNAL", "a snapshot without blobs was counted");
    const sum = (only: boolean): number =>
      [...blobs].reduce((n, [key, bytes]) => n + (only && users.get(key) !== 1 ? 0 : bytes), 0);
    return { id, bytes: sum(false), aloneBytes: sum(true) };
  });
}
