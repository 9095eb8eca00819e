import assert from "node:assert/strict";
import { test } from "node:test";
import { AenvError, type SandboxId } from "@aenv/base";
import { type Life, NO_SPARES, until, World } from "./testing.ts";
import type { CreateOptions } from "./types.ts";

const signal = new AbortController().signal;
const MINUTE = 60_000;
const box = (over: Partial<CreateOptions> = {}): CreateOptions => ({ template: "base", timeoutMs: MINUTE, ...over });

export const isCode =
  (code: string) =>
  (e: unknown): boolean => {
    assert.ok(e instanceof AenvError, String(e));
    assert.equal(e.code, code, e.message);
    return true;
  };

async function up(world: World, options: Parameters<World["start"]>[0] = {}): Promise<Life> {
  const life = await world.start(options);
  await world.addTemplate(life, "base");
  return life;
}

test("a sandbox is created, seen, and killed, and then nothing of it is left", async () => {
  await using world = await World.make();
  const { engine } = await up(world);
  const before = await world.inventory();
  const view = await engine.create(box({ metadata: { a: "1" }, envVars: { X: "y" } }), signal);
  assert.equal(view.state, "running");
  assert.equal(view.endAt, view.startedAt + MINUTE);
  assert.equal(view.alias, "base");
  assert.match(view.envdAccessToken ?? "", /^[0-9a-f]{64}$/);
  assert.equal(view.trafficAccessToken, undefined);
  assert.deepEqual(engine.get(view.sandboxId), view);
  const init = world.inits.at(-1)?.body;
  assert.equal(init?.sandboxId, view.sandboxId);
  assert.equal(init.accessToken, view.envdAccessToken);
  assert.equal(init.envVars["X"], "y");
  assert.match(init.machineId, /^[0-9a-f]{32}$/);
  assert.ok(Buffer.from(init.entropy, "base64").length >= 64);
  const route = engine.route(view.sandboxId);
  assert.equal(route?.run, init.lifecycleID);
  assert.equal(route.accessToken, view.envdAccessToken);
  assert.equal(engine.timing(view.sandboxId)?.source, "cold");

  const ended: string[] = [];
  engine.onRunEnded((run) => ended.push(run));
  const killing = engine.kill(view.sandboxId);
  assert.equal(engine.route(view.sandboxId), undefined, "the edge must not find it from the first moment on");
  assert.deepEqual(ended, [route.run]);
  assert.throws(() => engine.get(view.sandboxId), isCode("NOT_FOUND"));
  assert.equal(await killing, true);
  await until(() => engine.resources().length === 0, "all resources are released");
  assert.deepEqual(await world.inventory(), before);
});

test("a second kill, at the same time or later, is not the one that killed", async () => {
  await using world = await World.make();
  const { engine } = await up(world);
  const { sandboxId } = await engine.create(box(), signal);
  assert.deepEqual(await Promise.all([engine.kill(sandboxId), engine.kill(sandboxId)]), [true, false]);
  assert.equal(await engine.kill(sandboxId), false);
  assert.equal(await engine.kill("ilocneverwas" as SandboxId), false);
});

test("a create that the caller gives up leaves nothing", async () => {
  await using world = await World.make();
  const abort = new AbortController();
  let armed = false;
  const life = await up(world, { onStep: (name) => (name === "init:before" && armed ? abort.abort() : undefined) });
  const before = await world.inventory();
  armed = true;
  await assert.rejects(life.engine.create(box(), abort.signal), isCode("CANCELLED"));
  assert.deepEqual(life.engine.list().items, []);
  assert.deepEqual(life.engine.resources(), []);
  assert.deepEqual(await world.inventory(), before);
});

test("a sandbox that is killed while it is created never becomes visible", async () => {
  await using world = await World.make();
  const parked = Promise.withResolvers<void>();
  const go = Promise.withResolvers<void>();
  let armed = false;
  const life = await up(world, {
    onStep: async (name) => {
      if (name !== "resume:after" || !armed) return;
      parked.resolve();
      await go.promise;
    },
  });
  armed = true;
  const before = await world.inventory();
  const create = life.engine.create(box(), signal);
  await parked.promise;
  const id = life.state.sandboxes.live()[0]?.id;
  assert.ok(id);
  assert.throws(() => life.engine.get(id), isCode("NOT_FOUND"));
  const kill = life.engine.kill(id);
  go.resolve();
  await assert.rejects(create, isCode("CANCELLED"));
  assert.equal(await kill, true);
  assert.deepEqual(await world.inventory(), before);
});

