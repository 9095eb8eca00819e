/** What becomes of a sandbox that is paused, resumed, checkpointed and rewound, alone and at once. */
import assert from "node:assert/strict";
import { test } from "node:test";
import { AenvError, type SandboxId } from "@aenv/base";
import type { CreateOptions, SandboxView } from "./types.ts";
import { type Life, type StartOptions, until, World } from "./testing.ts";

const signal = new AbortController().signal;
const MINUTE = 60_000;
const isCode = (code: string) => (e: unknown) => e instanceof AenvError && e.code === code;

async function up(world: World, options: StartOptions = {}): Promise<Life> {
  const life = await world.start(options);
  await world.addTemplate(life, "base");
  return life;
}

const create = ({ engine }: Life, options: Partial<CreateOptions> = {}): Promise<SandboxView> =>
  engine.create({ template: "base", timeoutMs: MINUTE, ...options }, signal);

function touch({ driver, engine }: Life, id: SandboxId, times = 1): void {
  for (let n = 0; n < times; n++) driver.touch(engine.route(id)?.run ?? "");
}
const memoryOf = ({ driver, engine }: Life, id: SandboxId) => driver.memoryOf(engine.route(id)?.run ?? "")?.counter;

/** Parks one operation of the driver until it is opened. */
function gate(life: Life, op: string): { reached: Promise<void>; open: () => void; count: () => number } {
  const reached = Promise.withResolvers<void>();
  const opened = Promise.withResolvers<void>();
  let count = 0;
  life.driver.knobs.hook = async (at) => {
    if (at !== op) return;
    count++;
    reached.resolve();
    await opened.promise;
  };
  return { reached: reached.promise, open: opened.resolve, count: () => count };
}

test("a paused sandbox has no VM; resumed it has its memory, its tokens and its lifecycle", async () => {
  await using world = await World.make();
  const life = await up(world);
  const { engine } = life;
  const box = await create(life, { autoPause: true });
  const id = box.sandboxId;
  touch(life, id, 3);
  const first = engine.route(id);
  const ended: string[] = [];
  engine.onRunEnded((run) => ended.push(run));
  assert.equal(await engine.pause(id, {}, signal), true);
  assert.equal(await engine.pause(id, {}, signal), false);
  assert.deepEqual(ended, [first?.run]);
  assert.equal(engine.route(id), undefined);
  assert.deepEqual(
    engine.list({ states: ["paused"] }).items.map((s) => s.sandboxId),
    [id],
  );
  await until(() => engine.resources().length === 0, "its VM is freed");
  assert.equal(engine.latestMetrics([id]).size, 0);
  await assert.rejects(engine.setTimeout(id, MINUTE), isCode("IN_TRANSITION"));

  const { view, resumed } = await engine.connect(id, 2 * MINUTE, signal);
  assert.equal(resumed, true);
  assert.equal(memoryOf(life, id), 3);
  assert.notEqual(engine.route(id)?.run, first?.run);
  assert.deepEqual(view.lifecycle, box.lifecycle);
  assert.equal(view.envdAccessToken, box.envdAccessToken);
  assert.equal(view.endAt, world.clock.now() + 2 * MINUTE);
  // The guest still has the token of before.
  assert.equal(world.inits.at(-1)?.currentToken, box.envdAccessToken);
  assert.equal(world.inits.at(-1)?.body.cause, "resume");
  assert.equal((await engine.connect(id, MINUTE, signal)).resumed, false);
  assert.equal(engine.get(id).endAt, view.endAt, "connect never shortens");
  assert.deepEqual((await engine.connect(id, MINUTE, signal, { autoPause: false })).view.lifecycle, box.lifecycle);
});

