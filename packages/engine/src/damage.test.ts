import assert from "node:assert/strict";
import { rm, truncate } from "node:fs/promises";
import { test } from "node:test";
import type { SnapshotRecord } from "@aenv/state";
import { damageOf } from "./damage.ts";
import { until, World } from "./testing.ts";

const signal = new AbortController().signal;
const POOL = {
  pinned: ["base"],
  watermarks: { hot: { low: 1, high: 1 }, prepared: { low: 0, high: 0 } },
  perTemplate: {},
  refillConcurrency: 1,
};

const DAMAGE: readonly [what: string, file: (s: SnapshotRecord) => string, hurt: (path: string) => Promise<void>][] = [
  ["missing memory", (s) => s.memory[0]?.path ?? "", (path) => rm(path)],
  ["short memory", (s) => s.memory[0]?.path ?? "", (path) => truncate(path, 4096)],
  ["missing device state", (s) => s.devicePath, (path) => rm(path)],
  ["empty device state", (s) => s.devicePath, (path) => truncate(path, 0)],
  ["missing layer", (s) => s.layers[0]?.path ?? "", (path) => rm(path)],
  ["short layer", (s) => s.layers[0]?.path ?? "", (path) => truncate(path, 1)],
];

for (const [what, fileOf, hurt] of DAMAGE)
  test(`${what} of a snapshot is told with its file`, async () => {
    await using world = await World.make();
    const life = await world.start();
    await world.addTemplate(life, "base");
    const snapshot = life.state.snapshots.get(life.engine.templates.get("base").snapshotId);
    assert.ok(snapshot);
    assert.equal(await damageOf(snapshot), undefined);
    await hurt(fileOf(snapshot));
    const error = await damageOf(snapshot);
    assert.equal(error?.code, "CORRUPT");
    assert.ok(error.message.includes(fileOf(snapshot)), error.message);
  });

test("a create of a damaged template and its spares name the file, until a spare can be made again", async () => {
  await using world = await World.make();
  const life = await world.start({ config: { pool: POOL } });
  await world.addTemplate(life, "base");
  const pool = () => life.engine.pools().find((p) => p.template === "base");
  await until(() => pool()?.hot === 1, "the pool is full");
  const snapshot = life.state.snapshots.get(life.engine.templates.get("base").snapshotId);
  assert.ok(snapshot);
  assert.equal(pool()?.lastError, undefined);
  const create = () => life.engine.create({ template: "base", timeoutMs: 60_000 }, signal);
  const memoryPath = snapshot.memory[0]?.path ?? "";
  await rm(memoryPath);
  // The spare does not need the file.
  await create();
  await until(() => pool()?.lastError !== undefined, "the refill fails");
  assert.equal(pool()?.lastError?.code, "CORRUPT");
  assert.ok(pool()?.lastError?.message.includes(memoryPath));
  await assert.rejects(create(), (e: Error) => e.message.includes(memoryPath));
});
