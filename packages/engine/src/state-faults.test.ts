/**
 * Every step of pause, resume, snapshot, checkpoint, fork and rewind fails once, and the server or the VMs die once at it:
 * the sandbox is in the state before or after, with what it had in memory, and nothing is left over.
 */
import assert from "node:assert/strict";
import { test } from "node:test";
import type { SandboxId } from "@aenv/base";
import { type Life, until, World } from "./testing.ts";

const signal = new AbortController().signal;
const MINUTE = 60_000;
/** What the guest has in memory when the checkpoint is taken, and when the operation begins. */
const [AT_CHECKPOINT, NOW] = [2, 5];

class Fault {
  at: string | undefined;
  kind: "fail" | "park" | "kill" = "fail";
  kill: () => Promise<void> = async () => {};
  readonly seen = new Set<string>();
  readonly reached = Promise.withResolvers<void>();

  readonly step = (name: string): Promise<void> | void => {
    this.seen.add(name);
    if (name !== this.at) return;
    // Once: what is undone or tried again goes its way.
    this.at = undefined;
    this.reached.resolve();
    if (this.kind === "kill") return this.kill();
    if (this.kind === "park") return new Promise(() => {});
    throw new Error(`fault at ${name}`);
  };
}

interface Op {
  paused: boolean;
  /** What the guest has in memory afterwards. */
  after: number;
  run(life: Life, id: SandboxId): Promise<unknown>;
  /** Steps that must be among those that were seen. */
  steps: readonly string[];
}

const CAPTURE = ["capture:before", "stop:before", "device:before", "memory:before", "seal:before", "seal:after"];
const LAUNCH = ["slot:before", "disk:after", "prepare:before", "inject:after", "load:before", "resume:after"];
const WRITTEN = ["memory-file:before", "manifest:after"];
const HANDED = ["assign:after", "init:before", "init:after"];
const REWIND = ["rewinding:after", "rewind-stop:after", ...LAUNCH, ...HANDED, "rewind-commit:before"];

const OPS: Record<string, Op> = {
  pause: {
    paused: false,
    after: NOW,
    run: (l, id) => l.engine.pause(id, {}, signal),
    steps: ["pausing:after", ...CAPTURE, ...WRITTEN, "paused:after"],
  },
  "pause of the disk only": {
    paused: false,
    // It boots: nothing of its memory is kept.
    after: 0,
    run: (l, id) => l.engine.pause(id, { memory: false }, signal),
    steps: ["pausing:after", ...CAPTURE, ...WRITTEN, "paused:after"],
  },
  resume: {
    paused: true,
    after: NOW,
    run: (l, id) => l.engine.connect(id, MINUTE, signal),
    steps: ["resuming:after", ...LAUNCH, ...HANDED, "resume-commit:before"],
  },
  snapshot: {
    paused: false,
    after: NOW,
    run: (l, id) => l.engine.snapshot(id, { name: "kept" }, signal),
    steps: [...CAPTURE, ...WRITTEN],
  },
  checkpoint: {
    paused: false,
    after: NOW,
    run: (l, id) => l.engine.checkpoint(id, { name: "later" }, signal),
    steps: [...CAPTURE, ...WRITTEN],
  },
  fork: {
    paused: false,
    after: NOW,
    run: async (l, id) => {
      for (const r of await l.engine.fork(id, { count: 2, timeoutMs: MINUTE }, signal)) if ("error" in r) throw r.error;
    },
    steps: [...CAPTURE, ...WRITTEN, ...LAUNCH, ...HANDED, "commit:before"],
  },
  rewind: {
    paused: false,
    after: AT_CHECKPOINT,
    run: (l, id) => l.engine.rewind(id, "cp", {}, signal),
    steps: [...REWIND, "rewound:after"],
  },
  "rewind of a paused one": {
    paused: true,
    after: AT_CHECKPOINT,
    run: (l, id) => l.engine.rewind(id, "cp", {}, signal),
    steps: REWIND,
  },
};

interface Scene {
  life: Life;
  fault: Fault;
  id: SandboxId;
  /** Of the node without sandboxes. */
  empty: Record<string, string[]>;
}

async function scene(world: World, op: Op): Promise<Scene> {
  const fault = new Fault();
  const life = await world.start({ onStep: fault.step });
  await world.addTemplate(life, "base");
  const empty = await world.inventory();
  const { sandboxId: id } = await life.engine.create({ template: "base", timeoutMs: MINUTE }, signal);
  touch(life, id, AT_CHECKPOINT);
  await life.engine.checkpoint(id, { name: "cp" }, signal);
  touch(life, id, NOW - AT_CHECKPOINT);
  if (op.paused) await life.engine.pause(id, {}, signal);
  await until(() => life.engine.resources().length === (op.paused ? 0 : 6), "the VM of a paused one is freed");
  fault.seen.clear();
  return { life, fault, id, empty };
}

function touch(life: Life, id: SandboxId, times: number): void {
  for (let n = 0; n < times; n++) life.driver.touch(life.engine.route(id)?.run ?? "");
}

