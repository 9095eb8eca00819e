/** Launch: from a snapshot to a running VM. Every create, spare, resume and fork is made of these steps. */
import { createHash, randomBytes } from "node:crypto";
import { AenvError, deadline, messageOf, sleep } from "@aenv/base";
import type { LayerRecord, SnapshotRecord } from "@aenv/state";
import type { Context } from "./context.ts";
import { checkDevice } from "./damage.ts";
import type { Phases } from "./phases.ts";
import { flatOf, stackOf } from "./memory-stack.ts";
import type { GuestInit, LayerPortRef } from "./ports.ts";
import { settleAll, VmRun } from "./run.ts";

/** From nothing to a waiting VMM: process start (0.05 s alone) under a machine full of other starts. */
export const PREPARE_DEADLINE_MS = 30_000;
/** Kernel, init and agent under emulation on a busy machine; 2 s alone. */
export const BOOT_DEADLINE_MS = 60_000;
/** Device state and `cont`: 10 ms alone. */
export const START_DEADLINE_MS = 15_000;
/** Between two attempts to reach an agent that does not accept connections yet. */
const INIT_RETRY_MS = 20;

/** A waiting VMM with slot, disk and control group: load() is what is left. Leaves nothing when it fails. */
export async function prepareRun(
  ctx: Context,
  snapshot: SnapshotRecord,
  phases: Phases,
  parent: AbortSignal,
  cpuWeight?: number,
): Promise<VmRun> {
  const signal = deadline(PREPARE_DEADLINE_MS, parent);
  const run = await VmRun.make(
    ctx,
    {
      purpose: "spare",
      owner: snapshot.id,
      snapshot: snapshot.id,
      maps: flatOf(snapshot).id,
      machine: snapshot.machine,
      layers: snapshot.layers,
      diskBytes: snapshot.diskBytes,
      ...(cpuWeight === undefined ? {} : { cpuWeight }),
    },
    phases,
    signal,
  );
  await using undo = new AsyncDisposableStack();
  undo.defer(() => run.release());
  await ctx.step("prepare:before");
  const memory = { file: flatOf(snapshot).path, mode: "map" as const };
  run.setVm(await phases.time("vmm", () => ctx.driver.prepare(run.spec(memory), signal)));
  await ctx.step("prepare:after");
  await injectInto(ctx, run, snapshot, phases, signal);
  if (snapshot.memory.length === 1) run.blank = flatOf(snapshot).id;
  await ctx.step("inject:after");
  undo.move();
  return run;
}

/**
 * A waiting VMM of another snapshot that maps the same memory file becomes one of this snapshot: other layers beneath its
 * disk, and the pages in which the two differ. The caller releases the run when it fails.
 */
export async function moveRun(
  ctx: Context,
  run: VmRun,
  snapshot: SnapshotRecord,
  phases: Phases,
  parent: AbortSignal,
): Promise<void> {
  const signal = deadline(START_DEADLINE_MS, parent);
  await ctx.step("move:before");
  const before = run.layers.map(refOf);
  run.moveTo(snapshot);
  await settleAll([
    phases.time("layers", () => ctx.blockd.restackDisk(run.id, before, snapshot.layers.map(refOf), { signal })),
    injectInto(ctx, run, snapshot, phases, signal),
  ]);
  await ctx.step("move:after");
}

/** Before the load, which reads the queues of virtio devices from guest memory. */
async function injectInto(
  ctx: Context,
  run: VmRun,
  snapshot: SnapshotRecord,
  phases: Phases,
  signal: AbortSignal,
): Promise<void> {
  if (snapshot.memory.length === 1) return;
  await phases.time("inject", async () => {
    phases.count("injected", await ctx.memory.inject(await run.vm.mappings(signal), stackOf(snapshot)));
  });
}

export const refOf = ({ id, path }: LayerRecord): LayerPortRef => ({ id, path });

/** A snapshot without memory: its disk is booted. Resolves when the guest's agent answers. Leaves nothing when it fails. */
export async function bootRun(
  ctx: Context,
  snapshot: SnapshotRecord,
  phases: Phases,
  parent: AbortSignal,
): Promise<VmRun> {
  const signal = deadline(BOOT_DEADLINE_MS, parent);
  const { machine, layers, diskBytes } = snapshot;
  const run = await VmRun.make(
    ctx,
    { purpose: "spare", owner: snapshot.id, snapshot: snapshot.id, machine, layers, diskBytes, coldBoot: true },
    phases,
    signal,
  );
  await using undo = new AsyncDisposableStack();
  undo.defer(() => run.release());
  await ctx.step("boot:before");
  const memory = { file: ctx.paths.bootMemory(run.id), mode: "create" as const };
  run.setVm(await phases.time("vmm", () => ctx.driver.boot(run.spec(memory), signal)));
  await ctx.step("boot:after");
  await phases.time("boot", () => untilReady(run, signal));
  undo.move();
  return run;
}

/** What the guest printed last is what explains a boot that came to nothing. */
export async function untilReady(run: VmRun, signal: AbortSignal): Promise<void> {
  const died = diedSignal(run);
  try {
    await run.guest.waitReady(AbortSignal.any([signal, died]));
  } catch (e) {
    throw new AenvError("GUEST_FAILED", `the guest did not come up: ${messageOf(e)}`, {
      cause: e,
      data: { console: await run.consoleTail() },
      hint: "What its console said last is in the server log.",
    });
  }
}

/** Aborts when the VM of the run ends. */
export function diedSignal(run: VmRun): AbortSignal {
  const died = new AbortController();
  void run.vm.exited.then((exit) =>
    died.abort(new AenvError("GUEST_FAILED", `the virtual machine ended: ${exit.cause}: ${exit.detail}`)),
  );
  return died.signal;
}