test("who wants the same at once joins, who wants the opposite waits", async () => {
  await using world = await World.make();
  const life = await up(world);
  const { engine } = life;
  const { sandboxId: id } = await create(life);
  const saves = gate(life, "save");
  const pauses = [engine.pause(id, {}, signal), engine.pause(id, {}, signal)];
  await saves.reached;
  const connects = [engine.connect(id, MINUTE, signal), engine.connect(id, MINUTE, signal)];
  assert.equal(engine.get(id).state, "pausing");
  saves.open();
  assert.deepEqual(await Promise.all(pauses), [true, true]);
  assert.deepEqual(
    (await Promise.all(connects)).map((c) => c.resumed),
    [true, true],
  );
  assert.equal(saves.count(), 1);
  assert.deepEqual(
    world.inits.map((i) => i.body.cause),
    ["boot", "create", "resume"].slice(-world.inits.length),
  );
});

test("a caller that gives up ends its pause; a resume goes on for those who wait for it", async () => {
  await using world = await World.make();
  const life = await up(world);
  const { engine } = life;
  const { sandboxId: id } = await create(life);
  touch(life, id);
  const caller = new AbortController();
  const stop = gate(life, "save");
  const pause = engine.pause(id, {}, caller.signal);
  await stop.reached;
  caller.abort(new AenvError("CANCELLED", "gone"));
  stop.open();
  await assert.rejects(pause, isCode("CANCELLED"));
  assert.equal(engine.get(id).state, "running");
  assert.equal(await engine.pause(id, {}, signal), true);

  const loads = gate(life, "load");
  const impatient = new AbortController();
  const first = engine.connect(id, MINUTE, impatient.signal);
  await loads.reached;
  const second = engine.connect(id, MINUTE, signal);
  impatient.abort(new AenvError("CANCELLED", "gone"));
  loads.open();
  await assert.rejects(first, isCode("CANCELLED"));
  assert.equal((await second).resumed, true);
  assert.equal(memoryOf(life, id), 1);
});

test("a resume that fails tells all who waited, and the sandbox is paused still", async () => {
  await using world = await World.make();
  const life = await up(world);
  const { engine } = life;
  const { sandboxId: id } = await create(life);
  await engine.pause(id, {}, signal);
  life.driver.knobs.failures.load = [new AenvError("VMM_FAILED", "no")];
  const both = await Promise.allSettled([engine.connect(id, MINUTE, signal), engine.connect(id, MINUTE, signal)]);
  assert.deepEqual(
    both.map((r) => r.status === "rejected" && isCode("VMM_FAILED")(r.reason)),
    [true, true],
  );
  assert.equal(engine.get(id).state, "paused");
  assert.equal((await engine.connect(id, MINUTE, signal)).resumed, true);
});

test("a sandbox that is killed while it is paused, resumed or rewound is gone, and nothing is left", async () => {
  await using world = await World.make();
  const life = await up(world);
  const { engine } = life;
  const empty = await world.inventory();
  const moves: Record<string, [op: string, paused: boolean, go: (id: SandboxId) => Promise<unknown>]> = {
    pausing: ["save", false, (id) => engine.pause(id, {}, signal)],
    resuming: ["load", true, (id) => engine.connect(id, MINUTE, signal)],
    rewinding: ["load", false, (id) => engine.rewind(id, "cp", {}, signal)],
  };
  for (const [state, [op, paused, go]] of Object.entries(moves)) {
    life.driver.knobs.hook = undefined;
    const { sandboxId: id } = await create(life);
    await engine.checkpoint(id, { name: "cp" }, signal);
    if (paused) await engine.pause(id, {}, signal);
    const at = gate(life, op);
    const move = go(id);
    await at.reached;
    assert.equal(engine.get(id).state, state);
    const kill = engine.kill(id);
    at.open();
    // Its caller did not give up: the sandbox is gone.
    await assert.rejects(move, isCode("NOT_FOUND"));
    assert.equal(await kill, true);
    assert.throws(() => engine.get(id), isCode("NOT_FOUND"));
    await until(
      async () => JSON.stringify(await world.inventory()) === JSON.stringify(empty),
      `${state}: all is freed`,
    );
  }
});

