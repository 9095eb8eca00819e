import assert from "node:assert/strict";
import { test } from "node:test";
import { AenvError, bytes, mib } from "@aenv/base";
import type { EngineConfigInput } from "./config.ts";
import { type Life, type StartOptions, until, World } from "./testing.ts";

const signal = new AbortController().signal;
const marks = (hot: number, prepared: number, high = 4) => ({
  hot: { low: hot, high: Math.max(hot, high) },
  prepared: { low: prepared, high: Math.max(prepared, high) },
});
const pool = (over: EngineConfigInput["pool"] = {}): StartOptions => ({
  config: { pool: { pinned: ["base"], watermarks: marks(2, 1), perTemplate: {}, refillConcurrency: 1, ...over } },
});

const create = (life: Life, template = "base") => life.engine.create({ template, timeoutMs: 60_000 }, signal);
const status = (life: Life, template = "base") => life.engine.pools().find((p) => p.template === template);
const full = (life: Life) =>
  until(() => {
    const p = status(life);
    return p?.refilling === 0 && p.hot === p.wantHot && p.prepared === p.wantPrepared;
  }, "the pool is full");

/** Lets time pass until it is so. */
const pass = (world: World, condition: () => boolean, what: string) =>
  until(() => {
    world.clock.advance(500);
    return condition();
  }, what);

async function up(world: World, options: StartOptions = pool()): Promise<Life> {
  const life = await world.start(options);
  await world.addTemplate(life, "base");
  return life;
}

test("a pinned template is warm after its build and after a restart; spares are owned and end with the server", async () => {
  await using world = await World.make();
  const life = await up(world);
  await full(life);
  assert.equal(world.vmms.alive.length, 3);
  assert.equal(new Set(life.engine.resources().map((r) => r.run)).size, 3);
  assert.ok(life.engine.resources().every((r) => r.owner.kind === "spare"));
  await life.end();
  assert.deepEqual(world.vmms.alive, []);
  assert.deepEqual((await world.inventory())["slots"], []);
  const next = await world.start(pool());
  await full(next);
});

test("a create takes a hot spare first, then a waiting VMM, then makes one; and the pool fills up again", async () => {
  await using world = await World.make();
  const life = await up(world, pool({ watermarks: marks(1, 1, 1) }));
  await full(life);
  const hotInits = world.inits.length;
  // All three at once: no refill comes in between.
  const views = await Promise.all([create(life), create(life), create(life)]);
  const sources = views.map((v) => life.engine.timing(v.sandboxId)?.source ?? "").sort();
  assert.deepEqual(sources, ["cold", "hot", "prepared"]);
  assert.equal(world.inits.length, hotInits + 3);
  assert.equal(new Set(views.map((v) => life.engine.route(v.sandboxId)?.run)).size, 3);
  const hot = views.find((v) => life.engine.timing(v.sandboxId)?.source === "hot");
  assert.deepEqual(Object.keys(life.engine.timing(hot?.sandboxId as never)?.phases ?? {}), ["init"]);
  await full(life);
});

test("a pool that was empty grows, to its high mark at most, and shrinks when nobody comes", async () => {
  await using world = await World.make();
  const life = await up(world, pool({ watermarks: marks(1, 0, 3), idleMs: 60_000 }));
  await full(life);
  await Promise.all(Array.from({ length: 8 }, () => create(life)));
  await full(life);
  assert.equal(status(life)?.hot, 3);
  await pass(world, () => status(life)?.hot === 1, "it is back at its low mark");
  await world.addTemplate(life, "other");
  await create(life, "other");
  await until(() => status(life, "other")?.hot === 1, "a template that is used gets spares");
  await pass(world, () => status(life, "other") === undefined, "a template that nobody uses has none");
});

