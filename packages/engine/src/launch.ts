/** Launch: from a snapshot to a running VM. Every create, spare, resume and fork is made of these steps. */
import { createHash, randomBytes } from "node:crypto";
import { AenvError, deadline, messageOf, sleep } from "@aenv/base";
import type { SnapshotRecord } from "@aenv/state";
import type { Context } from "./context.ts";
import type { Phases } from "./phases.ts";
import type { GuestInit } from "./ports.ts";
import { VmRun } from "./run.ts";

/** From nothing to a waiting VMM: process start (0.05 s alone) under a machine full of other starts. */
export const PREPARE_DEADLINE_MS = 30_000;
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
  const memory = { file: snapshot.memoryPath, mode: "map" as const };
  run.setVm(await phases.time("vmm", () => ctx.driver.prepare(run.spec(memory), signal)));
  await ctx.step("prepare:after");
  undo.move();
  return run;
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
  await phases.time("load", () => run.vm.load(snapshot.devicePath, signal));
  await ctx.step("resume:before");
  await phases.time("resume", () => run.vm.resume(signal));
  await ctx.step("resume:after");
}

/** Runs the agent once through its paces, so that emulator and guest are warm when somebody gets this VM. */
export async function primeRun(ctx: Context, run: VmRun, parent: AbortSignal): Promise<void> {
  const signal = deadline(START_DEADLINE_MS, parent);
  await ctx.step("prime:before");
  await run.guest.waitReady(signal);
  for (let turn = 0; turn < PRIME_TURNS; turn++) {
    await run.guest.init(nobody(ctx, run), signal);
    await run.guest.exec(PRIME, signal);
  }
  await run.guest.health(signal);
}
/** What the SDKs run: a login shell with a command. Most of the code is translated the first time, the rest the next. */
const PRIME = { cmd: "/bin/bash", args: ["-l", "-c", "echo ready"] };
const PRIME_TURNS = 3;

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
  defaults: SnapshotRecord["defaults"];
  cause: GuestInit["cause"];
}

/**
 * Makes the guest this sandbox and no other: identity, environment, token, clock, entropy, hostname, machine id.
 * GUEST_FAILED when the agent has not done so within `limitMs`; CANCELLED when the caller gave up.
 */
export async function initRun(
  ctx: Context,
  run: VmRun,
  identity: Identity,
  limitMs: number,
  parent: AbortSignal,
): Promise<void> {
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
  for (;;) {
    try {
      await run.guest.init(initBody(ctx, run, identity), either);
      break;
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
  };
}