test("at the end of their time sandboxes are paused, so many at once, with or without their memory", async () => {
  await using world = await World.make();
  const life = await up(world);
  const { engine } = life;
  const kept = await Promise.all(Array.from({ length: 12 }, () => create(life, { autoPause: true })));
  const disk = await create(life, { autoPause: true, autoPauseMemory: false });
  const ends = await create(life);
  for (const { sandboxId } of kept) touch(life, sandboxId);
  const saves = gate(life, "save");
  world.clock.advance(MINUTE);
  await saves.reached;
  await until(() => engine.count().pausing >= 8, "they are paused at once");
  assert.equal(engine.count().pausing, 8, "but not all of them");
  saves.open();
  await until(() => engine.count().paused === 13, "all are paused");
  assert.throws(() => engine.get(ends.sandboxId), /expired/);
  for (const { sandboxId } of kept) {
    await engine.connect(sandboxId, MINUTE, signal);
    assert.equal(memoryOf(life, sandboxId), 1);
    assert.equal(engine.get(sandboxId).lifecycle.onTimeout, "pause");
  }
  await engine.connect(disk.sandboxId, MINUTE, signal);
  assert.equal(memoryOf(life, disk.sandboxId), 0, "it was booted");
  world.clock.advance(MINUTE);
  await until(() => engine.count().paused === 13, "the same at the end of the next time");
});

test("a pause at the end that fails is tried again; the sandbox runs meanwhile", async () => {
  await using world = await World.make();
  const life = await up(world);
  const { engine } = life;
  const { sandboxId: id } = await create(life, { autoPause: true });
  life.driver.knobs.failures.save = [new AenvError("NO_SPACE", "full")];
  world.clock.advance(MINUTE);
  await until(() => engine.logs(id).some((l) => l.message === "sandbox was not paused"), "it fails once");
  assert.equal(engine.get(id).state, "running");
  await until(() => {
    world.clock.advance(1000);
    return engine.get(id).state === "paused";
  }, "the next attempt works");
});

test("traffic wakes a paused sandbox with autoResume, once for all who ask, and no other", async () => {
  await using world = await World.make();
  const life = await up(world);
  const { engine } = life;
  const lifecycle = { autoPause: true, autoResume: true };
  const { sandboxId: id } = await create(life, lifecycle);
  const { sandboxId: still } = await create(life, { autoPause: true });
  const { sandboxId: disk } = await create(life, lifecycle);
  assert.deepEqual(await engine.resumeForTraffic(id, signal), engine.route(id), "it runs");
  touch(life, id);
  await engine.pause(id, {}, signal);
  await engine.pause(still, {}, signal);
  await engine.pause(disk, { memory: false }, signal);
  const loads = gate(life, "load");
  const all = Array.from({ length: 5 }, () => engine.resumeForTraffic(id, signal));
  await loads.reached;
  loads.open();
  const route = engine.route(id) ?? (await all[0]);
  for (const r of await Promise.all(all)) assert.deepEqual(r, route);
  assert.equal(loads.count(), 1);
  assert.equal(memoryOf(life, id), 1);
  assert.equal(engine.get(id).endAt, world.clock.now() + 5 * MINUTE);
  assert.equal(await engine.resumeForTraffic(still, signal), undefined);
  assert.equal(engine.get(still).state, "paused");
  assert.equal(await engine.resumeForTraffic(disk, signal), undefined, "there is nothing that it could answer with");
  assert.equal(await engine.resumeForTraffic("iloc0000000000000000" as SandboxId, signal), undefined);
});

test("traffic waits for a transition that its owner began", async () => {
  await using world = await World.make();
  const life = await up(world);
  const { engine } = life;
  const { sandboxId: id } = await create(life);
  await engine.checkpoint(id, { name: "cp" }, signal);
  const loads = gate(life, "load");
  const rewind = engine.rewind(id, "cp", {}, signal);
  await loads.reached;
  const waits = engine.resumeForTraffic(id, signal);
  loads.open();
  await rewind;
  assert.deepEqual(await waits, engine.route(id));

  const saves = gate(life, "save");
  const pause = engine.pause(id, {}, signal);
  await saves.reached;
  const none = engine.resumeForTraffic(id, signal);
  saves.open();
  await pause;
  assert.equal(await none, undefined);

  const again = gate(life, "load");
  const connect = engine.connect(id, MINUTE, signal);
  await again.reached;
  const some = engine.resumeForTraffic(id, signal);
  again.open();
  await connect;
  assert.deepEqual(await some, engine.route(id));
});

