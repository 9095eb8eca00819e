/** The memory of snapshots as files, and how a capture adds one. */
import { isDeepStrictEqual } from "node:util";
import { AenvError, type MemoryId, newMemoryId } from "@aenv/base";
import type { StackFiles, TakeSession } from "@aenv/memory";
import type { MemoryFileRecord, SnapshotRecord } from "@aenv/state";
import type { MemoryStrategy } from "./capture.ts";
import type { Context } from "./context.ts";
import { settleAll, type VmRun } from "./run.ts";

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

/** From so many written bytes on two threads share the work, and each writes a file of its own. */
const SPLIT_BYTES = 16 << 20;

/**
 * What differs from the guest's last capture or launch, as a delta; of a guest that was booted cold and never captured,
 * everything, as a flat file. `goesOn`: the VM runs again before the file is written, so its pages are copied aside.
 */
export function takeMemory(ctx: Context, run: VmRun, goesOn: boolean): MemoryStrategy {
  const parent = run.snapshot === undefined ? undefined : ctx.state.snapshots.get(run.snapshot);
  const before = parent && hasMemory(parent) ? parent : undefined;
  const held = before && holdFiles(ctx, before);
  let parts: { session: TakeSession; id: MemoryId; path: string }[] = [];
  return {
    kind: before ? "delta" : "flat",
    async prepare(_run, target, signal) {
      if (!before && run.memoryFile === undefined)
        throw new AenvError("INTERNAL", `the state that run ${run.id} was launched from is not known any more`);
      const source =
        run.memoryFile === undefined ? { mappings: await run.vm.mappings(signal) } : { file: run.memoryFile };
      const begin = async (id: MemoryId, path: string): Promise<void> => {
        const session = await ctx.memory.begin({
          memoryBytes: run.machine.memoryBytes,
          source,
          parent: before && stackOf(before),
          target: path,
          owner: flatOwner(ctx),
          bufferBytes: goesOn ? ctx.config.captureBufferBytes : 0,
        });
        parts.push({ session, id, path });
      };
      await begin(target.memory, target.memoryPath);
      if (before && ((await parts[0]?.session.estimate()) ?? 0) >= SPLIT_BYTES)
        await begin(newMemoryId(), `${target.memoryPath}-2`);
    },
    whileStopped: async () =>
      await settleAll(parts.map(({ session }, index) => session.take({ index, of: parts.length }))),
    async afterwards(durable, _signal, phases) {
      if (parts.length === 0) throw new AenvError("INTERNAL", "a capture of memory was not begun");
      const kind = before ? ("delta" as const) : ("flat" as const);
      const files: MemoryFileRecord[] = [];
      await settleAll(
        parts.map(async ({ session, id, path }, index) => {
          const { bytes, dirtyBytes } = await session.finish(durable);
          phases.count("dirty", dirtyBytes);
          phases.count("stored", bytes);
          files[index] = { id, path, kind, bytes, createdAt: ctx.clock.now() };
        }),
      );
      return [...(before?.memory ?? []), ...files];
    },
    async discard() {
      await Promise.all(parts.map(({ session }) => session.discard()));
      parts = [];
    },
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
