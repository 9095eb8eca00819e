import assert from "node:assert/strict";
import { test } from "node:test";
import { until, World } from "./testing.ts";

const signal = new AbortController().signal;
const HOUR = 3_600_000;

test("nothing of a sandbox runs before somebody asks for it: the spares of its snapshots only wait", async () => {
  await using world = await World.make();
  const life = await world.start({
    config: {
      pool: { watermarks: { hot: { low: 1, high: 4 }, prepared: { low: 1, high: 4 } }, perTemplate: {} },
    },
  });
  await world.addTemplate(life, "base");
  const { engine } = life;
  const { sandboxId } = await engine.create({ template: "base", timeoutMs: HOUR }, signal);
  const { snapshotId } = await engine.snapshot(sandboxId, { name: "work" }, signal);
  const pool = (): ReturnType<typeof engine.pools>[number] | undefined =>
    engine.pools().find((p) => p.snapshotId !== engine.templates.get("base").snapshotId);
  for (let n = 0; n < 3; n++) {
    const made = await engine.create({ template: snapshotId, timeoutMs: HOUR }, signal);
    assert.notEqual(engine.timing(made.sandboxId)?.source, "hot");
    await until(() => pool()?.prepared === pool()?.wantPrepared && pool()?.refilling === 0, "the spares are made");
    assert.deepEqual([pool()?.hot, pool()?.wantHot], [0, 0]);
  }
  // Those of a template run.
  await until(() => engine.pools().some((p) => p !== pool() && p.hot > 0), "a spare of base runs");
});