test("spares stay inside the memory budget", async () => {
  await using world = await World.make();
  const life = await up(
    world,
    pool({
      hotCostBytes: mib(100),
      preparedCostBytes: mib(10),
      memoryBudgetBytes: bytes(215 * 1024 * 1024),
      watermarks: marks(5, 5),
    }),
  );
  await until(() => status(life)?.refilling === 0 && status(life)?.prepared === 1, "the budget is used");
  assert.equal(status(life)?.hot, 2);
});

test("a restart of blockd ends the waiting VMMs, not the running spares and sandboxes", async () => {
  await using world = await World.make();
  const life = await up(world);
  await full(life);
  const box = await create(life);
  await full(life);
  const before = new Map(
    life.engine
      .resources()
      .filter((r) => r.kind === "process")
      .map((r) => [r.run, r]),
  );
  world.epoch = "e2";
  world.clock.advance(1000);
  await until(() => [...before.keys()].some((run) => !world.vmms.alive.includes(run)), "it is noticed");
  await full(life);
  const gone = [...before.keys()].filter((run) => !world.vmms.alive.includes(run));
  assert.equal(gone.length, 1);
  assert.equal(life.engine.get(box.sandboxId).state, "running");
});

test("a waiting VMM of the blockd before is not handed out though nobody has noticed yet", async () => {
  await using world = await World.make();
  const life = await up(world, pool({ watermarks: marks(0, 1, 1) }));
  await full(life);
  world.epoch = "e2";
  const view = await create(life);
  assert.equal(life.engine.timing(view.sandboxId)?.source, "cold");
});

test("a hot spare that has died or does not answer is replaced; the caller gets another VM", async () => {
  await using world = await World.make();
  const life = await up(world, { config: { ...pool({ watermarks: marks(1, 0, 1) }).config, hotInitDeadlineMs: 20 } });
  await full(life);
  const spare = world.vmms.alive[0] ?? "";
  await life.driver.crash(spare);
  await until(() => world.vmms.alive.some((r) => r !== spare), "another is made");
  await full(life);
  const second = world.vmms.alive[0] ?? "";
  world.deaf.add(second);
  const view = await create(life);
  assert.equal(life.engine.timing(view.sandboxId)?.source, "cold");
  await until(() => !world.vmms.alive.includes(second), "the deaf one has ended");
  await full(life);
  const third = world.vmms.alive.find((r) => r !== life.engine.route(view.sandboxId)?.run) ?? "";
  world.deaf.add(third);
  await pass(world, () => !world.vmms.alive.includes(third), "the health check finds it");
});

test("a waiting VMM that fails to load is replaced by a new one within the same create", async () => {
  await using world = await World.make();
  const life = await up(world, pool({ watermarks: marks(0, 1, 1) }));
  await full(life);
  life.driver.knobs.failures.load = [new AenvError("VMM_FAILED", "lost its disk")];
  const view = await create(life);
  assert.equal(life.engine.timing(view.sandboxId)?.source, "cold");
  await full(life);
  assert.deepEqual(
    life.engine.resources().flatMap((r) => (r.kind === "process" && r.owner.kind === "sandbox" ? [r.owner.id] : [])),
    [view.sandboxId],
  );
});

test("a template that cannot be launched is tried ever more rarely", async () => {
  await using world = await World.make();
  const life = await world.start(pool({ watermarks: marks(1, 0) }));
  let tries = 0;
  life.driver.knobs.hook = async (op) => {
    if (op !== "prepare") return;
    tries++;
    throw new AenvError("VMM_FAILED", "no");
  };
  await world.addTemplate(life, "base");
  await until(() => tries === 1 && status(life)?.refilling === 0, "the first try");
  world.clock.advance(999);
  assert.equal(tries, 1);
  world.clock.advance(1);
  await until(() => tries === 2 && status(life)?.refilling === 0, "the second try");
  world.clock.advance(1000);
  await until(() => status(life)?.refilling === 0, "nothing runs");
  assert.equal(tries, 2);
  world.clock.advance(1000);
  await until(() => tries === 3, "the third try");
});

