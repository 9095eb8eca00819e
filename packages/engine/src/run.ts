import { chown, mkdir, rm, stat } from "node:fs/promises";
import {
  type Bytes,
  bytes,
  type Clock,
  type MemoryId,
  messageOf,
  newRunId,
  type RunId,
  type SandboxId,
  type SnapshotId,
} from "@aenv/base";
import { readTail } from "@aenv/host";
import type { LayerRecord, ResourceKind, RunPurpose, SnapshotRecord } from "@aenv/state";
import type { Machine, Vm, VmSpec } from "@aenv/vmm";
import type { Context } from "./context.ts";
import { CAPTURED, removeCaptured } from "./leftovers.ts";
import type { Phases } from "./phases.ts";
import type { GuestPort, LayerPortRef, Slot } from "./ports.ts";
import type { OwnedResource, Owner } from "./types.ts";

/** Same in every VM, see the names table. */
const GUEST_MAC = "02:fc:00:00:00:05";
/** VMM threads included: QEMU needs about 10 and one more per virtual CPU. */
const CGROUP_PIDS = 128;
const CONSOLE_TAIL = 2000;
/** Waits before another attempt to release what could not be released: doubled from the first to the most. */
const RELEASE_RETRY_MS = { first: 1000, most: 30_000 } as const;

export interface RunPlan {
  purpose: Exclude<RunPurpose, "sandbox">;
  owner: string;
  snapshot: SnapshotId | undefined;
  machine: Machine;
  layers: readonly LayerRecord[];
  diskBytes: Bytes;
  /** The flat file that its VMM will map. */
  maps?: MemoryId;
  /** It will not map the memory of its snapshot: it boots. */
  coldBoot?: boolean;
  /** Default: that of a sandbox. */
  cpuWeight?: number;
}

interface RunFacts {
  snapshot: SnapshotId | undefined;
  machine: Machine;
  layers: readonly LayerRecord[];
  memoryFile: string | undefined;
  owner: Owner;
}

/** Share of the host's processors: a sandbox has five times what a spare that is warming up has. */
const CPU_WEIGHT = 100;
export const WARMING_CPU_WEIGHT = 20;

/**
 * One VM incarnation and all that the host holds for it. Its row is in the database from before the first resource until
 * after the last one; what it may hold is in the journal at every moment.
 */
export class VmRun {
  readonly id: RunId;
  /** The state that its guest had at its last capture, or else at its launch. */
  snapshot: SnapshotId | undefined;
  readonly machine: Machine;
  /** What its disk stands on, bottom first. */
  layers: LayerRecord[];
  /** A cold boot writes its memory through to this file; undefined: it maps that of its snapshot privately. */
  memoryFile: string | undefined;
  /** Of a waiting VMM: the flat file it maps, where nothing was written into its memory. */
  blank: MemoryId | undefined;
  diskBytes: Bytes | undefined;
  owner: Owner;
  /** blockd's epoch when the disk was made. */
  epoch = "";
  readonly #ctx: Context;
  #slot: Slot | undefined;
  #vm: Vm | undefined;
  #guest: GuestPort | undefined;
  #layersKnown = true;
  #releasing: Promise<void> | undefined;

  private constructor(ctx: Context, id: RunId, from: RunFacts) {
    this.#ctx = ctx;
    this.id = id;
    this.snapshot = from.snapshot;
    this.machine = from.machine;
    this.layers = [...from.layers];
    this.memoryFile = from.memoryFile;
    this.owner = from.owner;
    ctx.runs.set(id, this);
  }

  /** Its release has begun: nothing may be captured of it any more. */
  get ended(): boolean {
    return this.#releasing !== undefined;
  }

