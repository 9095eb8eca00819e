/** A node whose data folder is on a disk that is really full, on real parts. */
import assert from "node:assert/strict";
import { after, before, beforeEach, test } from "node:test";
import { AenvError, mib, type SandboxId, sleep } from "@aenv/base";
import type { Engine, EngineConfigInput } from "@aenv/engine";
import { GuestClient } from "@aenv/guest";
import { FullableDisk } from "@aenv/host/testing";
import { TestNode } from "./node.ts";

const signal = new AbortController().signal;
const HOUR = 3_600_000;
const DISK_MIB = 1100;
const config: Partial<EngineConfigInput> = {
  pool: { pinned: [], watermarks: { hot: { low: 0, high: 0 }, prepared: { low: 0, high: 0 } }, perTemplate: {} },
  // What happens below the reserve is what these tests are about.
  diskReserveBytes: mib(0),
};

let disk: FullableDisk;
let node: TestNode;
let engine: Engine;
before(async () => {
  disk = await FullableDisk.make(DISK_MIB);
  node = await TestNode.make(disk.path);
  engine = await node.open(config);
  await node.buildTemplate("base", await node.baseLayer());
});
after(async () => {
  disk?.empty();
  await node?.[Symbol.asyncDispose]();
  await disk?.[Symbol.asyncDispose]();
});

beforeEach(() => disk.empty());

const create = async (timeoutMs = HOUR): Promise<SandboxId> =>
  (await engine.create({ template: "base", timeoutMs }, signal)).sandboxId;

async function sh(id: SandboxId, script: string, user = "user"): Promise<string> {
  const route = engine.route(id);
  assert.ok(route, `sandbox ${id} runs`);
  const { host, accessToken } = route;
  const guest = new GuestClient({ host, ...(accessToken === undefined ? {} : { accessToken }) });
  try {
    const result = await guest.exec({ cmd: "/bin/bash", args: ["-c", script], user }, AbortSignal.timeout(120_000));
    assert.equal(result.exitCode, 0, result.stderr);
    return result.stdout.trim();
  } finally {
    guest.close();
  }
}

async function until(condition: () => boolean | Promise<boolean>, what: string): Promise<void> {
  const end = performance.now() + 120_000;
  while (!(await condition())) {
    assert.ok(performance.now() < end, `never: ${what}`);
    await sleep(50);
  }
}

const released = () => until(() => engine.resources().length === 0, "everything is released");
const isFull = (e: unknown): boolean => e instanceof AenvError && e.code === "NO_SPACE" && e.status === 507;

test("a guest that fills the host's disk gets errors; it and its neighbour can be ended, and that frees the disk", async () => {
  const [greedy, neighbour] = [await create(), await create()];
  disk.fill(48 * 1024 ** 2);
  const said = await sh(greedy, "LC_ALL=C dd if=/dev/urandom of=/big bs=1M count=96 conv=fsync 2>&1 || true", "root");
  assert.match(said, /error|No space/);
  assert.ok(disk.free < 4 * 1024 ** 2, `${disk.free} bytes are left`);
  assert.equal(await sh(neighbour, "echo still here"), "still here");
  assert.equal(await engine.kill(neighbour), true);
  assert.equal(await engine.kill(greedy), true);
  await released();
  await until(() => disk.free > 40 * 1024 ** 2, "the disk is free again");
  const next = await create();
  assert.equal(await sh(next, "echo new"), "new");
  await engine.kill(next);
  await released();
});

test("sandboxes expire on a full disk, and nothing of them stays", async () => {
  const id = await create();
  disk.fill();
  await engine.setTimeout(id, 1000);
  await until(() => engine.route(id) === undefined, "its end");
  await released();
  assert.equal(node.life.state.late, 0, "even the record is written: there is room for it");
  disk.empty();
});

test("pause, snapshot and fork on a full disk fail with 507, the sandbox goes on, and the next capture is complete", async () => {
  const id = await create();
  const facts = await sh(
    id,
    "head -c 4000000 /dev/urandom > /dev/shm/data; head -c 2000000 /dev/urandom > ~/data; sync; sha256sum /dev/shm/data ~/data",
  );
  const artifacts = await node.artifacts();
  disk.fill();
  for (const [what, ask] of Object.entries({
    pause: () => engine.pause(id, {}, signal),
    snapshot: () => engine.snapshot(id, {}, signal),
    fork: () => engine.fork(id, { count: 1, timeoutMs: HOUR }, signal),
  })) {
    await assert.rejects(ask(), isFull, what);
    assert.equal(engine.get(id).state, "running", what);
    assert.equal(await sh(id, "sha256sum /dev/shm/data ~/data"), facts, what);
  }
  disk.empty();
  const now = await node.artifacts();
  assert.deepEqual([now.snapshots, now.memory], [artifacts.snapshots, artifacts.memory]);
  await sh(id, "head -c 1000000 /dev/urandom > ~/more; sync");
  const all = await sh(id, "sha256sum /dev/shm/data ~/data ~/more");
  assert.equal(await engine.pause(id, {}, signal), true);
  await engine.connect(id, HOUR, signal);
  await sh(id, "echo 3 > /proc/sys/vm/drop_caches", "root");
  assert.equal(await sh(id, "sha256sum /dev/shm/data ~/data ~/more"), all);
  const [child] = await engine.fork(id, { count: 1, timeoutMs: HOUR }, signal);
  assert.ok(child && "view" in child);
  await sh(child.view.sandboxId, "echo 3 > /proc/sys/vm/drop_caches", "root");
  assert.equal(await sh(child.view.sandboxId, "sha256sum /dev/shm/data ~/data ~/more"), all);
  for (const each of [id, child.view.sandboxId]) await engine.kill(each);
  await released();
});

test("a server and a blockd that start on a full disk take over what runs, and can end it", async () => {
  const [one, two] = [await create(), await create()];
  const facts = await sh(one, "head -c 2000000 /dev/urandom > ~/data; sync; sha256sum ~/data");
  await node.closeLife();
  disk.fill();
  await node.stopChild("blockd", "SIGKILL");
  await node.startChild("blockd");
  engine = await node.open(config);
  assert.equal(engine.get(one).state, "running");
  await sh(one, "echo 3 > /proc/sys/vm/drop_caches", "root");
  assert.equal(await sh(one, "sha256sum ~/data"), facts);
  for (const id of [one, two]) assert.equal(await engine.kill(id), true);
  await released();
  disk.empty();
  const next = await create();
  await engine.kill(next);
  await released();
});

test("a VMM that ends because its memory file cannot grow is told with that cause", async () => {
  const id = await create();
  await engine.pause(id, { memory: false }, signal);
  await engine.connect(id, HOUR, signal);
  disk.fill();
  await sh(id, "head -c 150000000 /dev/zero | tr '\\0' x > /dev/shm/fill").catch(() => {});
  await until(() => engine.route(id) === undefined, "its VM ends");
  assert.throws(() => engine.get(id), /disk-full/);
  assert.match(JSON.stringify(engine.logs(id)), /disk is full/);
  await released();
  disk.empty();
});

test("at the end nothing is left but the template", async () => {
  const { snapshots, memory, layers } = await node.artifacts();
  assert.deepEqual([snapshots, memory, layers], [1, 1, 2]);
  const leftovers = await node.leftovers();
  assert.deepEqual(Object.values(leftovers).flat(), []);
});
