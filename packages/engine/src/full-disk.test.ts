/** A disk that takes no more: what ends, ends; what runs, goes on; what is new is refused. */
import assert from "node:assert/strict";
import { test } from "node:test";
import { AenvError, mib, type SandboxId } from "@aenv/base";
import { type Life, until, World } from "./testing.ts";

const signal = new AbortController().signal;
const SQLITE_FULL = 13;

async function up(): Promise<{ world: World; life: Life; idle: Record<string, string[]> }> {
  const world = await World.make();
  const life = await world.start();
  await world.addTemplate(life, "base");
  return { world, life, idle: await world.inventory() };
}

const create = (life: Life, autoPause = false) =>
  life.engine.create({ template: "base", timeoutMs: 60_000, autoPause }, signal);

const isFull = (e: unknown): boolean =>
  e instanceof AenvError && e.code === "NO_SPACE" && /AENV_DISK_RESERVE|Free disk/.test(e.hint);

/** Ways in which a sandbox ends. */
const ENDS: Record<string, (world: World, life: Life, id: SandboxId) => Promise<unknown>> = {
  kill: (_world, life, id) => life.engine.kill(id),
  "its time is over": async (world) => world.clock.advance(61_000),
  "its time is set to nothing": (_world, life, id) => life.engine.setTimeout(id, 0),
  "its time is made shorter": async (world, life, id) => {
    await life.engine.setTimeout(id, 1000);
    world.clock.advance(1001);
  },
  "its VM dies": (_world, life, id) => life.driver.crash(life.engine.route(id)?.run ?? "", "disk-full"),
};

for (const [what, end] of Object.entries(ENDS))
  test(`a sandbox ends and all of it is freed though nothing can be recorded: ${what}`, async () => {
    const { world, life, idle } = await up();
    await using _world = world;
    const { sandboxId } = await create(life);
    const run = life.engine.route(sandboxId)?.run;
    const ended: unknown[] = [];
    life.engine.onRunEnded((r) => ended.push(r));
    world.storeFails = SQLITE_FULL;
    await end(world, life, sandboxId);
    await until(() => life.engine.resources().length === 0, "everything is freed");
    assert.deepEqual(await world.inventory(), idle);
    assert.deepEqual(ended, [run]);
    assert.equal(life.engine.route(sandboxId), undefined);
    assert.equal(life.state.sandboxes.get(sandboxId)?.state, "running", "the record is still the old one");
    world.storeFails = 0;
    world.clock.advance(60_000);
    assert.equal(life.state.sandboxes.get(sandboxId)?.state, "gone");
    assert.deepEqual(life.state.runs.list(), []);
    assert.deepEqual(life.state.resources.list(), []);
    assert.throws(() => life.engine.get(sandboxId), /killed|expired|disk-full/);
    const events = life.engine.logs(sandboxId).map((l) => l.message);
    assert.match(events.at(-1) ?? "", /sandbox ended/);
  });

test("a server that dies before an end could be recorded leaves nothing: the next one sees that the VM is gone", async () => {
  const { world, life, idle } = await up();
  await using _world = world;
  const [one, two] = [await create(life), await create(life)];
  world.storeFails = SQLITE_FULL;
  await life.engine.kill(one.sandboxId);
  await until(() => life.engine.resources().length > 0 && world.vmms.alive.length === 1, "one is gone");
  await life.crash();
  // It is still full.
  const next = await world.start();
  assert.equal(next.engine.get(two.sandboxId).state, "running");
  assert.equal(next.engine.route(one.sandboxId), undefined);
  await next.engine.kill(two.sandboxId);
  await until(() => next.engine.resources().length === 0, "everything is freed");
  assert.deepEqual(await world.inventory(), idle);
  world.storeFails = 0;
  world.clock.advance(60_000);
  assert.deepEqual(next.state.sandboxes.live(), []);
  assert.deepEqual(next.state.runs.list(), []);
});