test("traffic to a sandbox that cannot be resumed fails for all who wait, with one attempt", async () => {
  await using world = await World.make();
  const life = await up(world);
  const { engine } = life;
  const { sandboxId: id } = await create(life, { autoPause: true, autoResume: true });
  await engine.pause(id, {}, signal);
  const no = (): AenvError => new AenvError("VMM_FAILED", "no");
  life.driver.knobs.failures.load = [no(), no(), no(), no()];
  const all = await Promise.allSettled(Array.from({ length: 4 }, () => engine.resumeForTraffic(id, signal)));
  assert.ok(all.every((r) => r.status === "rejected" && isCode("VMM_FAILED")(r.reason)));
  assert.equal(life.driver.knobs.failures.load.length, 3);
});

test("a sandbox returns to each of its checkpoints in place, as often as wanted", async () => {
  await using world = await World.make();
  const life = await up(world);
  const { engine } = life;
  const box = await create(life);
  const id = box.sandboxId;
  const cps = [];
  for (let n = 1; n <= 4; n++) {
    touch(life, id);
    world.clock.advance(1);
    cps.push(await engine.checkpoint(id, { name: `cp${n}` }, signal));
  }
  assert.deepEqual(
    (await engine.listCheckpoints(id)).map((c) => c.name),
    ["cp1", "cp2", "cp3", "cp4"],
  );
  touch(life, id, 10);
  const ended: string[] = [];
  engine.onRunEnded((run) => ended.push(run));
  for (const n of [2, 4, 1, 1, 3]) {
    const before = engine.route(id)?.run;
    const view = await engine.rewind(id, n % 2 ? `cp${n}` : (cps[n - 1]?.checkpointId ?? ""), {}, signal);
    assert.equal(memoryOf(life, id), n);
    assert.deepEqual({ ...view, startedAt: 0 }, { ...box, startedAt: 0 });
    assert.equal(ended.at(-1), before);
    touch(life, id, 20);
  }
  await until(() => world.vmms.alive.length === 1, "the VMs that were left are gone");
  assert.equal((await engine.listCheckpoints(id)).length, 4);
  // Its end and its metrics are those of a running one.
  world.clock.advance(MINUTE);
  await until(() => life.state.sandboxes.get(id)?.state === "gone", "it expires");
  assert.deepEqual(life.state.checkpoints.of(id), []);
});

test("a checkpoint's name is unique in its sandbox, and no sandbox reaches the checkpoints of another", async () => {
  await using world = await World.make();
  const life = await up(world);
  const { engine } = life;
  const { sandboxId: id } = await create(life);
  const { sandboxId: other } = await create(life);
  const first = await engine.checkpoint(id, { name: "cp" }, signal);
  touch(life, id);
  world.clock.advance(1);
  const second = await engine.checkpoint(id, { name: "cp" }, signal);
  assert.deepEqual(
    (await engine.listCheckpoints(id)).map((c) => [c.checkpointId, c.name]),
    [
      [first.checkpointId, undefined],
      [second.checkpointId, "cp"],
    ],
  );
  await engine.rewind(id, first.checkpointId, {}, signal);
  assert.equal(memoryOf(life, id), 0);
  await engine.rewind(id, "cp", {}, signal);
  assert.equal(memoryOf(life, id), 1);
  for (const name of ["cp", first.checkpointId, "", "none"])
    await assert.rejects(engine.rewind(other, name, {}, signal), isCode("NOT_FOUND"));
  assert.deepEqual(await engine.listCheckpoints(other), []);
  await assert.rejects(engine.rewind(id, "cp", { timeoutMs: -1 }, signal), isCode("INVALID_ARGUMENT"));
});

