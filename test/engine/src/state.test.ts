/** Pause, resume, snapshot and fork on real parts: what is in the guest goes on, exactly. */
import assert from "node:assert/strict";
import { copyFile, readFile, rename, rm, stat, truncate, writeFile } from "node:fs/promises";
import { after, before, test } from "node:test";
import { AenvError, type SandboxId } from "@aenv/base";
import type { Engine, SandboxView } from "@aenv/engine";
import { CONFIG, HOUR, sh as run, TestNode } from "./node.ts";

const signal = new AbortController().signal;

let node: TestNode;
let engine: Engine;
before(async () => {
  node = await TestNode.make();
  engine = await node.open(CONFIG);
  await node.buildTemplate("base", await node.baseLayer());
});
after(() => node[Symbol.asyncDispose]());

const create = (template = "base"): Promise<SandboxView> => engine.create({ template, timeoutMs: HOUR }, signal);

const sh = (id: SandboxId, script: string, user?: string): Promise<string> => run(engine, id, script, user);

/** A process that counts, with an open file and data in memory; prints the checksums of both. */
const START = `
  head -c 8000000 /dev/urandom > /dev/shm/data; head -c 3000000 /dev/urandom > ~/data
  (exec 3>~/open; while :; do echo tick >&3; sleep 0.05; done) >/dev/null 2>&1 & echo $! > ~/pid
  sha256sum /dev/shm/data ~/data; cat /proc/sys/kernel/random/boot_id`;
const CHECK = "sha256sum /dev/shm/data ~/data; cat /proc/sys/kernel/random/boot_id";
const ALIVE =
  "kill -0 $(cat ~/pid); a=$(wc -l < ~/open); while [ $(wc -l < ~/open) = $a ]; do sleep 0.05; done; echo on";

test("a sandbox is paused and resumed again and again: same id, processes, files and memory", async () => {
  const { sandboxId, envdAccessToken } = await create();
  const facts = await sh(sandboxId, START);
  for (let cycle = 0; cycle < 4; cycle++) {
    assert.equal(await engine.pause(sandboxId, {}, signal), true);
    assert.equal(engine.get(sandboxId).state, "paused");
    assert.equal(engine.route(sandboxId), undefined);
    const { view, resumed } = await engine.connect(sandboxId, HOUR, signal);
    assert.equal(resumed, true);
    assert.equal(view.envdAccessToken, envdAccessToken);
    assert.equal(await sh(sandboxId, CHECK), facts);
    assert.equal(await sh(sandboxId, ALIVE), "on");
    await sh(sandboxId, "echo 3 > /proc/sys/vm/drop_caches", "root");
    assert.equal(await sh(sandboxId, CHECK), facts);
    const clock = Number(await sh(sandboxId, "date +%s"));
    assert.ok(Math.abs(clock - Date.now() / 1000) < 5, "the guest's clock is right");
  }
  await engine.kill(sandboxId);
});

test("children of a fork and sandboxes of a snapshot have the source's memory and files, and are machines of their own", async () => {
  const { sandboxId } = await create();
  const facts = await sh(sandboxId, START);
  const results = await engine.fork(sandboxId, { count: 3, timeoutMs: HOUR }, signal);
  const children = results.map((r) => {
    assert.ok("view" in r, "error" in r ? String(r.error) : "");
    return r.view.sandboxId;
  });
  const saved = await engine.snapshot(sandboxId, { name: "work:v1" }, signal);
  const made = await create("work:v1");
  assert.equal(saved.names[0], "default/work:v1");
  const all = [sandboxId, ...children, made.sandboxId];
  const own = await Promise.all(
    all.map(async (id) => {
      assert.equal(await sh(id, CHECK), facts);
      assert.equal(await sh(id, ALIVE), "on");
      assert.equal(await sh(id, "hostname"), id);
      await sh(id, `echo ${id} > ~/mine; sync`);
      return await sh(id, "cat /etc/machine-id; head -c 16 /dev/urandom | base64; cat ~/mine");
    }),
  );
  assert.equal(new Set(own.flatMap((o) => o.split("\n"))).size, 3 * all.length, "nothing is drawn twice");
  for (const id of all) await engine.kill(id);
  assert.equal(await engine.deleteSnapshot("work:v1"), true);
});

test("a pause without memory keeps the files and boots again", async () => {
  const { sandboxId } = await create();
  const [, disk, boot] = (await sh(sandboxId, START)).split("\n");
  assert.equal(await engine.pause(sandboxId, { memory: false }, signal), true);
  assert.equal((await engine.connect(sandboxId, HOUR, signal)).resumed, true);
  assert.equal(await sh(sandboxId, "sha256sum ~/data"), disk);
  assert.notEqual(await sh(sandboxId, "cat /proc/sys/kernel/random/boot_id"), boot);
  // A machine that was booted, not launched, is captured like any other.
  const facts = await sh(sandboxId, START);
  for (let cycle = 0; cycle < 2; cycle++) {
    assert.equal(await engine.pause(sandboxId, {}, signal), true);
    assert.equal((await engine.connect(sandboxId, HOUR, signal)).resumed, true);
    assert.equal(await sh(sandboxId, CHECK), facts);
    assert.equal(await sh(sandboxId, ALIVE), "on");
  }
  await engine.kill(sandboxId);
});

