/**
 * What snapshots are made of stays shallow: many small deltas of memory become one, in tiers, and so do layers of a disk;
 * the deltas of a state that is launched again and again become a flat file, which its VMMs share. The old files stay
 * until nobody needs them: what replaces them is durable before any record names it.
 */
import { mkdir, rm } from "node:fs/promises";
import { join } from "node:path";
import { messageOf, newLayerId, newMemoryId, type SnapshotId } from "@aenv/base";
import { publishFile, syncPath } from "@aenv/host";
import type { LayerRecord, MemoryFileRecord, SnapshotRecord } from "@aenv/state";
import type { EngineConfig } from "./config.ts";
import type { Context } from "./context.ts";
import { isDiskLow } from "./disk-reserve.ts";
import { refOf } from "./launch.ts";
import { flatOwner, stackOf } from "./memory-stack.ts";
import type { VmRun } from "./run.ts";

/** Launches of one state within so long of each other are one use of it. */
const ONE_USE_MS = 2000;
/** States whose use is remembered. */
const MAX_USES = 1000;
/** Smaller deltas are of the lowest tier. */
const TIER_BYTES = 1 << 20;

interface Use {
  /** Bytes that were written into VMMs because there is no flat file of this state. */
  injected: number;
  at: number;
}

type Needs = Pick<
  Context,
  | "state"
  | "paths"
  | "clock"
  | "memory"
  | "blockd"
  | "runs"
  | "holds"
  | "logger"
  | "config"
  | "foreground"
  | "tasks"
  | "step"
  | "freeBytes"
>;

export class Compactor {
  readonly #ctx: Needs;
  readonly #collect: () => Promise<unknown>;
  readonly #queue = new Set<SnapshotId>();
  readonly #uses = new Map<SnapshotId, Use>();
  #working = false;

  constructor(ctx: Needs, collect: () => Promise<unknown>) {
    this.#ctx = ctx;
    this.#collect = collect;
  }

  /** Nothing is queued or worked on. */
  get idle(): boolean {
    return !this.#working;
  }

  /** It was just captured, or the server starts: its memory may be too deep. */
  captured(s: SnapshotRecord): void {
    const before = s.parent === undefined ? undefined : this.#uses.get(s.parent);
    if (before) this.#remember(s.id, before);
    this.#consider(s);
  }

  /** It was launched, with so many bytes written into its VMM. */
  launched(s: SnapshotRecord, injected: number): void {
    if (injected === 0) return;
    const now = this.#ctx.clock.mono();
    const before = this.#uses.get(s.id) ?? { injected: 0, at: Number.NEGATIVE_INFINITY };
    if (now - before.at < ONE_USE_MS) return;
    this.#remember(s.id, { injected: before.injected + injected, at: now });
    this.#consider(s);
  }

  #remember(id: SnapshotId, use: Use): void {
    this.#uses.delete(id);
    this.#uses.set(id, use);
    const oldest = this.#uses.keys().next();
    if (this.#uses.size > MAX_USES && oldest.done !== true) this.#uses.delete(oldest.value);
  }