test("a rewind wakes a paused sandbox, and extends its time where it is told to", async () => {
  await using world = await World.make();
  const life = await up(world);
  const { engine } = life;
  const { sandboxId: id, endAt } = await create(life);
  touch(life, id);
  await engine.pause(id, {}, signal);
  // Of a paused one the checkpoint is the state that it waits in.
  await engine.checkpoint(id, { name: "cp" }, signal);
  await engine.connect(id, 1, signal);
  assert.equal((await engine.rewind(id, "cp", {}, signal)).endAt, world.clock.now() + 1);
  assert.equal((await engine.rewind(id, "cp", { timeoutMs: 9 * MINUTE }, signal)).endAt, endAt + 8 * MINUTE);
  assert.equal((await engine.rewind(id, "cp", { timeoutMs: MINUTE }, signal)).endAt, endAt + 8 * MINUTE);
  await engine.pause(id, {}, signal);
  world.clock.advance(60 * MINUTE);
  const view = await engine.rewind(id, "cp", { timeoutMs: MINUTE }, signal);
  assert.equal(view.state, "running");
  assert.ok(view.endAt >= world.clock.now() + MINUTE);
  assert.equal(memoryOf(life, id), 1);
});

test("of rewinds at once those to the same state are one, another comes after it", async () => {
  await using world = await World.make();
  const life = await up(world);
  const { engine } = life;
  const { sandboxId: id } = await create(life);
  await engine.checkpoint(id, { name: "zero" }, signal);
  touch(life, id);
  await engine.checkpoint(id, { name: "one" }, signal);
  const loads = gate(life, "load");
  const all = ["zero", "zero", "one"].map((name) => engine.rewind(id, name, {}, signal));
  await loads.reached;
  const capture = engine.snapshot(id, { name: "after" }, signal);
  loads.open();
  await Promise.all([...all, capture]);
  assert.equal(loads.count(), 2);
  assert.equal(memoryOf(life, id), 1);
});

test("a rewind that fails leaves the sandbox as it was; one whose VM died meanwhile is over", async () => {
  await using world = await World.make();
  const life = await up(world);
  const { engine } = life;
  const { sandboxId: id } = await create(life);
  await engine.checkpoint(id, { name: "cp" }, signal);
  touch(life, id, 4);
  const route = engine.route(id);
  life.driver.knobs.failures.load = [new AenvError("VMM_FAILED", "no")];
  await assert.rejects(engine.rewind(id, "cp", {}, signal), isCode("VMM_FAILED"));
  assert.deepEqual(engine.route(id), route);
  touch(life, id);
  assert.equal(memoryOf(life, id), 5, "it goes on");
  world.slotLimit = 1;
  await assert.rejects(engine.rewind(id, "cp", {}, signal), isCode("SLOT_EXHAUSTED"));
  assert.equal(memoryOf(life, id), 5);
  world.slotLimit = 64;

  let loads = gate(life, "load");
  let rewind = engine.rewind(id, "cp", {}, signal);
  await loads.reached;
  await life.driver.crash(route?.run ?? "");
  loads.open();
  await rewind;
  assert.equal(memoryOf(life, id), 0, "the death of what is left behind anyway hurts nobody");

  loads = gate(life, "load");
  const last = engine.route(id)?.run ?? "";
  life.driver.knobs.failures.load = [new AenvError("VMM_FAILED", "no")];
  rewind = engine.rewind(id, "cp", {}, signal);
  await loads.reached;
  await life.driver.crash(last);
  loads.open();
  await assert.rejects(rewind);
  await until(() => life.state.sandboxes.get(id)?.state === "gone", "nothing of it is there any more");
  assert.throws(() => engine.get(id), /vmm-crash/);
});