test("a sandbox returns to its checkpoints in place: memory, processes and files, also from its next life", async () => {
  const { sandboxId, envdAccessToken } = await create();
  const facts = await sh(sandboxId, START);
  await engine.checkpoint(sandboxId, { name: "first" }, signal);
  const second = await sh(
    sandboxId,
    `rm ~/data; echo more > ~/more; head -c 5000000 /dev/urandom > /dev/shm/data; sync
    sha256sum /dev/shm/data ~/more`,
  );
  await engine.checkpoint(sandboxId, { name: "second" }, signal);
  const kept = async (): Promise<void> => {
    assert.equal(await sh(sandboxId, "sha256sum /dev/shm/data ~/more; test ! -e ~/data"), second);
    assert.equal(await sh(sandboxId, ALIVE), "on");
  };
  await sh(sandboxId, "rm ~/more; kill $(cat ~/pid); echo lost > ~/lost; sync");
  await engine.rewind(sandboxId, "second", {}, signal);
  await kept();
  const view = await engine.rewind(sandboxId, "first", {}, signal);
  assert.equal(view.envdAccessToken, envdAccessToken);
  assert.equal(await sh(sandboxId, CHECK), facts);
  assert.equal(await sh(sandboxId, "ls ~/more ~/lost 2>/dev/null | wc -l"), "0");
  assert.equal(await sh(sandboxId, ALIVE), "on");
  await sh(sandboxId, "echo 3 > /proc/sys/vm/drop_caches", "root");
  assert.equal(await sh(sandboxId, CHECK), facts);
  const clock = Number(await sh(sandboxId, "date +%s"));
  assert.ok(Math.abs(clock - Date.now() / 1000) < 5, "the guest's clock is right");
  await engine.pause(sandboxId, {}, signal);
  await engine.rewind(sandboxId, "second", { timeoutMs: HOUR }, signal);
  await kept();
  const { nodes } = await engine.lineage(sandboxId);
  assert.deepEqual(
    nodes.flatMap((n) => n.names),
    ["base", "first", "second"],
  );
  await engine.kill(sandboxId);
});

test("a state with a damaged file is refused with the file's name and what to do, and resumes when it is whole again", async () => {
  const { sandboxId } = await create();
  const facts = await sh(sandboxId, START);
  await engine.pause(sandboxId, {}, signal);
  const { snapshotId } = await engine.lineage(sandboxId);
  const snapshot = node.life.state.snapshots.get(snapshotId);
  const [flat, delta] = [snapshot?.memory[0]?.path, snapshot?.memory.at(-1)?.path];
  const layer = snapshot?.layers.at(-1)?.path;
  assert.ok(snapshot && flat !== undefined && delta !== undefined && layer !== undefined && delta !== flat);
  const flip = (at: (size: number) => number) => async (path: string) => {
    const bytes = await readFile(path);
    bytes.writeUInt8(bytes.readUInt8(at(bytes.length)) ^ 0x40, at(bytes.length));
    await writeFile(path, bytes);
  };
  const cut = async (path: string): Promise<void> => truncate(path, Math.floor((await stat(path)).size / 2));
  const damage: [path: string, hurt: (path: string) => Promise<void>][] = [
    [delta, flip((size) => Math.floor(size / 2))],
    [delta, flip((size) => size - 50)],
    [delta, cut],
    [delta, (path) => truncate(path, 0)],
    [delta, (path) => rm(path)],
    [snapshot.devicePath, flip((size) => Math.floor(size / 2))],
    [snapshot.devicePath, cut],
    [snapshot.devicePath, (path) => rm(path)],
    [layer, flip(() => 20)],
    [layer, cut],
    [layer, (path) => rm(path)],
    [flat, cut],
    [flat, (path) => rm(path)],
  ];
  for (const [path, hurt] of damage) {
    const kept = `${path}.kept`;
    await rename(path, kept);
    await copyFile(kept, path);
    await hurt(path);
    await assert.rejects(engine.connect(sandboxId, HOUR, signal), (e) => {
      assert.ok(e instanceof AenvError && e.code === "CORRUPT", String(e));
      assert.ok(e.message.includes(path), e.message);
      assert.ok(e.hint.length > 0);
      return true;
    });
    assert.equal(engine.get(sandboxId).state, "paused");
    await rename(kept, path);
  }
  await engine.connect(sandboxId, HOUR, signal);
  assert.equal(await sh(sandboxId, CHECK), facts);
  assert.equal(await sh(sandboxId, ALIVE), "on");
  await engine.kill(sandboxId);
});

test("at the end nothing is left but the template", async () => {
  const end = performance.now() + 60_000;
  const left = async () => {
    const { snapshots, memory, layers } = await node.artifacts();
    const owned = engine.resources().map((r) => r.name);
    // The template's own: its state, its memory, and its disk on the base layer.
    return { ...(await node.leftovers()), owned, artifacts: [snapshots - 1, memory - 1, layers - 2] };
  };
  const nothing = (all: object): boolean => Object.values(all).every((v: unknown[]) => v.every((n) => n === 0));
  while (!nothing(await left()) && performance.now() < end) await new Promise((resolve) => setTimeout(resolve, 20));
  assert.ok(nothing(await left()), JSON.stringify(await left()));
});
