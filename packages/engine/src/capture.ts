/**
 * Capture: from a running VM to the files of a snapshot. Template, pause, snapshot, checkpoint and the first half of a fork
 * are this one operation; they differ in what becomes of the VM afterwards and in how the memory is taken.
 */
import { mkdir, rm } from "node:fs/promises";
import { join } from "node:path";
import { deadline, type LayerId, newLayerId, newSnapshotId, type SandboxId, type SnapshotId } from "@aenv/base";
import { publishFile } from "@aenv/host";
import type { LayerRecord, SnapshotCause, SnapshotRecord } from "@aenv/state";
import type { Context } from "./context.ts";
import type { Phases } from "./phases.ts";
import type { VmRun } from "./run.ts";

/** Stop, device state, dirty pages, seal: the guest stands still meanwhile. */
export const CAPTURE_DEADLINE_MS = 60_000;

/** Where a capture goes. Journalled by its run before anything is written there; invisible without a record. */
export interface CaptureTarget {
  snapshot: SnapshotId;
  layer: LayerId;
  dir: string;
  memoryPath: string;
  devicePath: string;
}

/** How the guest's memory becomes the memory file, in two steps around the moment at which the guest may go on. */
export interface MemoryStrategy {
  /** The VM is stopped: take what the guest may overwrite afterwards. */
  whileStopped(run: VmRun, target: CaptureTarget, signal: AbortSignal): Promise<void>;
  /** The VM is gone or runs again: complete the file at `target.memoryPath` and make it durable. */
  afterwards(run: VmRun, target: CaptureTarget, signal: AbortSignal): Promise<void>;
}

/** Intent first: a crash from here on is swept by what the journal says. */
export async function makeTarget(ctx: Context, run: VmRun): Promise<CaptureTarget> {
  const snapshot = newSnapshotId();
  const layer = newLayerId();
  const dir = ctx.paths.snapshotDir(snapshot);
  ctx.state.tx(() => {
    ctx.state.resources.intent(run.id, "snapshot", snapshot);
    ctx.state.resources.intent(run.id, "layer", layer);
  });
  await mkdir(dir, { recursive: true, mode: 0o711 });
  await mkdir(ctx.paths.layerDir(layer), { recursive: true, mode: 0o700 });
  return { snapshot, layer, dir, memoryPath: join(dir, "memory"), devicePath: join(dir, "device") };
}

/** What becomes of the VM once its state is taken. */
export type After = "resume" | "kill";

/**
 * Stops the VM, takes device state and memory, seals the disk; then the VM goes on or ends. Resolves with the record
 * to commit, when all files are durable. When it fails before the end the VM runs again, as before.
 */
export async function capture(
  ctx: Context,
  run: VmRun,
  target: CaptureTarget,
  plan: {
    memory: MemoryStrategy;
    after: After;
    cause: SnapshotCause;
    /** Whose state it is; undefined for a build. */
    sandbox: SandboxId | undefined;
    parent: SnapshotRecord | undefined;
    layers: readonly LayerRecord[];
    diskBytes: SnapshotRecord["diskBytes"];
    defaults: SnapshotRecord["defaults"];
    envdVersion: string;
  },
  phases: Phases,
  parent: AbortSignal,
): Promise<SnapshotRecord> {
  const signal = deadline(CAPTURE_DEADLINE_MS, parent);
  await ctx.step("stop:before");
  await phases.time("stop", () => run.vm.stop(signal));
  let layer: LayerRecord;
  try {
    await ctx.step("device:before");
    await phases.time("device", () => run.vm.saveDeviceState(target.devicePath, signal));
    await ctx.step("memory:before");
    await phases.time("memory", () => plan.memory.whileStopped(run, target, signal));
    await ctx.step("seal:before");
    const path = ctx.paths.layerFile(target.layer);
    const sealed = await phases.time("seal", () => ctx.blockd.sealDisk(run.id, { id: target.layer, path }, signal));
    layer = { id: target.layer, path, bytes: sealed.bytes, createdAt: ctx.clock.now() };
    await ctx.step("seal:after");
  } catch (e) {
    // Back to the state before; a caller that gave up must not leave the guest stopped.
    await run.vm.resume(deadline(CAPTURE_DEADLINE_MS));
    throw e;
  }
  await phases.time(plan.after, () => (plan.after === "kill" ? run.killVm() : run.vm.resume(signal)));
  await ctx.step("memory-file:before");
  await phases.time("memory-file", () => plan.memory.afterwards(run, target, signal));
  const record: SnapshotRecord = {
    id: target.snapshot,
    ...(plan.parent === undefined ? {} : { parent: plan.parent.id }),
    cause: plan.cause,
    ...(plan.sandbox === undefined ? {} : { sandbox: plan.sandbox }),
    machine: run.machine,
    devicePath: target.devicePath,
    memoryPath: target.memoryPath,
    diskBytes: plan.diskBytes,
    layers: [...plan.layers, layer],
    defaults: plan.defaults,
    envdVersion: plan.envdVersion,
    createdAt: ctx.clock.now(),
  };
  // For people and for moving it to another node; the record in the database is what makes it exist.
  await publishFile(join(target.dir, "manifest.json"), `${JSON.stringify({ v: 1, ...record }, undefined, 2)}\n`);
  await ctx.step("manifest:after");
  return record;
}

/** Part of the transaction that makes the snapshot visible: from here on the journal does not own its files. */
export function commitTarget(ctx: Context, run: VmRun, record: SnapshotRecord): void {
  ctx.state.snapshots.add(record);
  ctx.state.resources.released(run.id, "snapshot");
  ctx.state.resources.released(run.id, "layer");
}

/** A capture that came to nothing. */
export async function discardTarget(ctx: Context, run: VmRun, target: CaptureTarget): Promise<void> {
  await rm(target.dir, { recursive: true, force: true });
  await rm(ctx.paths.layerDir(target.layer), { recursive: true, force: true });
  ctx.state.resources.released(run.id, "snapshot");
  ctx.state.resources.released(run.id, "layer");
}