test("sandboxes end at their time, not before, and say why", async () => {
  await using world = await World.make();
  const { engine } = await up(world);
  const short = await engine.create(box({ timeoutMs: 5000 }), signal);
  const long = await engine.create(box({ timeoutMs: 9000 }), signal);
  world.clock.advance(4999);
  assert.equal(engine.get(short.sandboxId).state, "running");
  world.clock.advance(1);
  await until(() => engine.route(short.sandboxId) === undefined, "the first expires");
  assert.equal(engine.get(long.sandboxId).state, "running");
  await until(() => engine.resources().every((r) => r.owner.id !== short.sandboxId), "it is released");
  assert.throws(() => engine.get(short.sandboxId), /expired/);
});

test("setTimeout may shorten, extend and connect never do, and then the end is the same to the bit", async () => {
  await using world = await World.make();
  const { engine } = await up(world);
  const { sandboxId: id, endAt } = await engine.create(box(), signal);
  world.clock.advance(1000);
  assert.equal((await engine.connect(id, 10_000, signal)).view.endAt, endAt);
  await engine.extend(id, 10_000);
  assert.equal(engine.get(id).endAt, endAt);
  assert.equal((await engine.connect(id, MINUTE, signal)).view.endAt, endAt + 1000);
  assert.equal((await engine.connect(id, MINUTE, signal)).resumed, false);
  await engine.setTimeout(id, 2000);
  assert.equal(engine.get(id).endAt, world.clock.now() + 2000);
  world.clock.advance(1999);
  assert.equal(engine.get(id).state, "running");
  await engine.setTimeout(id, 0);
  assert.throws(() => engine.get(id), /expired/);
  await assert.rejects(engine.setTimeout(id, 1000), isCode("NOT_FOUND"));
  await assert.rejects(engine.connect(id, 1000, signal), isCode("NOT_FOUND"));
});

test("bad requests are refused before anything is made", async () => {
  await using world = await World.make();
  const { engine } = await up(world);
  await assert.rejects(engine.create(box({ template: "nope" }), signal), isCode("NOT_FOUND"));
  await assert.rejects(engine.create(box({ template: "base:v7" }), signal), isCode("NOT_FOUND"));
  await assert.rejects(engine.create(box({ timeoutMs: 0 }), signal), isCode("INVALID_ARGUMENT"));
  await assert.rejects(engine.create(box({ timeoutMs: Number.NaN }), signal), isCode("INVALID_ARGUMENT"));
  await assert.rejects(engine.create(box({ timeoutMs: 1e12 }), signal), isCode("INVALID_ARGUMENT"));
  await assert.rejects(engine.create(box({ autoResume: true }), signal), isCode("INVALID_ARGUMENT"));
  assert.throws(() => engine.list({ limit: 0 }), isCode("INVALID_ARGUMENT"));
  assert.throws(() => engine.list({ cursor: "zzz" }), isCode("INVALID_ARGUMENT"));
});

test("an open sandbox has no token, and one without public traffic asks for its own", async () => {
  await using world = await World.make();
  const { engine } = await up(world);
  const open = await engine.create(box({ secure: false }), signal);
  assert.equal(open.envdAccessToken, undefined);
  assert.equal(world.inits.at(-1)?.body.accessToken, "");
  const closed = await engine.create(box({ allowPublicTraffic: false, allowInternetAccess: false }), signal);
  assert.equal(engine.route(closed.sandboxId)?.trafficToken, closed.trafficAccessToken);
  assert.match(closed.trafficAccessToken ?? "", /^[0-9a-f]{64}$/);
  assert.notEqual(closed.trafficAccessToken, closed.envdAccessToken);
  assert.deepEqual(
    [...world.policies.values()].map((p) => p.allowInternet),
    [false],
  );
});

test("the same idempotency key gives the same answer, at once and later; another request is refused", async () => {
  await using world = await World.make();
  const life = await up(world);
  const { engine } = life;
  const asked = box({ idempotencyKey: "k1", metadata: { a: "1", b: "2" } });
  const [one, two] = await Promise.all([engine.create(asked, signal), engine.create(asked, signal)]);
  assert.deepEqual(one, two);
  assert.equal(engine.list().items.length, 1);
  const reordered = box({ idempotencyKey: "k1", metadata: { b: "2", a: "1" } });
  assert.deepEqual(await engine.create(reordered, signal), one);
  await assert.rejects(engine.create({ ...asked, timeoutMs: 1 }, signal), isCode("CONFLICT"));
  await assert.rejects(engine.create(box({ idempotencyKey: "" }), signal), isCode("INVALID_ARGUMENT"));
  assert.notEqual((await engine.create(box({ idempotencyKey: "k2" }), signal)).sandboxId, one.sandboxId);
  await life.end();
  const again = await world.start();
  assert.deepEqual(await again.engine.create(asked, signal), one);
});

