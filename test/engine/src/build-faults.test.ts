/** blockd or vmd is killed in the middle of a template build: nothing is left of the build, and the next one works. */
import assert from "node:assert/strict";
import { after, before, test } from "node:test";
import { sleep } from "@aenv/base";
import type { Engine, LayerFile } from "@aenv/engine";
import { TestNode } from "./node.ts";

const signal = new AbortController().signal;
const spares = { low: 0, high: 0 };
const POOL = { pinned: [], watermarks: { hot: spares, prepared: spares }, perTemplate: {} };

let node: TestNode;
let engine: Engine;
let layer: LayerFile;
/** Called at every step of the engine. */
let onStep: (name: string) => Promise<void> | void = () => {};
before(async () => {
  node = await TestNode.make();
  engine = await node.open({ pool: POOL }, (name) => onStep(name));
  layer = await node.baseLayer();
  await node.buildTemplate("good", layer);
});
after(() => node[Symbol.asyncDispose]());

async function settled(): Promise<void> {
  const end = performance.now() + 120_000;
  while (engine.resources().length > 0) {
    assert.ok(performance.now() < end, `never released: ${JSON.stringify(engine.resources())}`);
    await sleep(50);
  }
}

for (const [name, at] of [
  ["blockd", "disk:after"],
  ["blockd", "seal:before"],
  ["vmd", "boot:after"],
] as const)
  test(`kill -9 of ${name} at ${at} of a build`, { timeout: 300_000 }, async () => {
    const artifacts = await node.artifacts();
    let back: Promise<void> | undefined;
    onStep = async (step) => {
      if (step !== at || back) return;
      await node.stopChild(name, "SIGKILL");
      back = node.startChild(name);
    };
    const failure = await node.buildTemplate("next", layer).then(
      () => undefined,
      (e: unknown) => e,
    );
    onStep = () => {};
    assert.ok(back, `the build came to ${at}`);
    await back;
    await settled();
    assert.deepEqual(Object.values(await node.leftovers()).flat(), []);
    if (failure !== undefined) {
      assert.equal(engine.templates.exists("next"), false);
      assert.deepEqual(await node.artifacts(), artifacts);
      await node.buildTemplate("next", layer);
    }
    for (const template of ["next", "good"]) {
      const { sandboxId } = await engine.create({ template, timeoutMs: 60_000 }, signal);
      assert.equal(await engine.kill(sandboxId), true);
    }
    assert.equal(await engine.templates.delete("next"), true);
    await settled();
    assert.deepEqual(await node.artifacts(), artifacts);
    assert.deepEqual(Object.values(await node.leftovers()).flat(), []);
  });
