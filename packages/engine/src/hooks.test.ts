import assert from "node:assert/strict";
import { test } from "node:test";
import { AenvError, type SandboxId } from "@aenv/base";
import { type Life, World } from "./testing.ts";

const signal = new AbortController().signal;
const HOUR = 3_600_000;

async function up(world: World): Promise<{ life: Life; id: SandboxId }> {
  const life = await world.start();
  await world.addTemplate(life, "base");
  const { sandboxId } = await life.engine.create({ template: "base", timeoutMs: HOUR }, signal);
  return { life, id: sandboxId };
}

test("hooks run before every capture of what runs and after every launch, each with what it is for", async () => {
  await using world = await World.make();
  world.hooks = () => [];
  const { life, id } = await up(world);
  const { engine } = life;
  assert.deepEqual(world.hooksRun.splice(0), [{ phase: "post-resume", cause: "create" }]);
  await engine.pause(id, {}, signal);
  assert.deepEqual(world.hooksRun.splice(0), [{ phase: "pre-snapshot", cause: "pause" }]);
  await engine.connect(id, HOUR, signal);
  assert.deepEqual(world.hooksRun.splice(0), [{ phase: "post-resume", cause: "resume" }]);
  await engine.snapshot(id, {}, signal);
  assert.deepEqual(world.hooksRun.splice(0), [{ phase: "pre-snapshot", cause: "snapshot" }]);
  await engine.fork(id, { count: 3, timeoutMs: HOUR }, signal);
  const [before, ...after] = world.hooksRun.splice(0);
  assert.deepEqual(before, { phase: "pre-snapshot", cause: "fork" });
  for (const { phase, cause } of after) assert.deepEqual([phase, cause], ["post-fork", "fork"]);
  assert.deepEqual(new Set(after.map((h) => h.forkIndex)), new Set([0, 1, 2]));
  assert.equal(new Set(after.map((h) => h.seed)).size, 3);
  for (const { seed } of after) assert.match(seed ?? "", /^\d{1,19}$/);
});

test("a guest without hooks is not asked for those after a launch", async () => {
  await using world = await World.make();
  const { life, id } = await up(world);
  await life.engine.pause(id, {}, signal);
  await life.engine.connect(id, HOUR, signal);
  assert.deepEqual(world.hooksRun, [{ phase: "pre-snapshot", cause: "pause" }]);
});

test("a hook that fails, and a guest that answers nonsense, keep nothing from happening and are in the log", async () => {
  await using world = await World.make();
  const { life, id } = await up(world);
  const { engine } = life;
  const warnings = (): string[] => engine.logs(id).flatMap((l) => (l.level === "warn" ? [l.message] : []));
  world.hooks = () => [
    { name: "10-good", exitCode: 0 },
    { name: "20-bad", exitCode: 3, output: "why" },
  ];
  await engine.pause(id, {}, signal);
  assert.deepEqual(warnings(), ["the hook pre-snapshot.d/20-bad failed"]);
  await engine.connect(id, HOUR, signal);
  assert.equal(engine.get(id).state, "running");
  assert.equal(warnings().length, 2);
  world.mood = "garbage";
  await engine.pause(id, {}, signal);
  assert.equal(engine.get(id).state, "paused");
  assert.deepEqual(warnings().slice(2), ["the hooks of pre-snapshot.d were not run"]);
});

test("a guest from before there were hooks has none", async () => {
  await using world = await World.make();
  const { life, id } = await up(world);
  world.hooks = () => {
    throw new AenvError("NOT_FOUND", "POST /hooks: 404");
  };
  await life.engine.pause(id, { requireHealthyGuest: true }, signal);
  await life.engine.connect(id, HOUR, signal);
  assert.ok(life.engine.logs(id).every((l) => l.level !== "warn"));
});

test("a pause that wants a healthy guest is refused where the guest does not answer", async () => {
  await using world = await World.make();
  const { life, id } = await up(world);
  world.mood = "garbage";
  await assert.rejects(life.engine.pause(id, { requireHealthyGuest: true }, signal), { code: "UNAVAILABLE" });
  assert.equal(life.engine.get(id).state, "running");
});
