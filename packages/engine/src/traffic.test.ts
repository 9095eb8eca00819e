import assert from "node:assert/strict";
import { test } from "node:test";
import type { SandboxId } from "@aenv/base";
import { type Life, until, World } from "./testing.ts";
import type { CreateOptions } from "./types.ts";

const signal = new AbortController().signal;
const MINUTE = 60_000;

async function up(world: World, over: Partial<CreateOptions> = {}): Promise<{ life: Life; id: SandboxId }> {
  const life = await world.start();
  await world.addTemplate(life, "base");
  const options = { template: "base", timeoutMs: MINUTE, autoPause: true, autoResume: true, ...over };
  const { sandboxId } = await life.engine.create(options, signal);
  return { life, id: sandboxId };
}

test("traffic wakes a sandbox that may be woken, once for all who ask at the same time", async () => {
  await using world = await World.make();
  const { life, id } = await up(world, { allowPublicTraffic: false });
  const { engine } = life;
  assert.equal(engine.asleep(id), undefined, "it runs");
  const { accessToken, trafficToken } = engine.route(id) ?? {};
  assert.ok(accessToken !== undefined && trafficToken !== undefined);
  const pausing = engine.pause(id, {}, signal);
  await until(() => engine.get(id).state === "pausing", "it is being paused");
  assert.deepEqual(engine.asleep(id), { accessToken, trafficToken });
  const runs = await Promise.all([1, 2, 3].map(() => engine.resumeForTraffic(id, signal)));
  assert.equal(await pausing, true);
  assert.ok(runs[0]);
  assert.deepEqual(runs, [runs[0], runs[0], runs[0]]);
  assert.deepEqual(engine.route(id), runs[0]);
});

test("it then has 5 minutes, or its own time where that is longer", async () => {
  for (const [own, wanted] of [
    [1, 5],
    [20, 20],
  ] as const) {
    await using world = await World.make();
    const { life, id } = await up(world, { timeoutMs: own * MINUTE });
    await life.engine.pause(id, {}, signal);
    world.clock.advance(30 * MINUTE);
    await life.engine.resumeForTraffic(id, signal);
    assert.equal(life.engine.get(id).endAt, world.clock.now() + wanted * MINUTE);
  }
});

test("traffic does not wake who did not ask for it, who has no memory to go on from, and who is not there", async () => {
  await using world = await World.make();
  const { life, id } = await up(world, { autoResume: false });
  const { engine } = life;
  await engine.pause(id, {}, signal);
  assert.equal(engine.asleep(id), undefined);
  assert.equal(await engine.resumeForTraffic(id, signal), undefined);

  const options = { template: "base", timeoutMs: MINUTE, autoPause: true, autoResume: true };
  const diskOnly = (await engine.create(options, signal)).sandboxId;
  const pausing = engine.pause(diskOnly, { memory: false }, signal);
  await until(() => engine.get(diskOnly).state === "pausing", "it is being paused");
  assert.equal(await engine.resumeForTraffic(diskOnly, signal), undefined);
  assert.equal(await pausing, true);
  assert.equal(engine.asleep(diskOnly), undefined);
  assert.equal(engine.get(diskOnly).state, "paused");

  assert.equal(engine.asleep("ilocneverwas" as SandboxId), undefined);
  assert.equal(await engine.resumeForTraffic("ilocneverwas" as SandboxId, signal), undefined);
});