  get slot(): Slot {
    if (!this.#slot) throw new Error(`run ${this.id} has no slot`);
    return this.#slot;
  }
  get vm(): Vm {
    if (!this.#vm) throw new Error(`run ${this.id} has no VM`);
    return this.#vm;
  }
  /** Its connections serve this run only. */
  get guest(): GuestPort {
    this.#guest ??= this.#ctx.guestFactory({ host: this.slot.hostIp });
    return this.#guest;
  }

  /** Slot, folders, disk and control group; no VM yet. Leaves nothing when it fails. */
  static async make(ctx: Context, plan: RunPlan, phases: Phases, signal: AbortSignal): Promise<VmRun> {
    signal.throwIfAborted();
    const id = newRunId();
    const { paths, state } = ctx;
    const owner: Owner = { kind: plan.purpose, id: plan.owner };
    const memoryFile = plan.coldBoot === true ? paths.bootMemory(id) : undefined;
    state.tx(() => {
      state.runs.insert({
        id,
        purpose: plan.purpose,
        createdAt: ctx.clock.now(),
        ...(plan.snapshot === undefined ? {} : { snapshot: plan.snapshot }),
        ...(memoryFile === undefined ? {} : { memoryFile }),
        ...(plan.maps === undefined ? {} : { maps: plan.maps }),
      });
      keepLayers(ctx, id, plan.snapshot, plan.layers);
      state.resources.intent(id, "datadir", paths.dataDir(id));
      state.resources.intent(id, "rundir", paths.runDir(id));
      state.resources.intent(id, "cgroup", paths.cgroup(id));
      state.resources.intent(id, "disk", id);
      state.resources.intent(id, "process", id);
    });
    const { snapshot, machine, layers } = plan;
    const run = new VmRun(ctx, id, { snapshot, machine, layers, memoryFile, owner });
    run.diskBytes = plan.diskBytes;
    await using undo = new AsyncDisposableStack();
    undo.defer(() => run.release());

    await ctx.step("slot:before");
    const slot = await phases.time("slot", () => ctx.network.acquire(signal));
    run.#slot = slot;
    await ctx.step("slot:after");
    state.resources.held(id, "slot", String(slot.index));

    await ctx.step("dirs:before");
    await phases.time("dirs", () => run.#makeDirs(slot));
    await ctx.step("dirs:after");

    const disk = async (): Promise<void> => {
      await ctx.step("disk:before");
      run.epoch = (await ctx.blockd.ping(signal)).epoch;
      await ctx.blockd.createDisk(
        {
          disk: id,
          layers: plan.layers.map(({ id: layer, path }) => ({ id: layer, path })),
          sizeBytes: plan.diskBytes,
          upperDir: paths.upperDir(id),
          socketPath: paths.diskSocket(id),
          socketUid: slot.uid,
          socketGid: slot.gid,
        },
        signal,
      );
      await ctx.step("disk:after");
    };
    const cgroup = async (): Promise<void> => {
      await ctx.step("cgroup:before");
      const memoryBytes = bytes(plan.machine.memoryBytes + ctx.driver.overheadBytes(plan.machine));
      const pids = CGROUP_PIDS + plan.machine.vcpus;
      await ctx.cgroups.create(paths.cgroup(id), { memoryBytes, pids, cpuWeight: plan.cpuWeight ?? CPU_WEIGHT });
      await ctx.step("cgroup:after");
    };
    // Both end before either failure is acted on: the release must not race with what is still being made.
    await settleAll([phases.time("disk", disk), phases.time("cgroup", cgroup)]);
    state.tx(() => {
      for (const [kind, name] of [
        ["datadir", paths.dataDir(id)],
        ["rundir", paths.runDir(id)],
        ["cgroup", paths.cgroup(id)],
        ["disk", id],
      ] as const)
        state.resources.held(id, kind, name);
    });
    undo.move();
    return run;
  }

  /** After a restart of the server: the VM runs and its resources are as the journal says. */
  static adopted(ctx: Context, run: RunFacts & { id: RunId; slot: Slot; vm: Vm }): VmRun {
    const adopted = new VmRun(ctx, run.id, run);
    adopted.#slot = run.slot;
    adopted.#vm = run.vm;
    return adopted;
  }

  spec(memory: VmSpec["memory"]): VmSpec {
    const { paths } = this.#ctx;
    return {
      run: this.id,
      machine: this.machine,
      runDir: paths.runDir(this.id),
      uid: this.slot.uid,
      gid: this.slot.gid,
      cgroup: paths.cgroup(this.id),
      netns: this.slot.netns,
      tap: this.slot.tap,
      mac: GUEST_MAC,
      diskSocket: paths.diskSocket(this.id),
      memory,
      consoleLog: paths.consoleLog(this.id),
    };
  }

  /** The VMM of this run exists: its handle is what a restarted server finds it by. */
  setVm(vm: Vm): void {
    this.#vm = vm;
    this.#ctx.state.tx(() => {
      this.#ctx.state.runs.setHandle(this.id, vm.handle);
      this.#ctx.state.resources.held(this.id, "process", String(vm.identity.pid));
    });
  }

  /** It waits for another snapshot from now on, and its disk is about to stand on the layers of that one. */
  moveTo(snapshot: SnapshotRecord): void {
    this.#ctx.state.tx(() => {
      this.#ctx.state.runs.captured(this.id, snapshot.id);
      keepLayers(this.#ctx, this.id, snapshot.id, snapshot.layers);
    });
    this.snapshot = snapshot.id;
    this.blank = undefined;
    this.layers = [...snapshot.layers];
  }

