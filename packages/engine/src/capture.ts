/**
 * Capture: from a running VM to the files of a snapshot. Template, pause, snapshot, checkpoint and the first half of a fork
 * are this one operation; they differ in what becomes of the VM afterwards and in how the memory is taken.
 */
import { mkdir, rm } from "node:fs/promises";
import { join } from "node:path";
import {
  AenvError,
  deadline,
  type LayerId,
  type MemoryId,
  messageOf,
  newLayerId,
  newMemoryId,
  newSnapshotId,
  type SandboxId,
  type SnapshotId,
} from "@aenv/base";
import { publishFile, syncPath } from "@aenv/host";
import { deviceCrcOf } from "./damage.ts";
import { syncBefore } from "./durable.ts";
import type { MemoryFileRecord, SnapshotCause, SnapshotRecord } from "@aenv/state";
import type { Context } from "./context.ts";
import { diskFull } from "./disk-reserve.ts";
import type { Phases } from "./phases.ts";
import { settleAll, type VmRun } from "./run.ts";

/** Stop, device state, dirty pages, seal: the guest stands still meanwhile. */
export const CAPTURE_DEADLINE_MS = 60_000;

/** Where a capture goes. Journalled by its run before anything is written there; invisible without a record. */
export interface CaptureTarget {
  snapshot: SnapshotId;
  layer: LayerId;
  memory: MemoryId;
  dir: string;
  memoryDir: string;
  memoryPath: string;
  devicePath: string;
  /** blockd was asked to seal: whether it has is for blockd to say. */
  sealAsked: boolean;
  /** The run ends in any case, and its disk with it: a sealed layer is of no use to it. */
  runEnds: boolean;
}

/** How the guest's memory becomes files, in steps around the moment at which the guest may go on. */
export interface MemoryStrategy {
  readonly kind: "flat" | "delta" | "none";
  /** The VM still runs: whatever can be done before. */
  prepare(run: VmRun, target: CaptureTarget, signal: AbortSignal): Promise<void>;
  /** The VM is stopped: take what the guest may overwrite afterwards. */
  whileStopped(signal: AbortSignal): Promise<void>;
  /** The VM is gone, stands still for good, or runs again: complete the file. Resolves with the memory of the snapshot. */
  afterwards(durable: boolean, signal: AbortSignal, phases: Phases): Promise<MemoryFileRecord[]>;
  /** After a failure: nothing is left of it. */
  discard(): Promise<void>;
  /** The capture has ended, either way. */
  release(): void;
}

/** Intent first: a crash from here on is swept by what the journal says. */
export async function makeTarget(ctx: Context, run: VmRun, kind: MemoryStrategy["kind"]): Promise<CaptureTarget> {
  const { state, paths } = ctx;
  const [snapshot, layer, memory] = [newSnapshotId(), newLayerId(), newMemoryId()];
  const dir = paths.snapshotDir(snapshot);
  const memoryDir = paths.memoryDir(memory);
  state.tx(() => {
    state.resources.intent(run.id, "snapshot", snapshot);
    state.resources.intent(run.id, "layer", layer);
    state.resources.intent(run.id, "memory", memory);
  });
  const target: CaptureTarget = {
    snapshot,
    layer,
    memory,
    dir,
    memoryDir,
    memoryPath: join(memoryDir, kind),
    devicePath: join(dir, "device"),
    sealAsked: false,
    runEnds: false,
  };
  try {
    await mkdir(dir, { recursive: true, mode: 0o711 });
    await mkdir(paths.layerDir(layer), { recursive: true, mode: 0o700 });
    if (kind !== "none") await mkdir(memoryDir, { recursive: true, mode: 0o711 });
  } catch (e) {
    const full = diskFull(ctx, e);
    await discardTarget(ctx, run, target);
    throw full ?? e;
  }
  return target;
}