  #plan(s: SnapshotRecord): Plan | undefined {
    const { config, state } = this.#ctx;
    const flats = state.memory.list().filter((m) => m.kind === "flat");
    return planCompaction(s.memory, {
      injected: this.#uses.get(s.id)?.injected ?? 0,
      flatBytes: flats.reduce((n, m) => n + m.bytes, 0),
      ...config.compaction,
    });
  }

  /** Where the layers begin that are to become one; the lowest is the template's and stays. */
  #layersFrom({ layers }: SnapshotRecord): number | undefined {
    const from = tierFrom(
      layers.slice(1).map((l) => l.bytes),
      this.#ctx.config.compaction.fan,
    );
    return from === undefined ? undefined : from + 1;
  }

  /** Never throws: whoever tells of a snapshot has committed it. */
  #consider(s: SnapshotRecord): void {
    try {
      if (this.#plan(s) === undefined && this.#layersFrom(s) === undefined) return;
    } catch (e) {
      this.#ctx.logger.warn({ snapshot: s.id, error: messageOf(e) }, "it is not known whether a snapshot is too deep");
      return;
    }
    this.#queue.add(s.id);
    if (this.#working) return;
    this.#working = true;
    this.#ctx.tasks.spawn("compaction", async (signal) => {
      try {
        for (const id of this.#queue) {
          this.#queue.delete(id);
          await this.#ctx.foreground.idle(signal);
          await this.#compact(id);
        }
      } finally {
        this.#working = false;
      }
    });
  }

  /** Until nothing is left to do for it. What fails is tried again after its next capture or launch. */
  async #compact(id: SnapshotId): Promise<void> {
    try {
      for (;;) {
        const s = this.#ctx.state.snapshots.get(id);
        if (!s || isDiskLow(this.#ctx)) return;
        const [plan, layersFrom] = [this.#plan(s), this.#layersFrom(s)];
        if (plan) await this.#replace(s, plan);
        else if (layersFrom !== undefined) await this.#mergeLayers(s, layersFrom);
        else return;
        await this.#collect();
      }
    } catch (e) {
      this.#ctx.logger.warn({ snapshot: id, error: messageOf(e) }, "the memory of a snapshot was not compacted");
    }
  }

  async #replace(s: SnapshotRecord, { from, kind }: Plan): Promise<void> {
    const { state, paths, clock, memory, holds, logger } = this.#ctx;
    using _held = holds.hold(...s.memory.map((m) => m.id));
    const started = clock.mono();
    const id = newMemoryId();
    const dir = paths.memoryDir(id);
    const path = join(dir, kind);
    try {
      await this.#ctx.step("compact:before");
      await mkdir(dir, { recursive: true, mode: 0o711 });
      const { memoryBytes } = s.machine;
      const deltas = s.memory.slice(from).map((m) => m.path);
      const bytes =
        kind === "delta"
          ? await memory.mergeDeltas({ memoryBytes, flat: undefined, deltas }, path, true)
          : await memory.flatten(stackOf(s), path, flatOwner(this.#ctx), true);
      for (const folder of [dir, paths.memory]) await syncPath(folder);
      await this.#ctx.step("compact-commit:before");
      const file: MemoryFileRecord = { id, path, kind, bytes, createdAt: clock.now() };
      const after = [...s.memory.slice(0, from), file];
      const changed = state.durable(() => state.snapshots.replaceMemory(s.memory, after));
      if (changed.length === 0) await rm(dir, { recursive: true, force: true });
      if (kind === "flat") this.#uses.delete(s.id);
      await this.#ctx.step("compact-commit:after");
      await this.#tell(changed);
      logger.info(
        { snapshot: s.id, kind, files: deltas.length, bytes, ms: clock.mono() - started },
        "memory compacted",
      );
    } catch (e) {
      if (!state.memory.get(id)) await rm(dir, { recursive: true, force: true });
      throw e;
    }
  }

  /** Disks that run go over to the merged layer, too; one that cannot keeps what it stands on. */
  async #mergeLayers(s: SnapshotRecord, from: number): Promise<void> {
    const { state, paths, clock, blockd, holds, runs, logger } = this.#ctx;
    const id = newLayerId();
    using _held = holds.hold(id, ...s.layers.map((l) => l.id));
    const started = clock.mono();
    const path = paths.layerFile(id);
    try {
      await this.#ctx.step("compact-layers:before");
      const { bytes } = await blockd.mergeLayers(s.layers.slice(from).map(refOf), { id, path });
      await syncPath(paths.layers);
      await this.#ctx.step("compact-layers-commit:before");
      const after: LayerRecord[] = [...s.layers.slice(0, from), { id, path, bytes, createdAt: clock.now() }];
      const changed = state.durable(() => state.snapshots.replaceLayers(s.layers, after));
      if (changed.length === 0) {
        await rm(paths.layerDir(id), { recursive: true, force: true });
        return;
      }
      await this.#ctx.step("compact-layers-commit:after");
      for (const run of runs.values()) await this.#restack(run, s.layers, after);
      await this.#tell(changed);
      logger.info(
        { snapshot: s.id, layers: s.layers.length - from, bytes, ms: clock.mono() - started },
        "layers merged",
      );
    } catch (e) {
      if (!state.layers.get(id)) await rm(paths.layerDir(id), { recursive: true, force: true });
      throw e;
    }
  }

  async #restack(run: VmRun, before: readonly LayerRecord[], after: readonly LayerRecord[]): Promise<void> {
    const { state, blockd, logger } = this.#ctx;
    if (!before.every((l, i) => run.layers[i]?.id === l.id)) return;
    const above = run.layers.slice(before.length);
    try {
      await blockd.restackDisk(run.id, run.layers.map(refOf), [...after, ...above].map(refOf), { same: true });
      // A seal may have put another one on top meanwhile.
      run.layers.splice(0, before.length, ...after);
    } catch (e) {
      logger.warn({ run: run.id, error: messageOf(e) }, "a disk keeps its layers");
      state.tx(() => {
        for (const l of before) if (!state.runs.layers(run.id).includes(l.id)) state.runs.addLayer(run.id, l.id);
      });
    }
  }

  async #tell(changed: readonly SnapshotRecord[]): Promise<void> {
    for (const s of changed)
      await publishFile(this.#ctx.paths.manifest(s.id), `${JSON.stringify({ v: 1, ...s }, undefined, 2)}\n`);
  }
}

/** Where a group of files begins that is worth being one: `fan` of one tier, and the smaller ones above them. */
function tierFrom(sizes: readonly number[], fan: number): number | undefined {
  const tiers = sizes.map((n) => Math.max(0, Math.floor(Math.log(n / TIER_BYTES) / Math.log(fan))));
  // From the top down: those of the highest tier so far are counted.
  let [tier, count] = [0, 0];
  for (const [at, t] of [...tiers.entries()].toReversed()) {
    if (t > tier) [tier, count] = [t, 0];
    if (t === tier) count++;
    const below = tiers[at - 1];
    if (count >= fan && (below === undefined || below > tier)) return at;
  }
  return undefined;
}

/** The files of a memory from `from` on become one. */
export interface Plan {
  from: number;
  kind: "flat" | "delta";
}

/**
 * What is worth doing. A flat file is made of a state once more has been written into VMMs for want of one than its file
 * takes, and where all flat files fit their bound. Else deltas of one size are merged when there are `fan` of them, so
 * that n captures leave in the order of log n files and every page is copied as often.
 */
export function planCompaction(
  memory: readonly MemoryFileRecord[],
  { injected, flatBytes, fan, maxFlatBytes }: EngineConfig["compaction"] & { injected: number; flatBytes: number },
): Plan | undefined {
  const [flat, ...deltas] = memory;
  const size = memory.reduce((n, m) => n + m.bytes, 0);
  if (flat && deltas.length > 0 && injected > size && flatBytes + size <= maxFlatBytes)
    return { from: 0, kind: "flat" };
  const from = tierFrom(
    deltas.map((m) => m.bytes),
    fan,
  );
  return from === undefined ? undefined : { from: from + 1, kind: "delta" };
}