  /** A spare becomes the run of a sandbox. The caller is in a transaction. */
  assign(sandbox: SandboxId): void {
    this.#ctx.state.runs.assign(this.id, sandbox);
    this.owner = { kind: "sandbox", id: sandbox };
  }

  /** Asks blockd what the disk stands on, and keeps it in the database. False: it has no disk any more, or soon not. */
  async learnLayers(): Promise<boolean> {
    this.#layersKnown = false;
    const disk = (await this.#ctx.blockd.listDisks()).find((d) => d.disk === this.id);
    if (disk) this.layers = await recordLayers(this.#ctx, this, disk.layers);
    this.#layersKnown = true;
    return disk !== undefined && !this.ended;
  }

  /** `layers` is right when this resolves. */
  async knowLayers(): Promise<void> {
    if (!this.#layersKnown) await this.learnLayers();
  }

  /** What the guest's kernel printed last; empty where there is nothing. */
  async consoleTail(): Promise<string> {
    return await readTail(this.#ctx.paths.consoleLog(this.id), CONSOLE_TAIL).catch(() => "");
  }

  /** Nobody waited for it until now. */
  async fullSpeed(): Promise<void> {
    await this.#ctx.cgroups.create(this.#ctx.paths.cgroup(this.id), { cpuWeight: CPU_WEIGHT });
  }

  /** The VM is dead when it resolves; the rest is for release(). */
  async killVm(): Promise<void> {
    this.#guest?.close();
    await this.#vm?.kill();
  }

  /** The server leaves; the VM stays. */
  detach(): void {
    this.#guest?.close();
    this.#vm?.detach();
    this.#ctx.runs.delete(this.id);
  }

  /** Ends the VM and frees everything, in that order. Idempotent; not cancelled by anybody; retried in the background when it fails. */
  release(): Promise<void> {
    this.#releasing ??= this.#release().catch((e: unknown) => {
      this.#ctx.logger.error({ run: this.id, error: messageOf(e) }, "run was not released; trying again");
      this.#ctx.tasks.spawn("release", (signal) => this.#retryRelease(signal));
    });
    return this.#releasing;
  }

  resources(): OwnedResource[] {
    const { paths } = this.#ctx;
    const of = (kind: OwnedResource["kind"], name: string): OwnedResource => ({
      kind,
      name,
      run: this.id,
      owner: this.owner,
    });
    return [
      ...(this.#vm ? [of("process", String(this.#vm.identity.pid))] : []),
      ...(this.#slot ? [of("slot", this.#slot.netns)] : []),
      of("disk", this.id),
      of("cgroup", paths.cgroup(this.id)),
      of("rundir", paths.runDir(this.id)),
      of("datadir", paths.dataDir(this.id)),
    ];
  }

  async #makeDirs(slot: Slot): Promise<void> {
    const { paths } = this.#ctx;
    const runDir = paths.runDir(this.id);
    const consoleDir = `${paths.dataDir(this.id)}/console`;
    await mkdir(runDir, { mode: 0o700 });
    await chown(runDir, slot.uid, slot.gid);
    await mkdir(paths.dataDir(this.id), { mode: 0o711 });
    await mkdir(consoleDir, { mode: 0o700 });
    await chown(consoleDir, slot.uid, slot.gid);
  }

  async #release(): Promise<void> {
    const { paths, blockd, cgroups, network, state } = this.#ctx;
    const slot = this.#slot;
    await this.killVm();
    // A VMM that still lives must keep its slot, disk and uid: nobody else may get them.
    await cgroups.kill(paths.cgroup(this.id));
    const failures: unknown[] = [];
    const free = async (kind: ResourceKind, fn: () => Promise<unknown>): Promise<void> => {
      try {
        await fn();
      } catch (e) {
        failures.push(e);
        return;
      }
      // Freed is freed: a full disk must not keep what would empty it.
      state.surely(() => state.resources.released(this.id, kind));
    };
    state.surely(() => state.resources.released(this.id, "process"));
    await free("disk", () => blockd.closeDisk(this.id, { deleteUpper: true }));
    await free("cgroup", () => cgroups.remove(paths.cgroup(this.id)));
    if (slot)
      await free("slot", async () => {
        await network.release(slot);
        this.#slot = undefined;
      });
    await free("rundir", () => rm(paths.runDir(this.id), { recursive: true, force: true }));
    await free("datadir", () => rm(paths.dataDir(this.id), { recursive: true, force: true }));
    // A capture whose end could not be seen to.
    const captured = state.resources.of(this.id).filter((r) => CAPTURED.has(r.kind));
    await removeCaptured(this.#ctx, captured).catch((e: unknown) => failures.push(e));
    if (failures.length > 0) throw new AggregateError(failures, failures.map(messageOf).join("; "));
    state.surely(() => {
      for (const { kind } of captured) state.resources.released(this.id, kind);
      state.runs.remove(this.id);
    });
    this.#ctx.runs.delete(this.id);
    this.#ctx.released(this);
  }

  async #retryRelease(signal: AbortSignal): Promise<void> {
    for (let wait: number = RELEASE_RETRY_MS.first; ; wait = Math.min(RELEASE_RETRY_MS.most, wait * 2)) {
      await wake(this.#ctx.clock, wait, signal);
      try {
        await this.#release();
        return;
      } catch (e) {
        this.#ctx.logger.error({ run: this.id, error: messageOf(e) }, "run was not released");
      }
    }
  }
}

/** Layers that its snapshot has no more, because compaction came in between, are the run's. Part of a transaction. */
function keepLayers(ctx: Context, run: RunId, snapshot: SnapshotId | undefined, layers: readonly LayerRecord[]): void {
  const { state } = ctx;
  const now = snapshot === undefined ? undefined : state.snapshots.get(snapshot);
  if (!now) return;
  const known = new Set(now.layers.map((l) => l.id));
  for (const l of layers) {
    if (known.has(l.id)) continue;
    state.layers.add(l);
    state.runs.addLayer(run, l.id);
  }
}

/** The layers of a running disk, by what blockd says: those that no snapshot has are recorded as the run's. */
export async function recordLayers(
  ctx: Context,
  run: { id: RunId; snapshot?: SnapshotId | undefined; ended?: boolean },
  refs: readonly LayerPortRef[],
): Promise<LayerRecord[]> {
  const { state } = ctx;
  const { snapshot } = run;
  const known = new Set<string>([
    ...((snapshot === undefined ? undefined : state.snapshots.get(snapshot))?.layers ?? []).map((l) => l.id),
    ...state.runs.layers(run.id),
  ]);
  const layers = await Promise.all(
    refs.map(
      async ({ id, path }): Promise<LayerRecord> =>
        state.layers.get(id) ?? { id, path, bytes: (await stat(path)).size, createdAt: ctx.clock.now() },
    ),
  );
  const found = layers.filter((l) => !known.has(l.id));
  // What is recorded for a run that has none stays for ever.
  if (found.length > 0 && !run.ended)
    state.tx(() => {
      for (const l of found) {
        state.layers.add(l);
        state.runs.addLayer(run.id, l.id);
      }
    });
  return layers;
}

/** Rejects when the signal aborts first. */
function wake(clock: Clock, ms: number, signal: AbortSignal): Promise<void> {
  return new Promise((resolve, reject) => {
    const cancel = clock.after(ms, resolve);
    signal.addEventListener(
      "abort",
      () => {
        cancel();
        reject(signal.reason as Error);
      },
      { once: true },
    );
  });
}

/** Waits for all, then throws the first failure. */
export async function settleAll(work: readonly Promise<unknown>[]): Promise<void> {
  for (const outcome of await Promise.allSettled(work)) if (outcome.status === "rejected") throw outcome.reason;
}