export interface CapturePlan {
  memory: MemoryStrategy;
  /**
   * resume: the VM goes on as soon as its state is taken. kill: it is ended then. stay: it stands still until the snapshot
   * is committed; what becomes of it is the caller's.
   */
  after: "resume" | "kill" | "stay";
  /** The next capture of the run builds on this one. Not where it goes on and only its disk was taken. */
  builds: boolean;
  cause: SnapshotCause;
  /** Whose state it is; undefined for a build. */
  sandbox: SandboxId | undefined;
  diskBytes: SnapshotRecord["diskBytes"];
  defaults: SnapshotRecord["defaults"];
  envdVersion: string;
  /** The files survive a loss of power when the snapshot is committed. */
  durable: boolean;
  /** Part of the transaction that makes the snapshot visible. */
  commit: (record: SnapshotRecord) => void;
}

/**
 * Stops the VM, takes device state and memory, seals the disk, and commits the snapshot. When it fails before the commit,
 * the VM runs again, as before (unless it was to be killed), and nothing is left of the capture.
 */
export async function capture(
  ctx: Context,
  run: VmRun,
  plan: CapturePlan,
  phases: Phases,
  parent: AbortSignal,
  target?: CaptureTarget,
): Promise<SnapshotRecord> {
  const signal = deadline(CAPTURE_DEADLINE_MS, parent);
  const to = await orRelease(plan.memory, async () => {
    await run.knowLayers();
    return target ?? (await makeTarget(ctx, run, plan.memory.kind));
  });
  let stopped = false;
  try {
    await ctx.step("capture:before");
    await phases.time("take-begin", () => plan.memory.prepare(run, to, signal));
    await ctx.step("stop:before");
    stopped = true;
    phases.mark("stop");
    await phases.time("stop", () => run.vm.stop(signal));
    // Each ends before a failure is acted on: the VM must not run while its state is being read.
    await settleAll([
      (async () => {
        await ctx.step("device:before");
        if (plan.memory.kind !== "none")
          await phases.time("device", () => run.vm.saveDeviceState(to.devicePath, signal));
        await ctx.step("memory:before");
        await phases.time("memory", () => plan.memory.whileStopped(signal));
      })(),
      (async () => {
        await ctx.step("seal:before");
        to.sealAsked = true;
        const path = ctx.paths.layerFile(to.layer);
        const sealed = await phases.time("seal", () => ctx.blockd.sealDisk(run.id, { id: to.layer, path }));
        run.layers.push({ id: to.layer, path, bytes: sealed.bytes, createdAt: ctx.clock.now() });
        await ctx.step("seal:after");
      })(),
    ]);
    if (plan.after === "resume") {
      await phases.time("resume", () => run.vm.resume(signal));
      phases.mark("go");
      stopped = false;
    } else if (plan.after === "kill") {
      await phases.time("kill", () => run.killVm());
      stopped = false;
    }
    await ctx.step("memory-file:before");
    let memory: MemoryFileRecord[] = [];
    let deviceCrc: number | undefined;
    const hasDevice = plan.memory.kind !== "none";
    await settleAll([
      phases.time("memory-file", async () => {
        memory = await plan.memory.afterwards(plan.durable, signal, phases);
      }),
      (async () => {
        if (hasDevice) deviceCrc = await deviceCrcOf(to.devicePath);
      })(),
      ...(plan.durable ? [phases.time("sync", () => syncParts(ctx, to, hasDevice))] : []),
    ]);
    const record: SnapshotRecord = {
      id: to.snapshot,
      ...(run.snapshot === undefined ? {} : { parent: run.snapshot }),
      cause: plan.cause,
      ...(plan.sandbox === undefined ? {} : { sandbox: plan.sandbox }),
      machine: run.machine,
      devicePath: to.devicePath,
      ...(deviceCrc === undefined ? {} : { deviceCrc }),
      memory,
      diskBytes: plan.diskBytes,
      layers: [...run.layers],
      defaults: plan.defaults,
      envdVersion: plan.envdVersion,
      createdAt: ctx.clock.now(),
    };
    // Its disk may be put on other layers before it is recorded that these are needed.
    using _layers = ctx.holds.hold(...record.layers.map((l) => l.id));
    await settleAll([
      phases.time("manifest", () => publish(ctx.paths.manifest(to.snapshot), record)),
      ...(plan.durable && memory.length > 0 ? [syncPath(to.memoryDir)] : []),
      ...(plan.durable ? [syncBefore(ctx, record)] : []),
    ]);
    await ctx.step("manifest:after");
    parent.throwIfAborted();
    phases.timeNow("commit", () => commit(ctx, run, record, plan));
    ctx.captured(record);
    return record;
  } catch (e) {
    // Back to the state before; a caller that gave up must not leave the guest stopped.
    if (stopped)
      await run.vm.resume(deadline(CAPTURE_DEADLINE_MS)).catch((again: unknown) => {
        ctx.logger.warn({ run: run.id, error: messageOf(again) }, "a VM did not go on after a failed capture");
      });
    const full = diskFull(ctx, e);
    await plan.memory.discard();
    await discardTarget(ctx, run, to);
    throw full ?? e;
  } finally {
    plan.memory.release();
  }
}

