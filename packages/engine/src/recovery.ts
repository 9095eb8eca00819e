/**
 * What a start does about an earlier life of the server: VMs of running sandboxes are adopted, everything else of this
 * instance is freed, in an order in which nothing is taken from under something that still lives:
 * VMM processes, disks, slots, control groups, folders, artifacts, records.
 */
import { readdir, rm, stat } from "node:fs/promises";
import { dirname, join } from "node:path";
import { AenvError, deadline, errnoOf, messageOf, type RunId, Semaphore, sleep } from "@aenv/base";
import { isAlive, type ProcIdentity, processes, signalExact } from "@aenv/host";
import {
  LIFECYCLE,
  type LayerRecord,
  type RunRecord,
  type SandboxRecord,
  type SnapshotRecord,
  type TemplateRecord,
} from "@aenv/state";
import type { Vm, VmExit, VmHandle } from "@aenv/vmm";
import type { Context } from "./context.ts";
import { setEgress } from "./egress.ts";
import { CAPTURED, removeCaptured } from "./leftovers.ts";
import { recordLayers, settleAll, VmRun } from "./run.ts";

const ADOPT_DEADLINE_MS = 10_000;
const ADOPT_CONCURRENCY = 16;
const KILL_DEADLINE_MS = 10_000;
/** A layer folder without a record may be an import of another process that is not done yet. */
const STRAY_LAYER_MS = 60 * 60 * 1000;

export interface Survivor {
  record: SandboxRecord;
  template: TemplateRecord;
  snapshot: SnapshotRecord;
  /** undefined: it is paused. */
  run: VmRun | undefined;
}

export interface Recovery {
  survivors: Survivor[];
  /** Sandboxes that ended with the server or while it was away. */
  lost: number;
  /** What was freed, by kind. */
  freed: { processes: number; disks: number; slots: number; cgroups: number; folders: number; artifacts: number };
}

export async function recover(ctx: Context, signal: AbortSignal): Promise<Recovery> {
  const { state, paths } = ctx;
  const runs = new Map(state.runs.list().map((r) => [r.id, r]));
  const candidates = new Map<RunId, Candidate>();
  const paused: Survivor[] = [];
  let lost = 0;
  for (const record of state.sandboxes.live()) {
    if (record.state === "paused" || record.state === "resuming" || (record.state === "rewinding" && !record.run)) {
      const found = pausedOne(ctx, record);
      if (found) paused.push(found);
      else {
        end(ctx, record, "lost: the state that it was paused in has no record");
        lost++;
      }
      continue;
    }
    const found = candidate(ctx, record, runs);
    if (typeof found !== "string") candidates.set(found.run.id, found);
    else {
      end(ctx, record, found);
      lost++;
    }
  }

  const adopted = await adoptAll(ctx, [...candidates.values()], signal);
  const vms = new Map<RunId, { candidate: Candidate; vm: Vm }>();
  for (const { candidate: c, vm, why } of adopted) {
    if (vm) vms.set(c.run.id, { candidate: c, vm });
    else {
      end(ctx, c.record, why);
      lost++;
    }
  }
  const kept: ReadonlySet<RunId> = new Set(vms.keys());

  const freed = { processes: 0, disks: 0, slots: 0, cgroups: 0, folders: 0, artifacts: 0 };
  freed.processes = await killLeftovers(
    ctx,
    [...runs.values()].filter((r) => !kept.has(r.id)),
    kept,
    signal,
  );
  const layers = new Map<string, LayerRecord[]>();
  for (const { disk, layers: refs } of await ctx.blockd.listDisks()) {
    const own = vms.get(disk as RunId)?.candidate.run;
    if (own) {
      // What blockd sealed for a capture that was not finished is part of the disk, and has an owner from here on.
      layers.set(disk, await recordLayers(ctx, own, refs));
      continue;
    }
    await ctx.blockd.closeDisk(disk, { deleteUpper: true });
    freed.disks++;
  }
  const slots = ctx.network.adopt([...vms.values()].map(({ candidate: c }) => c.slot));
  const stale = state.resources.list().filter((r) => r.kind === "slot" && !kept.has(r.run));
  await ctx.network.sweep();
  freed.slots = stale.length;
  freed.cgroups = await removeCgroups(ctx, kept);
  freed.folders += await removeFolders(paths.runDirs, (name) => kept.has(name as RunId));
  freed.folders += await removeFolders(paths.dataDirs, (name) => kept.has(name as RunId));
  freed.artifacts = await sweepArtifacts(ctx);

  // Only now: until here another crash would have found all of it in the journal again.
  state.surely(() => {
    // No capture outlives its server, whether its run does or not.
    for (const r of state.resources.list())
      if (!kept.has(r.run) || CAPTURED.has(r.kind)) state.resources.released(r.run, r.kind);
    for (const id of runs.keys()) if (!kept.has(id)) state.runs.remove(id);
  });

  for (const { record } of paused)
    if (record.state !== "paused") state.surely(() => state.sandboxes.setState(record.id, "paused", undefined));
  const survivors: Survivor[] = paused.map(({ record, ...p }) => {
    const { run: _run, ...rest } = record;
    return { ...p, record: { ...rest, state: "paused" } };
  });
  for (const [id, { candidate: c, vm }] of vms) {
    const slot = slots.find((s) => s.index === c.slot);
    if (!slot) throw new AenvError("INTERNAL", `the network did not adopt slot ${c.slot} of run ${id}`);
    const { record, template, snapshot } = c;
    const owner = { kind: "sandbox" as const, id: record.id };
    const run = VmRun.adopted(ctx, {
      id,
      snapshot: c.run.snapshot,
      machine: snapshot.machine,
      layers: layers.get(id) ?? [],
      memoryFile: c.run.memoryFile,
      owner,
      slot,
      vm,
    });
    if (record.state !== "running") state.surely(() => state.sandboxes.setState(record.id, "running", id));
    survivors.push({ record: { ...record, state: "running" }, template, snapshot, run });
  }
  await settleAll(survivors.map((s) => restoreEgress(ctx, s)));
  ctx.logger.info({ adopted: vms.size, paused: paused.length, lost, ...freed }, "recovered");
  return { survivors, lost, freed };
}