test("an end that fails is tried again", async () => {
  const { world, life } = await up();
  await using _world = world;
  const { sandboxId } = await create(life, true);
  world.storeFails = SQLITE_FULL;
  world.clock.advance(61_000);
  await new Promise((resolve) => setImmediate(resolve));
  await until(() => life.engine.get(sandboxId).state === "running", "it goes on when it cannot be paused");
  world.storeFails = 0;
  await until(() => {
    world.clock.advance(1000);
    return life.engine.count().paused === 1;
  }, "it is paused once it can be");
  assert.equal(life.state.sandboxes.get(sandboxId)?.state, "paused");
});

test("below the reserve nothing new is made; what runs can be ended, paused and resumed", async () => {
  const { world, life } = await up();
  await using _world = world;
  const { sandboxId } = await create(life);
  const before = await world.inventory();
  world.freeBytes = mib(100);
  const refused: Record<string, () => Promise<unknown>> = {
    create: () => create(life),
    fork: () => life.engine.fork(sandboxId, { count: 1, timeoutMs: 1000 }, signal),
    snapshot: () => life.engine.snapshot(sandboxId, {}, signal),
    build: () => world.addTemplate(life, "other"),
  };
  for (const [what, ask] of Object.entries(refused)) await assert.rejects(ask(), isFull, what);
  assert.deepEqual(await world.inventory(), before);
  assert.equal(life.engine.get(sandboxId).state, "running");
  assert.equal(await life.engine.pause(sandboxId, {}, signal), true);
  assert.equal((await life.engine.connect(sandboxId, 60_000, signal)).resumed, true);
  assert.equal(await life.engine.kill(sandboxId), true);
  world.freeBytes = mib(1000);
  assert.equal((await create(life)).state, "running");
});

test("spares are not made below the reserve", async () => {
  await using world = await World.make();
  const watermarks = { hot: { low: 1, high: 1 }, prepared: { low: 0, high: 0 } };
  const life = await world.start({ config: { pool: { pinned: ["base"], watermarks, perTemplate: {} } } });
  world.freeBytes = 0;
  world.freeBytes = mib(10_000);
  await world.addTemplate(life, "base");
  await until(() => life.engine.pools()[0]?.hot === 1, "a spare is there");
  world.freeBytes = mib(1);
  await life.driver.crash(world.vmms.alive[0] ?? "", "killed");
  await until(() => life.engine.pools()[0]?.hot === 0, "it is gone");
  for (let i = 0; i < 10; i++) {
    world.clock.advance(1000);
    await new Promise((resolve) => setImmediate(resolve));
  }
  assert.equal(life.engine.pools()[0]?.refilling, 0);
  world.freeBytes = mib(10_000);
  await until(() => {
    world.clock.advance(1000);
    return life.engine.pools()[0]?.hot === 1;
  }, "another one is made");
});

for (const op of ["pause", "snapshot", "fork"] as const)
  test(`a ${op} that the disk does not take leaves the sandbox running, and the next one is complete`, async () => {
    const { world, life } = await up();
    await using _world = world;
    const { sandboxId } = await create(life);
    const run = life.engine.route(sandboxId)?.run;
    const ask = (): Promise<unknown> =>
      op === "pause"
        ? life.engine.pause(sandboxId, {}, signal)
        : op === "snapshot"
          ? life.engine.snapshot(sandboxId, {}, signal)
          : life.engine.fork(sandboxId, { count: 1, timeoutMs: 60_000 }, signal);
    const before = await world.inventory();
    world.sealFails = 1;
    await assert.rejects(ask(), isFull);
    assert.deepEqual(await world.inventory(), before);
    world.storeFails = SQLITE_FULL;
    await assert.rejects(ask(), isFull);
    world.storeFails = 0;
    assert.equal(life.engine.get(sandboxId).state, "running");
    assert.equal(life.engine.route(sandboxId)?.run, run);
    await ask();
    if (op === "pause") await life.engine.connect(sandboxId, 60_000, signal);
    assert.equal(life.engine.get(sandboxId).state, "running");
    const known = new Set(life.state.layers.list().map((l) => l.id));
    for (const s of life.state.snapshots.list()) for (const l of s.layers) assert.ok(known.has(l.id));
  });
