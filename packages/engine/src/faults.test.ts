/** Every step of a create and of a build fails once, and the server dies once at every step: nothing is ever left. */
import assert from "node:assert/strict";
import { writeFile } from "node:fs/promises";
import { join } from "node:path";
import { test } from "node:test";
import { mib } from "@aenv/base";
import { type Life, MACHINE, until, World } from "./testing.ts";

const signal = new AbortController().signal;
const MAKE = [
  "slot:before",
  "slot:after",
  "dirs:before",
  "dirs:after",
  "disk:before",
  "disk:after",
  "cgroup:before",
  "cgroup:after",
];
const INIT = ["init:before", "init:after"];
const CAPTURE = [
  "capture:before",
  "stop:before",
  "device:before",
  "memory:before",
  "seal:before",
  "seal:after",
  "memory-file:before",
  "manifest:after",
];
const CREATE_STEPS = [
  ...MAKE,
  "prepare:before",
  "prepare:after",
  "inject:after",
  "load:before",
  "resume:before",
  "resume:after",
  "assign:after",
  ...INIT,
  "commit:before",
];
const BUILD_STEPS = [...MAKE, "boot:before", "boot:after", ...INIT, ...CAPTURE];

class Fault {
  at: string | undefined;
  kind: "fail" | "park" = "fail";
  readonly seen: string[] = [];
  readonly reached = Promise.withResolvers<void>();

  readonly step = (name: string): Promise<void> | void => {
    this.seen.push(name);
    if (name !== this.at) return;
    this.reached.resolve();
    if (this.kind === "park") return new Promise(() => {});
    throw new Error(`fault at ${name}`);
  };
}

async function up(world: World): Promise<{ life: Life; fault: Fault }> {
  const fault = new Fault();
  const life = await world.start({ onStep: fault.step });
  await world.addTemplate(life, "base");
  fault.seen.length = 0;
  return { life, fault };
}

const create = (life: Life) => life.engine.create({ template: "base", timeoutMs: 60_000 }, signal);

async function rebuild(world: World, life: Life): Promise<unknown> {
  const path = join(world.home, "layers", "base-again");
  await writeFile(path, "layer");
  const known = life.state.layers.list()[0];
  assert.ok(known);
  return await life.engine.buildTemplate(
    { name: "other", baseLayer: known, sizeBytes: mib(64), machine: MACHINE },
    signal,
  );
}

test("the lists of steps are complete", async () => {
  await using world = await World.make();
  const { life, fault } = await up(world);
  await create(life);
  assert.deepEqual([...new Set(fault.seen)].sort(), [...CREATE_STEPS].sort());
  fault.seen.length = 0;
  await rebuild(world, life);
  assert.deepEqual([...new Set(fault.seen)].sort(), [...BUILD_STEPS].sort());
});

for (const at of CREATE_STEPS)
  test(`a create that fails at ${at} leaves nothing, and the next one works`, async () => {
    await using world = await World.make();
    const { life, fault } = await up(world);
    const before = await world.inventory();
    fault.at = at;
    await assert.rejects(create(life), /fault at/);
    assert.deepEqual(await world.inventory(), before);
    assert.deepEqual(life.state.resources.list(), []);
    assert.deepEqual(life.state.runs.list(), []);
    assert.deepEqual(life.state.sandboxes.live(), []);
    fault.at = undefined;
    assert.equal((await create(life)).state, "running");
  });

for (const at of CREATE_STEPS)
  test(`a server that dies at ${at} of a create frees all of it at its next start; the other sandbox runs on`, async () => {
    await using world = await World.make();
    const { life, fault } = await up(world);
    const other = await create(life);
    const route = life.engine.route(other.sandboxId);
    const before = await world.inventory();
    fault.at = at;
    fault.kind = "park";
    void create(life);
    await fault.reached.promise;
    // What runs beside the parked step has come to rest.
    await new Promise((resolve) => setTimeout(resolve, 5));
    await life.crash();

    const next = await world.start();
    assert.deepEqual(await world.inventory(), before);
    assert.deepEqual(next.engine.get(other.sandboxId), other);
    assert.deepEqual(next.engine.route(other.sandboxId), route);
    assert.deepEqual(new Set(next.state.resources.list().map((r) => r.run)), new Set([route?.run]));
    assert.equal(next.engine.list().items.length, 1);
    assert.equal((await create(next)).state, "running");
    assert.equal(await next.engine.kill(other.sandboxId), true);
  });

for (const at of BUILD_STEPS)
  test(`a build that fails at ${at} leaves nothing`, async () => {
    await using world = await World.make();
    const { life, fault } = await up(world);
    const before = await world.inventory();
    fault.at = at;
    await assert.rejects(rebuild(world, life), /fault at/);
    before["layers"]?.push("base-again");
    before["layers"]?.sort();
    assert.deepEqual(await world.inventory(), before);
    assert.deepEqual(life.state.resources.list(), []);
    assert.deepEqual(life.state.runs.list(), []);
    assert.equal(life.engine.templates.exists("other"), false);
  });