test("the lineage tells every state after its parent, who stands on it, and whose files it shares", async () => {
  await using world = await World.make();
  const life = await up(world);
  const { engine } = life;
  const { sandboxId: stranger } = await create(life);
  const { sandboxId: id } = await create(life);
  const root = engine.templates.get("base").snapshotId;
  assert.deepEqual(
    (await engine.lineage(id)).nodes.map((n) => [n.snapshotId, n.parent, n.cause, n.names]),
    [[root, undefined, "build", ["base"]]],
  );
  await engine.checkpoint(id, { name: "cp" }, signal);
  world.clock.advance(1);
  const fork = await engine.fork(id, { count: 2, timeoutMs: MINUTE }, signal);
  const child = fork[0] && "view" in fork[0] ? fork[0].view.sandboxId : undefined;
  assert.ok(child);
  world.clock.advance(1);
  await engine.snapshot(child, { name: "kept:v1" }, signal);
  await engine.snapshot(stranger, { name: "stranger" }, signal);
  world.clock.advance(1);
  // Its own line goes on from the checkpoint.
  await engine.rewind(id, "cp", {}, signal);
  await engine.pause(id, {}, signal);

  const l = await engine.lineage(id);
  const [build, cp, forked, kept, paused] = l.nodes;
  assert.deepEqual(
    l.nodes.map((n) => [n.cause, n.sandboxId, n.names, l.nodes.findIndex((p) => p.snapshotId === n.parent)]),
    [
      ["build", undefined, ["base"], -1],
      ["checkpoint", id, ["cp"], 0],
      ["fork", id, [], 1],
      ["snapshot", child, ["default/kept:v1"], 2],
      ["pause", id, [], 1],
    ],
  );
  assert.equal(l.snapshotId, paused?.snapshotId);
  assert.equal(build?.disk.ownBytes, 0, "all stand on it");
  assert.ok((cp?.disk.sharedBytes ?? 0) > (build?.disk.sharedBytes ?? 0));
  assert.ok((kept?.disk.ownBytes ?? 0) > 0 && (kept?.disk.sharedBytes ?? 0) > 0);
  assert.deepEqual(
    new Map(l.sandboxes.map((s) => [s.sandboxId, [s.snapshotId, s.state]])),
    new Map(
      [...fork.map((f) => ("view" in f ? f.view.sandboxId : "")), id].map((s) => [
        s,
        s === id ? [paused?.snapshotId, "paused"] : [s === child ? kept?.snapshotId : forked?.snapshotId, "running"],
      ]),
    ),
  );
  // From a child: what it stands on and what comes of it, not what its source did besides.
  const own = await engine.lineage(child);
  assert.deepEqual(
    own.nodes.map((n) => n.cause),
    ["build", "checkpoint", "fork", "snapshot"],
  );
});

test("a state that is collected leaves no hole in the lineage", async () => {
  await using world = await World.make();
  const life = await up(world);
  const { engine } = life;
  const { sandboxId: id } = await create(life);
  for (let n = 0; n < 3; n++) {
    await engine.pause(id, {}, signal);
    await engine.connect(id, MINUTE, signal);
  }
  await until(() => life.state.snapshots.list().length === 2, "states that nobody can return to are gone");
  const { nodes } = await engine.lineage(id);
  assert.deepEqual(
    nodes.map((n) => [n.cause, n.parent]),
    [
      ["build", undefined],
      ["pause", nodes[0]?.snapshotId],
    ],
  );
});