/** The record may be ahead of the slot where a server died between the two. */
async function restoreEgress(ctx: Context, { record, run }: Survivor): Promise<void> {
  if (!run) return;
  try {
    await setEgress(ctx, run, record);
  } catch (e) {
    ctx.logger.error({ sandbox: record.id, error: messageOf(e) }, "network rules could not be restored");
  }
}

interface Candidate {
  record: SandboxRecord;
  template: TemplateRecord;
  snapshot: SnapshotRecord;
  run: RunRecord & { handle: object };
  slot: number;
}

/** A sandbox that may still run, or why it cannot. */
function candidate(ctx: Context, record: SandboxRecord, runs: ReadonlyMap<RunId, RunRecord>): Candidate | string {
  const { state } = ctx;
  if (record.state === "creating") return "create-failed: the server ended while it was created";
  if (record.state === "killing") return record.cause ?? "killed";
  const run = record.run === undefined ? undefined : runs.get(record.run);
  // A capture or a rewind that was not finished is undone: the VM goes on.
  if (!run) return `lost: the server ended while it was ${record.state}`;
  const slot = state.resources.of(run.id).find((r) => r.kind === "slot" && r.phase === "held");
  const snapshot = state.snapshots.get(record.snapshot);
  if (run.handle === undefined || !slot || !snapshot) return "lost: its records are incomplete";
  const template = templateOf(ctx, record);
  return { record, template, snapshot, run: { ...run, handle: run.handle }, slot: Number(slot.name) };
}

/** A resume that was not finished is undone: its VM is freed with all that no sandbox has. */
function pausedOne(ctx: Context, record: SandboxRecord): Survivor | undefined {
  const snapshot = ctx.state.snapshots.get(record.snapshot);
  return snapshot && { record, template: templateOf(ctx, record), snapshot, run: undefined };
}

/** Its template may have been deleted meanwhile. */
function templateOf(ctx: Context, record: SandboxRecord): TemplateRecord {
  return (
    ctx.state.templates.get(record.template) ?? {
      id: record.template,
      team: record.team,
      name: record.alias ?? record.template,
      public: false,
      snapshot: record.snapshot,
      createdAt: 0,
      updatedAt: 0,
      spawnCount: 0,
      buildCount: 0,
    }
  );
}

function end(ctx: Context, record: SandboxRecord, cause: string): void {
  const at = ctx.clock.now();
  ctx.state.surely(() => {
    ctx.state.sandboxes.end(record.id, at, cause);
    ctx.state.checkpoints.removeOf(record.id);
    ctx.state.events.add(record.id, { timestamp: at, level: "error", message: LIFECYCLE.killed, fields: { cause } });
  });
  ctx.logger.warn({ sandbox: record.id, cause }, "sandbox was not recovered");
}

