/** The memory of snapshots as files, and how a capture adds one. */
import { isDeepStrictEqual } from "node:util";
import { AenvError, type MemoryId } from "@aenv/base";
import type { StackFiles, TakeSession } from "@aenv/memory";
import type { MemoryFileRecord, SnapshotRecord } from "@aenv/state";
import type { MemoryStrategy } from "./capture.ts";
import type { Context } from "./context.ts";
import type { VmRun } from "./run.ts";

/** False: only the disk was kept, and a launch is a cold boot. */
export const hasMemory = (s: Pick<SnapshotRecord, "memory">): boolean => s.memory.length > 0;

export function stackOf(s: Pick<SnapshotRecord, "machine" | "memory">): StackFiles {
  const [flat, ...deltas] = s.memory;
  return { memoryBytes: s.machine.memoryBytes, flat: flat?.path, deltas: deltas.map((d) => d.path) };
}

/** The flat file that VMMs map. */
export function flatOf(s: SnapshotRecord): MemoryFileRecord {
  const [flat] = s.memory;
  if (flat?.kind !== "flat") throw new AenvError("CORRUPT", `snapshot ${s.id} has no memory file`);
  return flat;
}

/** Its files as they are now: compaction may have put it into others since it was read. */
export const current = (ctx: Context, s: SnapshotRecord): SnapshotRecord => ctx.state.snapshots.get(s.id) ?? s;

/** Keeps the files that a launch or capture reads, whatever becomes of the records. */
export const holdFiles = (ctx: Context, s: SnapshotRecord): Disposable =>
  ctx.holds.hold(...s.memory.map((m) => m.id), ...s.layers.map((l) => l.id));

/** A waiting VMM that nothing was written into can be given the state of any snapshot with its machine, disk and flat file. */
export function canBecome(run: VmRun, s: SnapshotRecord): boolean {
  return (
    run.blank !== undefined &&
    run.blank === s.memory[0]?.id &&
    run.diskBytes === s.diskBytes &&
    isDeepStrictEqual(run.machine, s.machine)
  );
}

/**
 * A VMM that waits for `one` can be given the state of `other`: same machine and disk, and nothing but the flat file of
 * `other` in its memory, so that what is written into it makes the rest.
 */
export function fits(one: SnapshotRecord, other: SnapshotRecord): boolean {
  return (
    one.memory.length === 1 &&
    one.memory[0]?.id === other.memory[0]?.id &&
    one.diskBytes === other.diskBytes &&
    isDeepStrictEqual(one.machine, other.machine)
  );
}

/** Who reads a flat file: VMMs by its group; nobody writes it. */
export const flatOwner = (ctx: Pick<Context, "config">): { uid: number; gid: number } => ({
  uid: 0,
  gid: ctx.config.memoryGid,
});

/**
 * What differs from the guest's last capture or launch, as a delta; of a guest that was booted cold and never captured,
 * everything, as a flat file. `goesOn`: the VM runs again before the file is written, so its pages are copied aside.
 */
export function takeMemory(ctx: Context, run: VmRun, goesOn: boolean): MemoryStrategy {
  const parent = run.snapshot === undefined ? undefined : ctx.state.snapshots.get(run.snapshot);
  const before = parent && hasMemory(parent) ? parent : undefined;
  const held = before && holdFiles(ctx, before);
  let session: TakeSession | undefined;
  let at: { id: MemoryId; path: string } | undefined;
  return {
    kind: before ? "delta" : "flat",
    async prepare(_run, target, signal) {
      if (!before && run.memoryFile === undefined)
        throw new AenvError("INTERNAL", `the state that run ${run.id} was launched from is not known any more`);
      const source =
        run.memoryFile === undefined ? { mappings: await run.vm.mappings(signal) } : { file: run.memoryFile };
      at = { id: target.memory, path: target.memoryPath };
      session = await ctx.memory.begin({
        memoryBytes: run.machine.memoryBytes,
        source,
        parent: before && stackOf(before),
        target: target.memoryPath,
        owner: flatOwner(ctx),
        bufferBytes: goesOn ? ctx.config.captureBufferBytes : 0,
      });
    },
    whileStopped: async () => await session?.take(),
    async afterwards(durable, _signal, phases) {
      if (!session || !at) throw new AenvError("INTERNAL", "a capture of memory was not begun");
      const { bytes, dirtyBytes } = await session.finish(durable);
      phases.count("dirty", dirtyBytes);
      phases.count("stored", bytes);
      const file: MemoryFileRecord = { ...at, kind: before ? "delta" : "flat", bytes, createdAt: ctx.clock.now() };
      return [...(before?.memory ?? []), file];
    },
    discard: async () => await session?.discard(),
    release: () => held?.[Symbol.dispose](),
  };
}

/** The disk only. */
export const noMemory: MemoryStrategy = {
  kind: "none",
  prepare: async () => {},
  whileStopped: async () => {},
  afterwards: async () => [],
  discard: async () => {},
  release: () => {},
};
