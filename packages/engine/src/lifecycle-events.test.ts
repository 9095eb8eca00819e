import assert from "node:assert/strict";
import { test } from "node:test";
import { LIFECYCLE } from "@aenv/state";
import { World } from "./testing.ts";

const signal = new AbortController().signal;

test("every step of a sandbox's life is an event that outsiders can be told of", async () => {
  await using world = await World.make();
  const life = await world.start();
  await world.addTemplate(life, "base");
  const { engine } = life;
  const { sandboxId: id } = await engine.create({ template: "base", timeoutMs: 60_000 }, signal);
  const seen = (): string[] => engine.logs(id).map((e) => e.message);
  const steps: [string, () => Promise<unknown>][] = [
    [LIFECYCLE.updated, () => engine.setTimeout(id, 120_000)],
    [LIFECYCLE.updated, () => engine.setNetwork(id, { denyOut: ["1.1.1.1"] })],
    [LIFECYCLE.checkpointed, () => engine.snapshot(id, {}, signal)],
    [LIFECYCLE.checkpointed, () => engine.checkpoint(id, {}, signal)],
    [LIFECYCLE.paused, () => engine.pause(id, {}, signal)],
    [LIFECYCLE.resumed, () => engine.connect(id, 60_000, signal)],
    [LIFECYCLE.killed, () => engine.kill(id)],
  ];
  assert.deepEqual(seen(), [LIFECYCLE.created]);
  for (const [message, step] of steps) {
    const before = seen().length;
    await step();
    assert.ok(seen().slice(before).includes(message), `${message}: ${seen().slice(before).join(", ")}`);
  }
  const page = engine.logPage(id, { limit: 2, backward: true });
  assert.equal(page.entries[0]?.message, LIFECYCLE.killed);
  assert.equal(engine.logPage(id, { limit: 100, ...(page.next ? { after: page.next } : {}) }).entries.length, 1);
});
