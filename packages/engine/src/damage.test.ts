import assert from "node:assert/strict";
import { appendFile, rm, truncate } from "node:fs/promises";
import { test } from "node:test";
import { AenvError } from "@aenv/base";
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

for (const [what, fileOf, hurt] of [
  ["a delta that is cut short", (s) => s.memory.at(-1)?.path, (path) => truncate(path, 10)],
  ["a delta with a wrong end", (s) => s.memory.at(-1)?.path, (path) => appendFile(path, "x")],
  ["a delta that is missing", (s) => s.memory.at(-1)?.path, (path) => rm(path)],
  ["a device state that was changed", (s) => s.devicePath, (path) => appendFile(path, " ")],
  ["a device state that is missing", (s) => s.devicePath, (path) => rm(path)],
  ["a flat file that is cut short", (s) => s.memory[0]?.path, (path) => truncate(path, 4096)],
] as readonly [string, (s: SnapshotRecord) => string | undefined, (path: string) => Promise<void>][])
  test(`${what}: no resume, fork or rewind to it is made, and the error names the file`, async () => {
    await using world = await World.make();
    const life = await world.start();
    await world.addTemplate(life, "base");
    const { engine } = life;
    const { sandboxId: id } = await engine.create({ template: "base", timeoutMs: 60_000 }, signal);
    await engine.checkpoint(id, { name: "cp" }, signal);
    await engine.pause(id, {}, signal);
    const { snapshotId } = await engine.lineage(id);
    const snapshot = life.state.snapshots.get(snapshotId);
    const path = snapshot && fileOf(snapshot);
    assert.ok(path !== undefined);
    await hurt(path);
    const named = (e: unknown): boolean => e instanceof AenvError && e.code === "CORRUPT" && e.message.includes(path);
    await assert.rejects(engine.connect(id, 60_000, signal), named);
    const [child] = await engine.fork(id, { count: 1, timeoutMs: 60_000 }, signal);
    assert.ok(child && "error" in child && named(child.error));
    assert.equal(engine.get(id).state, "paused");
    // Its checkpoint stands on other files, the flat one aside.
    if (snapshot?.memory[0]?.path === path) return;
    assert.equal((await engine.rewind(id, "cp", {}, signal)).state, "running");
  });