/** What it has in memory once it runs. */
async function memoryOf(life: Life, id: SandboxId): Promise<number | undefined> {
  await life.engine.connect(id, MINUTE, signal);
  return life.driver.memoryOf(life.engine.route(id)?.run ?? "")?.counter;
}

/** Every sandbox of it ends: nothing but the template is left. */
async function assertNothingLeft(world: World, life: Life, empty: Record<string, string[]>): Promise<void> {
  for (const { sandboxId } of life.engine.list().items) await life.engine.kill(sandboxId);
  await life.engine.deleteSnapshot("kept");
  await until(async () => JSON.stringify(await world.inventory()) === JSON.stringify(empty), "all is freed").catch(
    async () => assert.deepEqual(await world.inventory(), empty),
  );
  assert.deepEqual(life.state.resources.list(), []);
  assert.deepEqual(life.state.runs.list(), []);
  assert.equal(life.state.snapshots.list().length, 1);
}

/** As a user sees it; times aside. */
function seen(life: Life, id: SandboxId): object {
  const { state, envdAccessToken } = life.engine.get(id);
  const checkpoints = life.state.checkpoints.of(id).map((c) => c.name);
  return { state, envdAccessToken, run: life.engine.route(id)?.run, checkpoints };
}

/** Steps by operation, as one undisturbed run of it passes them. */
async function stepsOf(op: Op): Promise<string[]> {
  await using world = await World.make();
  const { life, fault, id } = await scene(world, op);
  await op.run(life, id);
  return [...fault.seen];
}

for (const [name, op] of Object.entries(OPS)) {
  const steps = await stepsOf(op);

  test(`${name}: it does what it is for, and its steps are known`, async () => {
    for (const step of op.steps) assert.ok(steps.includes(step), `${step} is one of ${steps.join(" ")}`);
    await using world = await World.make();
    const { life, id, empty } = await scene(world, op);
    await op.run(life, id);
    assert.equal(await memoryOf(life, id), op.after);
    await assertNothingLeft(world, life, empty);
  });

  for (const at of steps) {
    test(`${name} that fails at ${at}: all is as before or after, and the next one works`, async () => {
      await using world = await World.make();
      const { life, fault, id, empty } = await scene(world, op);
      const before = seen(life, id);
      fault.at = at;
      const failed = await op.run(life, id).then(
        () => false,
        () => true,
      );
      assert.equal(fault.at, undefined, "the fault came");
      if (failed && name !== "fork") assert.deepEqual(seen(life, id), before);
      if (failed && !op.paused) {
        const run = life.engine.route(id)?.run ?? "";
        const vm = await life.driver.adopt(life.state.runs.get(run as never)?.handle as never, signal);
        assert.equal(await vm.status(signal), "running");
        assert.equal(life.driver.memoryOf(run)?.counter, NOW);
      }
      await op.run(life, id);
      assert.equal(await memoryOf(life, id), op.after);
      await assertNothingLeft(world, life, empty);
    });

    test(`VMs that die at ${at} of ${name}: the sandbox is as before, as after, or over, and nothing is left`, async () => {
      await using world = await World.make();
      const { life, fault, id, empty } = await scene(world, op);
      fault.at = at;
      fault.kind = "kill";
      fault.kill = async () => {
        for (const run of world.vmms.alive) await life.driver.crash(run);
      };
      await op.run(life, id).catch(() => {});
      assert.equal(fault.at, undefined, "the fault came");
      const { state } = life.state.sandboxes.get(id) ?? {};
      // One without a VM of its own is not hurt by the death of others.
      if (op.paused) assert.ok(state === "paused" || state === "running" || state === "gone", state);
      if (state === "paused") assert.equal(await memoryOf(life, id), op.paused ? NOW : op.after);
      await assertNothingLeft(world, life, empty);
    });

    test(`a server that dies at ${at} of ${name}: its next start finds it as before or after`, async () => {
      await using world = await World.make();
      const { life, fault, id, empty } = await scene(world, op);
      const before = seen(life, id) as { envdAccessToken: string };
      fault.at = at;
      fault.kind = "park";
      void op.run(life, id);
      await fault.reached.promise;
      // What runs beside the parked step has come to rest.
      await new Promise((resolve) => setTimeout(resolve, 5));
      await life.crash();

      const next = await world.start();
      const view = next.engine.get(id);
      assert.ok(view.state === "running" || view.state === "paused", view.state);
      assert.equal(view.envdAccessToken, before.envdAccessToken);
      for (const s of next.engine.list().items) assert.ok(s.state === "running" || s.state === "paused");
      const run = next.engine.route(id)?.run;
      if (run !== undefined) {
        const vm = await next.driver.adopt(next.state.runs.get(run)?.handle as never, signal);
        assert.equal(await vm.status(signal), "running");
      }
      const memory = await memoryOf(next, id);
      assert.ok(memory === NOW || memory === op.after, `${memory}`);
      await op.run(next, id);
      assert.equal(await memoryOf(next, id), op.after);
      await assertNothingLeft(world, next, empty);
    });
  }
}
