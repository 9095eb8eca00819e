/** kill -9 of the server, blockd, vmd and VMMs in the middle of state operations, on real parts. */
import assert from "node:assert/strict";
import { spawn } from "node:child_process";
import { once } from "node:events";
import { join } from "node:path";
import { createInterface } from "node:readline";
import { after, before, test } from "node:test";
import { AenvError, type SandboxId, sleep } from "@aenv/base";
import type { Engine } from "@aenv/engine";
import { CONFIG, HOUR, type Operation, sh, TestNode } from "./node.ts";

const signal = new AbortController().signal;
const LIMIT = { timeout: 300_000 };

let node: TestNode;
let engine: Engine;
let onStep: (name: string) => Promise<void> | void = () => {};
const open = async (): Promise<void> => {
  engine = await node.open(CONFIG, (name) => onStep(name));
};
before(async () => {
  node = await TestNode.make();
  await open();
  await node.buildTemplate("base", await node.baseLayer());
});
after(() => node[Symbol.asyncDispose]());

/** A process that counts, and data in memory and on the disk; prints the sums of both. */
const START = `head -c 6000000 /dev/urandom > /dev/shm/data; head -c 3000000 /dev/urandom > ~/data
  (exec 3>/dev/shm/open; while :; do echo tick >&3; sleep 0.1; done) >/dev/null 2>&1 & echo $! > /dev/shm/pid
  sync; sha256sum /dev/shm/data ~/data`;
const SUMS = "sha256sum /dev/shm/data ~/data";
const ALIVE = `kill -0 $(cat /dev/shm/pid); a=$(wc -l < /dev/shm/open)
  while [ $(wc -l < /dev/shm/open) = $a ]; do sleep 0.1; done; echo on`;

/** Sums of what it has at its checkpoint "cp", and of what it has now. */
async function make(): Promise<{ id: SandboxId; past: string; now: string }> {
  const { sandboxId: id } = await engine.create({ template: "base", timeoutMs: HOUR }, signal);
  const past = await sh(engine, id, START);
  await engine.checkpoint(id, { name: "cp" }, signal);
  const now = await sh(engine, id, `head -c 1000000 /dev/urandom >> ~/data; date > /dev/shm/data; sync; ${SUMS}`);
  return { id, past, now };
}

async function assertWell(id: SandboxId, sums: readonly string[]): Promise<void> {
  const { state } = engine.get(id);
  assert.ok(state === "running" || state === "paused", state);
  await engine.connect(id, HOUR, signal);
  assert.ok(sums.includes(await sh(engine, id, SUMS)));
  await sh(engine, id, "echo 3 > /proc/sys/vm/drop_caches", "root");
  assert.ok(sums.includes(await sh(engine, id, SUMS)));
  assert.equal(await sh(engine, id, ALIVE), "on");
}

/** Every sandbox ends: only the template is left. */
async function assertNothingLeft(): Promise<void> {
  for (const { sandboxId } of engine.list().items) await engine.kill(sandboxId);
  const found = async (): Promise<object> => ({
    resources: engine.resources(),
    ...(await node.leftovers()),
    artifacts: await node.artifacts(),
  });
  const wanted = { snapshots: 1, memory: 1, layers: 2 };
  const end = performance.now() + 120_000;
  for (;;) {
    const { artifacts, ...rest } = (await found()) as Record<string, unknown[]> & { artifacts: object };
    const clean = Object.values(rest).every((v) => v.length === 0);
    if (clean && JSON.stringify(artifacts) === JSON.stringify(wanted)) return;
    if (performance.now() > end) assert.deepEqual({ artifacts, ...rest }, { artifacts: wanted });
    await sleep(50);
  }
}

const SERVER_DEATHS: readonly (readonly [Operation, string])[] = [
  ["snapshot", "seal:after"],
  ["pause", "memory-file:before"],
  ["pause", "paused:after"],
  ["resume", "init:before"],
  ["fork", "resume:after"],
  ["rewind", "rewind-commit:before"],
  ["rewind", "rewound:after"],
];

for (const [operation, at] of SERVER_DEATHS)
  test(`kill -9 of the server at ${at} of ${operation}`, LIMIT, async () => {
    const { id, past, now } = await make();
    if (operation === "resume") await engine.pause(id, {}, signal);
    await node.closeLife();
    const args = [join(import.meta.dirname, "doomed.ts"), node.home, node.instance, operation, id, at];
    const server = spawn(process.execPath, args, { stdio: ["ignore", "pipe", "inherit"] });
    const ended = once(server, "exit");
    try {
      let said = "";
      for await (const line of createInterface(server.stdout)) {
        said = line;
        if (line === "reached" || line === "done") break;
      }
      assert.equal(said, "reached");
    } finally {
      server.kill("SIGKILL");
      await ended;
      await open();
    }
    await assertWell(id, operation === "rewind" ? [past, now] : [now]);
    await engine.rewind(id, "cp", {}, signal);
    assert.equal(await sh(engine, id, SUMS), past);
    await assertNothingLeft();
  });