async function adoptAll(
  ctx: Context,
  candidates: readonly Candidate[],
  signal: AbortSignal,
): Promise<{ candidate: Candidate; vm?: Vm; why: string }[]> {
  const turns = new Semaphore(ADOPT_CONCURRENCY);
  const disks = new Set((await ctx.blockd.listDisks()).map((d) => d.disk));
  return await Promise.all(
    candidates.map((c) =>
      turns.run(async () => {
        if (!disks.has(c.run.id)) return { candidate: c, why: "lost: blockd does not know its disk any more" };
        try {
          const limit = deadline(ADOPT_DEADLINE_MS, signal);
          const vm = await ctx.driver.adopt(c.run.handle as VmHandle, limit);
          if ((await vm.status(limit)) === "stopped") await vm.resume(limit);
          return { candidate: c, vm, why: "" };
        } catch (e) {
          return { candidate: c, why: causeOf(e) };
        }
      }),
    ),
  );
}

function causeOf(e: unknown): string {
  if (!(e instanceof AenvError) || e.code !== "NOT_FOUND") return `lost: ${messageOf(e)}`;
  const exit = e.data["exit"] as Partial<VmExit> | undefined;
  return typeof exit?.cause === "string" ? exit.cause : "unknown";
}

/** By their control group, and by the folder of their sockets in their command line: no pid of ours is trusted alone. */
async function killLeftovers(
  ctx: Context,
  runs: readonly RunRecord[],
  kept: ReadonlySet<RunId>,
  signal: AbortSignal,
): Promise<number> {
  const { paths } = ctx;
  const prefix = `${paths.runDirs}/`;
  // Found before they are killed: a process that ends has no command line any more and still holds what it held.
  const found: ProcIdentity[] = [];
  for (const p of processes()) {
    const run = p.argv.map((a) => runIn(a, prefix)).find((r) => r !== undefined);
    if (run !== undefined && !kept.has(run)) found.push({ pid: p.pid, startTicks: p.startTicks });
  }
  const groups = new Set(await ctx.cgroups.list(paths.cgroupRoot));
  await settleAll(runs.filter((r) => groups.has(paths.cgroup(r.id))).map((r) => ctx.cgroups.kill(paths.cgroup(r.id))));
  for (const p of found) signalExact(p, "SIGKILL");
  const limit = deadline(KILL_DEADLINE_MS, signal);
  while (found.some(isAlive)) await sleep(5, limit);
  return found.length;
}

function runIn(text: string, prefix: string): RunId | undefined {
  const at = text.indexOf(prefix);
  if (at < 0) return undefined;
  return /^r[a-z0-9]{12}/.exec(text.slice(at + prefix.length))?.[0] as RunId | undefined;
}

async function removeCgroups(ctx: Context, kept: ReadonlySet<RunId>): Promise<number> {
  const keep = new Set([...kept].map((id) => ctx.paths.cgroup(id)));
  let removed = 0;
  for (const name of await ctx.cgroups.list(ctx.paths.cgroupRoot)) {
    if (keep.has(name)) continue;
    await ctx.cgroups.kill(name);
    await ctx.cgroups.remove(name);
    removed++;
  }
  return removed;
}

async function removeFolders(root: string, keep: (name: string) => boolean): Promise<number> {
  let removed = 0;
  for (const name of await entries(root)) {
    if (keep(name)) continue;
    await rm(join(root, name), { recursive: true, force: true });
    removed++;
  }
  return removed;
}

/** Half-made captures by their journal, and folders that no record names. */
async function sweepArtifacts(ctx: Context): Promise<number> {
  const { state, paths } = ctx;
  let removed = 0;
  const remove = async (path: string): Promise<void> => {
    await rm(path, { recursive: true, force: true });
    removed++;
  };
  removed += await removeCaptured(ctx, state.resources.list());
  const memory = state.memory.list();
  // A folder of a snapshot of an older version holds its memory too, which others may stand on.
  const homes = new Set(memory.map((m) => dirname(m.path)));
  const snapshots = new Set<string>(state.snapshots.list().map((s) => s.id));
  for (const name of await entries(paths.snapshots)) {
    const path = join(paths.snapshots, name);
    if (!snapshots.has(name) && !homes.has(path)) await remove(path);
  }
  for (const name of await entries(paths.memory)) {
    const path = join(paths.memory, name);
    if (!homes.has(path)) await remove(path);
  }
  const layers = new Set<string>(state.layers.list().map((l) => l.id));
  for (const name of await entries(paths.layers)) {
    const path = join(paths.layers, name);
    if (!layers.has(name) && (await olderThan(path, ctx.clock.now() - STRAY_LAYER_MS))) await remove(path);
  }
  return removed;
}

async function olderThan(path: string, at: number): Promise<boolean> {
  try {
    return (await stat(path)).mtimeMs < at;
  } catch (e) {
    if (errnoOf(e) === "ENOENT") return false;
    throw e;
  }
}

async function entries(path: string): Promise<string[]> {
  try {
    return await readdir(path);
  } catch (e) {
    if (errnoOf(e) === "ENOENT") return [];
    throw e;
  }
}