/** The waiting VMM becomes the running guest. The caller releases the run when it fails. */
export async function startRun(
  ctx: Context,
  run: VmRun,
  snapshot: SnapshotRecord,
  phases: Phases,
  parent: AbortSignal,
): Promise<void> {
  const signal = deadline(START_DEADLINE_MS, parent);
  await ctx.step("load:before");
  await checkDevice(snapshot);
  await phases.time("load", () => run.vm.load(snapshot.devicePath, signal));
  await ctx.step("resume:before");
  await phases.time("resume", () => run.vm.resume(signal));
  phases.mark("running");
  await ctx.step("resume:after");
}

/**
 * Runs the agent once through its paces, so that emulator and guest are warm when somebody gets this VM.
 * `currentToken`: what the guest was captured with.
 */
export async function primeRun(
  ctx: Context,
  run: VmRun,
  currentToken: string | undefined,
  parent: AbortSignal,
): Promise<void> {
  const signal = deadline(START_DEADLINE_MS, parent);
  await ctx.step("prime:before");
  await run.guest.waitReady(signal);
  for (let turn = 0; turn < PRIME_TURNS; turn++) {
    await run.guest.init(nobody(ctx, run), signal, currentToken);
    await run.guest.exec(PRIME, signal);
    await run.guest.hooks({ phase: "none", cause: "prime" }, { answerMs: START_DEADLINE_MS }, signal).catch(isOld);
  }
  await run.guest.health(signal);
}
/** What the SDKs run: a login shell with a command. Most of the code is translated the first time, the rest the next. */
const PRIME = { cmd: "/bin/bash", args: ["-l", "-c", "echo ready"] };
const PRIME_TURNS = 3;

/** An agent that was captured before it had this: it is as good as primed. */
function isOld(e: unknown): void {
  if (!(e instanceof AenvError && e.code === "NOT_FOUND")) throw e;
}

/** The identity of a spare: it walks the path of a real one and is overwritten by it as a whole. */
function nobody(ctx: Context, run: VmRun): GuestInit {
  return {
    envVars: {},
    accessToken: "",
    timestamp: new Date(ctx.clock.now()).toISOString(),
    defaultUser: "",
    defaultWorkdir: "",
    // Empty ids are not written down; the host name is the one of the image.
    sandboxId: "",
    templateId: "",
    hostname: "sandbox",
    machineId: randomBytes(16).toString("hex"),
    entropy: randomBytes(64).toString("base64"),
    lifecycleID: run.id,
    cause: "boot",
  };
}

export interface Identity {
  sandboxId: string;
  templateId: string;
  envVars: Record<string, string>;
  accessToken: string;
  /** What the guest was captured with, where it may be another one. */
  currentToken?: string | undefined;
  defaults: SnapshotRecord["defaults"];
  cause: GuestInit["cause"];
  /** A certificate that the guest's programs shall trust. */
  caBundle?: string;
  /** Of a child of a fork: which one of its siblings it is, and a seed that no other has. */
  fork?: { index: number; seed: string };
}

/**
 * Makes the guest this sandbox and no other: identity, environment, token, clock, entropy, hostname, machine id.
 * Resolves with whether it has hooks that are to run now. GUEST_FAILED when the agent has not done so within `limitMs`; CANCELLED when the caller gave up.
 */
export async function initRun(
  ctx: Context,
  run: VmRun,
  identity: Identity,
  limitMs: number,
  parent: AbortSignal,
): Promise<{ hooks: boolean }> {
  await ctx.step("init:before");
  const signal = deadline(limitMs, parent);
  // The VM's death must not be waited for until the deadline.
  const died = new AbortController();
  void run.vm.exited.then((exit) =>
    died.abort(
      new AenvError("GUEST_FAILED", `the virtual machine ended before it was ready: ${exit.cause}`, {
        data: { ...exit },
      }),
    ),
  );
  const either = AbortSignal.any([signal, died.signal]);
  let told: { hooks: boolean } | undefined;
  while (!told) {
    try {
      told = await run.guest.init(initBody(ctx, run, identity), either, identity.currentToken);
    } catch (e) {
      parent.throwIfAborted();
      if (died.signal.aborted) throw died.signal.reason;
      if (signal.aborted || !isNotThereYet(e))
        throw new AenvError("GUEST_FAILED", `the guest's agent did not take its identity: ${messageOf(e)}`, {
          cause: e,
          data: { run: run.id, limitMs },
        });
      await sleep(INIT_RETRY_MS, either).catch(() => {});
    }
  }
  await ctx.step("init:after");
  return told;
}

/** No connection yet, as against an answer that is wrong. */
function isNotThereYet(e: unknown): boolean {
  return e instanceof AenvError && typeof e.data["errno"] === "string";
}

function initBody(ctx: Context, run: VmRun, identity: Identity): GuestInit {
  return {
    envVars: { ...identity.defaults.envVars, ...identity.envVars },
    accessToken: identity.accessToken,
    timestamp: new Date(ctx.clock.now()).toISOString(),
    defaultUser: identity.defaults.user,
    defaultWorkdir: identity.defaults.workdir,
    sandboxId: identity.sandboxId,
    templateId: identity.templateId,
    hostname: identity.sandboxId,
    machineId: createHash("sha256").update(`machine-id ${identity.sandboxId}`).digest("hex").slice(0, 32),
    entropy: randomBytes(64).toString("base64"),
    lifecycleID: run.id,
    cause: identity.cause,
    ...(identity.caBundle === undefined ? {} : { caBundle: identity.caBundle }),
    ...(identity.fork === undefined ? {} : { forkIndex: identity.fork.index, seed: identity.fork.seed }),
  };
}