/** Runs the operation; at the step, once, `kill` is done. Resolves with its failure, if any. */
async function killedAt(at: string, kill: () => Promise<void>, operation: () => Promise<unknown>): Promise<unknown> {
  let reached = false;
  onStep = async (step) => {
    if (step !== at || reached) return;
    reached = true;
    await kill();
  };
  try {
    return await operation().then(
      () => undefined,
      (e: unknown) => e,
    );
  } finally {
    onStep = () => {};
    assert.ok(reached, `it came to ${at}`);
  }
}

const pids = (): number[] => engine.resources().flatMap((r) => (r.kind === "process" ? [Number(r.name)] : []));

for (const [name, at, operation] of [
  ["blockd", "seal:before", "pause"],
  ["blockd", "seal:after", "snapshot"],
  ["blockd", "load:before", "resume"],
  ["blockd", "init:before", "rewind"],
  ["vmd", "prepare:before", "resume"],
  ["vmd", "stop:before", "pause"],
] as const)
  test(`kill -9 of ${name} at ${at} of ${operation}`, LIMIT, async () => {
    const { id, past, now } = await make();
    if (operation === "resume") await engine.pause(id, {}, signal);
    let back: Promise<void> | undefined;
    const kill = async (): Promise<void> => {
      await node.stopChild(name, "SIGKILL");
      back = node.startChild(name);
    };
    const run = {
      pause: () => engine.pause(id, {}, signal),
      snapshot: () => engine.snapshot(id, { name: "kept" }, signal),
      resume: () => engine.connect(id, HOUR, signal),
      rewind: () => engine.rewind(id, "cp", {}, signal),
    }[operation];
    const failure = await killedAt(at, kill, run);
    await back;
    await assertWell(id, operation === "rewind" && failure === undefined ? [past] : [now]);
    // The same, undisturbed.
    if (operation === "resume") await engine.pause(id, {}, signal);
    await run();
    await assertWell(id, operation === "rewind" ? [past] : [now]);
    await engine.deleteSnapshot("kept");
    await assertNothingLeft();
  });

for (const [operation, at] of [
  ["resume", "load:before"],
  ["resume", "init:before"],
  ["rewind", "load:before"],
  ["rewind", "init:before"],
] as const)
  test(`kill -9 of the new VMM at ${at} of ${operation}: all is as before, and the next one works`, LIMIT, async () => {
    const { id, past, now } = await make();
    if (operation === "resume") await engine.pause(id, {}, signal);
    const { state } = engine.get(id);
    const known = pids();
    const kill = async (): Promise<void> => {
      for (const pid of pids()) if (!known.includes(pid)) process.kill(pid, "SIGKILL");
    };
    const run = (): Promise<unknown> =>
      operation === "resume" ? engine.connect(id, HOUR, signal) : engine.rewind(id, "cp", {}, signal);
    const failure = await killedAt(at, kill, run);
    assert.ok(failure instanceof AenvError);
    assert.equal(engine.get(id).state, state);
    await assertWell(id, [now]);
    await run();
    await assertWell(id, operation === "resume" ? [now] : [past]);
    await assertNothingLeft();
  });

for (const at of ["device:before", "memory-file:before"])
  test(
    `kill -9 of the VMM at ${at} of a pause ends the sandbox with its cause, and what it saved before stays`,
    LIMIT,
    async () => {
      const { id, now } = await make();
      await engine.snapshot(id, { name: "kept" }, signal);
      const kill = async (): Promise<void> => {
        for (const pid of pids()) process.kill(pid, "SIGKILL");
      };
      const failure = await killedAt(at, kill, () => engine.pause(id, {}, signal));
      // Once its state is taken the VM is not needed any more.
      if (failure === undefined) await assertWell(id, [now]);
      else {
        assert.ok(failure instanceof AenvError);
        await assert.rejects(engine.connect(id, HOUR, signal), /ended|not found/);
        const made = await engine.create({ template: "kept", timeoutMs: HOUR }, signal);
        assert.equal(await sh(engine, made.sandboxId, SUMS), now);
      }
      await engine.deleteSnapshot("kept");
      await assertNothingLeft();
    },
  );