/** What a strategy holds goes with a capture that does not even begin. */
async function orRelease<T>(memory: MemoryStrategy, fn: () => Promise<T>): Promise<T> {
  try {
    return await fn();
  } catch (e) {
    memory.release();
    throw e;
  }
}

/** The manifest is for people and for moving it to another node; the record in the database is what makes it exist. */
async function publish(manifest: string, record: SnapshotRecord): Promise<void> {
  await publishFile(manifest, `${JSON.stringify({ v: 1, ...record }, undefined, 2)}\n`);
}

/** All that belongs to the snapshot beside its memory survives a loss of power. */
async function syncParts(ctx: Context, to: CaptureTarget, device: boolean): Promise<void> {
  const layer = [ctx.paths.layerFile(to.layer), ctx.paths.layerDir(to.layer)];
  await settleAll([...layer, ...(device ? [to.devicePath] : [])].map(syncPath));
}

/** From here on the snapshot exists, the journal does not own its files, and the run's next capture builds on it. */
function commit(ctx: Context, run: VmRun, record: SnapshotRecord, plan: CapturePlan): void {
  const { state } = ctx;
  if (run.ended)
    throw new AenvError("CANCELLED", `the virtual machine was ended while its state was captured`, {
      data: { run: run.id },
    });
  const write = (): void => {
    state.snapshots.add(record);
    for (const kind of ["snapshot", "layer", "memory"] as const) state.resources.released(run.id, kind);
    if (plan.builds) state.runs.captured(run.id, record.id);
    else for (const l of record.layers.slice(-1)) state.runs.addLayer(run.id, l.id);
    plan.commit(record);
  };
  if (plan.durable) state.durable(write);
  else state.tx(write);
  if (plan.builds) run.snapshot = record.id;
}

/** A capture that came to nothing. A layer on which the running disk stands now is kept for the next one. */
export async function discardTarget(ctx: Context, run: VmRun, target: CaptureTarget): Promise<void> {
  const { state, paths } = ctx;
  await rm(target.dir, { recursive: true, force: true });
  await rm(target.memoryDir, { recursive: true, force: true });
  state.surely(() => {
    state.resources.released(run.id, "snapshot");
    state.resources.released(run.id, "memory");
  });
  let kept = false;
  if (target.sealAsked && !target.runEnds) {
    try {
      kept = (await run.learnLayers()) && run.layers.some((l) => l.id === target.layer);
    } catch (e) {
      // Its files and its journal entry stay until blockd can be asked: by the next capture, or by the next start.
      ctx.logger.warn({ run: run.id, error: messageOf(e) }, "blockd does not say whether it sealed a disk");
      return;
    }
  }
  if (!kept) await rm(paths.layerDir(target.layer), { recursive: true, force: true });
  state.surely(() => state.resources.released(run.id, "layer"));
}