test("who waits for the same idempotent create is served when the first caller gives up", async () => {
  await using world = await World.make();
  const first = new AbortController();
  let armed = false;
  const life = await up(world, {
    onStep: (name) => {
      if (!armed || name !== "init:before") return;
      armed = false;
      first.abort();
    },
  });
  armed = true;
  const asked = box({ idempotencyKey: "k" });
  const gone = life.engine.create(asked, first.signal);
  const served = life.engine.create(asked, signal);
  await assert.rejects(gone, isCode("CANCELLED"));
  assert.equal((await served).state, "running");
  assert.equal(life.engine.list().items.length, 1);
});

test("a create that failed is tried anew under its idempotency key", async () => {
  await using world = await World.make();
  const life = await up(world);
  life.driver.knobs.failures.prepare = [new AenvError("VMM_FAILED", "once")];
  const asked = box({ idempotencyKey: "k" });
  await assert.rejects(life.engine.create(asked, signal), isCode("VMM_FAILED"));
  assert.equal((await life.engine.create(asked, signal)).state, "running");
});

test("lists are newest first, filtered, and paged to an end without a token", async () => {
  await using world = await World.make();
  const { engine } = await up(world);
  const ids: SandboxId[] = [];
  for (let n = 0; n < 5; n++) {
    world.clock.advance(1000);
    ids.push((await engine.create(box({ metadata: { n: String(n), even: String(n % 2 === 0) } }), signal)).sandboxId);
  }
  const newest = ids.toReversed();
  const seen: SandboxId[] = [];
  let page = engine.list({ limit: 2 });
  assert.equal(page.totalRunning, 5);
  for (;;) {
    seen.push(...page.items.map((v) => v.sandboxId));
    if (page.next === undefined) break;
    page = engine.list({ limit: 2, cursor: page.next });
  }
  assert.deepEqual(seen, newest);
  assert.deepEqual(
    engine.list({ order: "asc" }).items.map((v) => v.sandboxId),
    ids,
  );
  assert.equal(engine.list({ limit: 5 }).next, undefined);
  assert.equal(engine.list({ metadata: { even: "true" } }).items.length, 3);
  assert.equal(engine.list({ metadata: { toString: "x" } }).items.length, 0);
  assert.equal(engine.list({ template: "unknown" }).items.length, 0);
  assert.equal(engine.list({ template: "base" }).items.length, 5);
  assert.equal(engine.list({ states: ["paused"] }).items.length, 0);
  const third = engine.get(ids[2] as SandboxId);
  assert.equal(engine.list({ startedAfter: third.startedAt }).items.length, 3);
});

test("a guest that answers garbage fails the create at once, one that is silent at its deadline; nothing is left", async () => {
  await using world = await World.make();
  const { engine } = await up(world, { config: { initDeadlineMs: 20 } });
  const before = await world.inventory();
  for (const mood of ["garbage", "silent"] as const) {
    world.mood = mood;
    await assert.rejects(engine.create(box(), signal), isCode("GUEST_FAILED"));
    assert.deepEqual(await world.inventory(), before, mood);
    assert.deepEqual(engine.resources(), []);
  }
});

test("a VM that dies ends its sandbox with the cause, which is told to who asks, and frees all", async () => {
  await using world = await World.make();
  const life = await up(world);
  const { engine } = life;
  const before = await world.inventory();
  const { sandboxId } = await engine.create(box(), signal);
  const run = engine.route(sandboxId)?.run ?? "";
  const ended = Promise.withResolvers<string>();
  engine.onRunEnded((r) => ended.resolve(r));
  await life.driver.crash(run, "guest-panic", "kernel panic");
  assert.equal(await ended.promise, run);
  await until(() => engine.resources().length === 0, "all is released");
  assert.throws(
    () => engine.get(sandboxId),
    (e: unknown) => isCode("NOT_FOUND")(e) && (e as AenvError).data["cause"] === "guest-panic",
  );
  const last = engine.logs(sandboxId).at(-1);
  assert.equal(last?.level, "error");
  assert.equal(last.fields["cause"], "guest-panic");
  assert.equal(last.fields["detail"], "kernel panic");
  assert.equal(await engine.kill(sandboxId), false);
  assert.deepEqual(await world.inventory(), before);
});