for (const at of BUILD_STEPS)
  test(`a server that dies at ${at} of a build sweeps it at its next start`, async () => {
    await using world = await World.make();
    const { life, fault } = await up(world);
    const before = await world.inventory();
    fault.at = at;
    fault.kind = "park";
    void rebuild(world, life);
    await fault.reached.promise;
    await new Promise((resolve) => setTimeout(resolve, 5));
    await life.crash();
    const next = await world.start();
    before["layers"]?.push("base-again");
    before["layers"]?.sort();
    assert.deepEqual(await world.inventory(), before);
    assert.deepEqual(next.state.resources.list(), []);
    assert.equal(next.engine.templates.exists("other"), false);
    assert.equal(next.engine.templates.exists("base"), true);
    assert.equal((await create(next)).state, "running");
  });

test("a capture that fails while the guest stands still lets it go on", async () => {
  await using world = await World.make();
  const { life, fault } = await up(world);
  fault.at = "seal:before";
  const alive: boolean[] = [];
  life.driver.knobs.hook = async (op) => void alive.push(op === "resume");
  await assert.rejects(rebuild(world, life));
  assert.equal(alive.filter(Boolean).length, 1, "it was resumed before the build was given up");
});

test("a sandbox whose VM died while the server was away is over, with the cause", async () => {
  await using world = await World.make();
  const { life } = await up(world);
  const [one, two] = [await create(life), await create(life)];
  const run = life.engine.route(one.sandboxId)?.run ?? "";
  await life.crash();
  await life.driver.crash(run, "out-of-memory");
  const next = await world.start();
  assert.throws(() => next.engine.get(one.sandboxId), /out-of-memory/);
  assert.equal(next.engine.get(two.sandboxId).state, "running");
  assert.equal((await world.inventory())["vmms"]?.length, 1);
  assert.equal((await world.inventory())["slots"]?.length, 1);
});

test("a sandbox whose disk blockd has lost is over, and its VM with it", async () => {
  await using world = await World.make();
  const { life } = await up(world);
  const one = await create(life);
  await life.crash();
  world.disks.clear();
  const next = await world.start();
  assert.throws(() => next.engine.get(one.sandboxId), /does not know its disk/);
  assert.deepEqual((await world.inventory())["vmms"], []);
});

test("a sandbox whose time was over while the server was away ends at once; another keeps its end", async () => {
  await using world = await World.make();
  const { life } = await up(world);
  const short = await life.engine.create({ template: "base", timeoutMs: 1000 }, signal);
  const long = await create(life);
  await life.crash();
  world.clock.advance(2000);
  const next = await world.start();
  world.clock.advance(0);
  await until(() => next.engine.route(short.sandboxId) === undefined, "it expires");
  assert.equal(next.engine.get(long.sandboxId).endAt, long.endAt);
});

test("a capture that the server did not live to finish is undone: the guest goes on", async () => {
  await using world = await World.make();
  const { life } = await up(world);
  const { sandboxId } = await create(life);
  const run = life.engine.route(sandboxId)?.run;
  life.state.sandboxes.setState(sandboxId, "pausing", run);
  const [vm] = life.state.runs.list();
  await (await life.driver.adopt(vm?.handle as never, signal)).stop(signal);
  await life.crash();
  const next = await world.start();
  assert.equal(next.engine.get(sandboxId).state, "running");
  assert.equal(next.state.sandboxes.get(sandboxId)?.state, "running");
  assert.equal(next.engine.route(sandboxId)?.run, run);
  const again = await next.driver.adopt(next.state.runs.list()[0]?.handle as never, signal);
  assert.equal(await again.status(signal), "running");
});

test("a kill that the server did not live to finish is finished by the next start", async () => {
  await using world = await World.make();
  const { life } = await up(world);
  const before = await world.inventory();
  const { sandboxId } = await create(life);
  life.state.sandboxes.setState(sandboxId, "killing", life.engine.route(sandboxId)?.run);
  await life.crash();
  const next = await world.start();
  assert.throws(() => next.engine.get(sandboxId), /killed/);
  assert.deepEqual(await world.inventory(), before);
});

test("a release that fails is tried again, and until then nobody gets the slot", async () => {
  await using world = await World.make();
  const { life } = await up(world);
  const { sandboxId } = await create(life);
  const attempts = 12;
  world.closeDiskFails = attempts;
  assert.equal(await life.engine.kill(sandboxId), true);
  await until(() => world.closeDiskFails === attempts - 1, "the first attempt was made");
  await until(() => {
    world.clock.advance(1000);
    return world.closeDiskFails === 0;
  }, "a blockd that is away for minutes does not cost the slot");
  assert.equal(life.engine.resources().length > 0, true, "doctor still sees who owns it");
  await until(() => {
    world.clock.advance(100);
    return life.engine.resources().length === 0;
  }, "the retry has freed it");
  assert.deepEqual(life.state.runs.list(), []);
});

test("an import of a layer that is cut off leaves nothing, whoever dies", async () => {
  await using world = await World.make();
  const { life } = await up(world);
  const before = await world.inventory();
  const raw = join(world.home, "other.raw");
  await writeFile(raw, "image");
  world.importFails = 1;
  await assert.rejects(life.engine.importLayer(raw, signal), /full/);
  await until(async () => (await world.inventory())["layers"]?.length === before["layers"]?.length, "it is collected");
  world.importFails = 1;
  world.importParks = true;
  void life.engine.importLayer(raw, signal);
  await until(() => world.importFails === 0, "a part is written");
  assert.notDeepEqual(await world.inventory(), before);
  await life.crash();
  const next = await world.start();
  assert.deepEqual(await world.inventory(), before);
  assert.equal((await create(next)).state, "running");
});