test("a node that stops pauses what runs, so many at once; traffic wakes them after the next start, and their time goes on", async () => {
  await using world = await World.make();
  const life = await up(world, { config: { pauseConcurrency: 3 } });
  const { engine } = life;
  const ids = [];
  for (let n = 0; n < 7; n++) ids.push((await create(life, { timeoutMs: 10 * MINUTE })).sandboxId);
  const [one, two, three, four] = ids as [SandboxId, SandboxId, SandboxId, SandboxId];
  const { sandboxId: owned } = await create(life, { autoPause: true, autoResume: true });
  const { sandboxId: slow } = await create(life);
  for (const id of ids) touch(life, id);
  await engine.pause(owned, {}, signal);
  await engine.pause(slow, {}, signal);
  const saves = gate(life, "save");
  // A resume that is under way comes to nothing: it stays paused.
  const loads = Promise.withResolvers<void>();
  const hook = life.driver.knobs.hook;
  life.driver.knobs.hook = async (op, run) => {
    if (op !== "load") return await hook?.(op, run);
    loads.resolve();
  };
  const resume = engine.connect(slow, MINUTE, signal).catch((e: unknown) => e);
  await loads.promise;
  const all = engine.pauseAll(signal);
  await saves.reached;
  await until(() => engine.count().pausing === 3, "so many at once");
  for (const begin of [
    () => create(life),
    () => engine.connect(owned, MINUTE, signal),
    () => engine.resumeForTraffic(owned, signal),
    () => engine.fork(one, { count: 1, timeoutMs: MINUTE }, signal),
  ])
    await assert.rejects(begin(), isCode("UNAVAILABLE"));
  saves.open();
  const { paused, left } = await all;
  await resume;
  assert.deepEqual(left, []);
  assert.ok(paused === ids.length || paused === ids.length + 1, "the resume ended either way");
  assert.equal(engine.count().paused, ids.length + 2);
  await life.end();
  assert.deepEqual(world.vmms.alive, []);

  const next = await world.start();
  assert.equal(next.engine.count().paused, ids.length + 2);
  const endAt = next.engine.get(one).endAt;
  await next.engine.resumeForTraffic(one, signal);
  assert.equal(memoryOf(next, one), 1);
  assert.equal(next.engine.get(one).endAt, endAt, "traffic does not change its end");
  await next.engine.setTimeout(two, 20 * MINUTE);
  await next.engine.connect(two, MINUTE, signal);
  assert.equal(next.engine.get(two).endAt, world.clock.now() + 20 * MINUTE);
  assert.equal(await next.engine.pause(three, {}, signal), true, "its owner has not paused it before");
  assert.equal(await next.engine.pause(three, {}, signal), false);
  assert.equal(await next.engine.resumeForTraffic(three, signal), undefined);
  assert.equal(next.engine.get(four).state, "paused");
  world.clock.advance(10 * MINUTE);
  await until(
    () => next.engine.count().paused === 3 && next.engine.count().running === 1,
    "the time of others is over",
  );
  assert.throws(() => next.engine.get(four), /expired/);
  assert.equal(next.engine.get(three).state, "paused");
  assert.equal(next.engine.get(owned).state, "paused");
});

test("an interrupted sandbox with autoPause stays paused at the end of its time, and traffic does not wake it then", async () => {
  await using world = await World.make();
  const life = await up(world);
  const { sandboxId: id } = await create(life, { autoPause: true });
  await life.engine.pauseAll(signal);
  await life.end();
  const next = await world.start();
  world.clock.advance(MINUTE);
  await until(() => !next.state.sandboxes.get(id)?.interrupted, "its time is over");
  assert.equal(next.engine.get(id).state, "paused");
  assert.equal(await next.engine.resumeForTraffic(id, signal), undefined);
  assert.equal((await next.engine.connect(id, MINUTE, signal)).resumed, true);
});

test("what cannot be paused before the deadline goes on, and the next server adopts it", async () => {
  await using world = await World.make();
  const life = await up(world);
  const ids = [(await create(life)).sandboxId, (await create(life)).sandboxId];
  const stuck = life.engine.route(ids[1] as SandboxId)?.run;
  const reached = Promise.withResolvers<void>();
  life.driver.knobs.hook = (op, run) => {
    if (op !== "save" || run !== stuck) return Promise.resolve();
    reached.resolve();
    return new Promise((resolve) => limit.signal.addEventListener("abort", () => resolve()));
  };
  const limit = new AbortController();
  const all = life.engine.pauseAll(limit.signal);
  await reached.promise;
  await until(() => life.engine.count().paused === 1, "the other one is paused");
  limit.abort(new AenvError("DEADLINE", "too late"));
  const { paused, left } = await all;
  assert.equal(paused, 1);
  assert.deepEqual(
    left.map((l) => [l.sandboxId, l.error.code]),
    [[ids[1], "DEADLINE"]],
  );
  await life.end();
  assert.deepEqual(world.vmms.alive, [stuck]);
  const next = await world.start();
  assert.equal(next.engine.route(ids[1] as SandboxId)?.run, stuck);
  assert.equal(next.engine.get(ids[0] as SandboxId).state, "paused");
});