test("a VM that dies while it is set up fails the create without waiting for the deadline", async () => {
  await using world = await World.make();
  const life = await up(world, { config: { initDeadlineMs: 3_600_000 } });
  world.mood = "silent";
  const create = life.engine.create(box(), signal);
  await until(() => world.vmms.alive.length === 1, "the VM runs");
  const run = world.vmms.alive[0] ?? "";
  await until(() => life.state.runs.list().some((r) => r.sandbox !== undefined), "it is handed over");
  await life.driver.crash(run, "guest-panic");
  await assert.rejects(create, /guest-panic/);
});

test("metrics are sampled at their interval, and a dead sandbox has none", async () => {
  await using world = await World.make();
  const { engine } = await up(world);
  const { sandboxId } = await engine.create(box({ timeoutMs: 10 * MINUTE }), signal);
  assert.deepEqual(engine.metrics(sandboxId), []);
  const start = world.clock.now();
  for (let n = 1; n <= 3; n++) {
    world.clock.advance(5000);
    await until(() => engine.metrics(sandboxId).length === n, `sample ${n}`);
  }
  const [first] = engine.metrics(sandboxId);
  assert.deepEqual(
    { ...first, timestamp: 0 },
    { timestamp: 0, cpuCount: 1, cpuUsedPct: 2, memUsed: 50, memTotal: 100, memCache: 10, diskUsed: 1, diskTotal: 2 },
  );
  assert.deepEqual(engine.metrics(sandboxId, { start: start - 10_000, end: start - 1 }), []);
  assert.equal(engine.latestMetrics([sandboxId]).get(sandboxId)?.timestamp, start + 15_000);
  await engine.kill(sandboxId);
  assert.throws(() => engine.metrics(sandboxId), isCode("NOT_FOUND"));
  world.clock.advance(20_000);
  assert.equal(engine.latestMetrics([sandboxId]).size, 0);
});

test("a node that is full says so", async () => {
  await using world = await World.make();
  const { engine } = await up(world, { config: { maxSandboxes: 1 } });
  await engine.create(box(), signal);
  await assert.rejects(engine.create(box(), signal), isCode("RATE_LIMITED"));
});

test("templates are found by every name; a deleted one keeps what runs and loses its files after that", async () => {
  await using world = await World.make();
  const { engine } = await up(world);
  const t = engine.templates.get("base");
  for (const name of [t.templateId, t.snapshotId, "base", "base:default", "default/base"])
    assert.equal(engine.templates.resolve(name)?.templateId, t.templateId, name);
  assert.equal(engine.templates.exists("other"), false);
  const { sandboxId } = await engine.create(box({ template: t.templateId }), signal);
  assert.equal(engine.get(sandboxId).alias, "base");
  assert.equal(engine.templates.get("base").spawnCount, 1);
  assert.equal(await engine.templates.delete("base"), true);
  assert.equal(await engine.templates.delete("base"), false);
  await assert.rejects(engine.create(box(), signal), isCode("NOT_FOUND"));
  assert.equal(engine.get(sandboxId).state, "running");
  assert.equal((await world.inventory())["snapshots"]?.length, 1);
  await engine.kill(sandboxId);
  const left = async (kind: string): Promise<number> => (await world.inventory())[kind]?.length ?? 0;
  await until(
    async () => (await left("snapshots")) + (await left("layers")) + (await left("memory")) === 0,
    "its files are collected",
  );
});

test("a second build replaces the first; what runs from the first goes on", async () => {
  await using world = await World.make();
  const life = await up(world);
  const first = life.engine.templates.get("base");
  const { sandboxId } = await life.engine.create(box(), signal);
  await world.addTemplate(life, "base");
  const second = life.engine.templates.get("base");
  assert.equal(second.templateId, first.templateId);
  assert.notEqual(second.snapshotId, first.snapshotId);
  assert.equal(second.buildCount, 2);
  assert.equal(life.engine.get(sandboxId).state, "running");
  assert.equal((await world.inventory())["snapshots"]?.length, 2);
});

test("the server stops and its sandboxes stay", async () => {
  await using world = await World.make();
  const life = await up(world, { config: { pool: { ...NO_SPARES } } });
  const { sandboxId } = await life.engine.create(box(), signal);
  const before = await world.inventory();
  await life.end();
  assert.deepEqual(await world.inventory(), before);
  await assert.rejects(life.engine.create(box(), signal), isCode("UNAVAILABLE"));
  const again = await world.start();
  assert.equal(again.engine.get(sandboxId).state, "running");
});