test("spares give their slots to a caller when there are no others", async () => {
  await using world = await World.make();
  const life = await up(world, pool({ watermarks: marks(2, 0, 2) }));
  await full(life);
  world.slotLimit = 3;
  await world.addTemplate(life, "other");
  for (let n = 0; n < 2; n++) await create(life, "other");
  assert.equal(life.engine.list({ template: "other" }).items.length, 2);
});

test("a deleted template loses its spares at once, also those that are being made", async () => {
  await using world = await World.make();
  const life = await up(world);
  await until(() => world.vmms.alive.length > 0, "one is being made");
  await life.engine.templates.delete("base");
  await until(() => life.engine.resources().length === 0, "all spares are gone");
  assert.deepEqual(world.vmms.alive, []);
  assert.deepEqual(life.engine.pools(), []);
});

test("refills wait while a caller waits", async () => {
  await using world = await World.make();
  const parked = Promise.withResolvers<void>();
  const go = Promise.withResolvers<void>();
  let armed = false;
  const life = await up(world, {
    ...pool({ watermarks: marks(0, 0, 2) }),
    onStep: async (name) => {
      if (!armed || name !== "init:before") return;
      armed = false;
      parked.resolve();
      await go.promise;
    },
  });
  armed = true;
  const create1 = create(life);
  await parked.promise;
  life.engine.pools();
  const runs = world.vmms.alive.length;
  for (let turn = 0; turn < 50; turn++) await new Promise((resolve) => setImmediate(resolve));
  assert.equal(world.vmms.alive.length, runs, "nothing was started meanwhile");
  go.resolve();
  await create1;
  await full(life);
  assert.ok(world.vmms.alive.length > runs);
});

test("a waiting VMM of a template serves resumes, forks and snapshots of its sandboxes: their memory and layers, under their name", async () => {
  await using world = await World.make();
  const life = await up(world, pool({ watermarks: marks(0, 2, 2) }));
  await full(life);
  const box = await create(life);
  await full(life);
  await life.engine.pause(box.sandboxId, {}, signal);
  const paused = life.state.sandboxes.get(box.sandboxId)?.snapshot;
  const waiting = new Set(world.vmms.alive);
  await life.engine.connect(box.sandboxId, 60_000, signal);
  const run = life.engine.route(box.sandboxId)?.run ?? "";
  assert.ok(waiting.has(run), "it was a waiting one");
  assert.equal(life.state.runs.list().find((r) => r.id === run)?.snapshot, paused);
  const snapshot = life.state.snapshots.get(paused as never);
  assert.equal(snapshot?.layers.length, 3);
  assert.deepEqual(
    world.disks.get(run)?.layers.map((l) => l.id),
    snapshot?.layers.map((l) => l.id),
  );
  await full(life);
  const before = new Set(world.vmms.alive);
  const children = await life.engine.fork(box.sandboxId, { count: 2, timeoutMs: 60_000 }, signal);
  for (const child of children) {
    assert.ok("view" in child);
    assert.ok(before.has(life.engine.route(child.view.sandboxId)?.run ?? ""));
    assert.equal(life.engine.timing(child.view.sandboxId)?.source, "prepared");
  }
});

test("a waiting VMM that cannot be given another state is ended, and the caller gets another", async () => {
  await using world = await World.make();
  let fail = false;
  const life = await up(world, {
    ...pool({ watermarks: marks(0, 1, 1) }),
    onStep: (name) => {
      if (fail && name === "move:before") throw new Error("no");
    },
  });
  await full(life);
  const box = await create(life);
  await full(life);
  await life.engine.pause(box.sandboxId, {}, signal);
  fail = true;
  await life.engine.connect(box.sandboxId, 60_000, signal);
  assert.equal(life.engine.get(box.sandboxId).state, "running");
  fail = false;
  await full(life);
  const { hot = 0, prepared = 0 } = status(life) ?? {};
  assert.equal(world.vmms.alive.length, 1 + hot + prepared);
});
