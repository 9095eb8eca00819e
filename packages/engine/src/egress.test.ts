import assert from "node:assert/strict";
import { test } from "node:test";
import type { EgressPolicy } from "@aenv/network";
import { type Life, type StartOptions, World } from "./testing.ts";
import type { CreateOptions, EgressOptions } from "./types.ts";

const signal = new AbortController().signal;
const box = (over: Partial<CreateOptions> = {}): CreateOptions => ({ template: "base", timeoutMs: 60_000, ...over });
const CLOSED = { allowInternet: false, allow: ["1.1.1.1/32"], deny: [], domains: [] };
const OPEN = { allowInternet: true, allow: [], deny: [], domains: [] };
const RULES: EgressOptions = { allowOut: ["1.1.1.1"], denyOut: ["0.0.0.0/0"] };

async function up(world: World, options: StartOptions = {}): Promise<Life> {
  const life = await world.start(options);
  await world.addTemplate(life, "base");
  return life;
}

const policies = (world: World): EgressPolicy[] => [...world.policies.values()];

test("a sandbox's rules are in force before its guest learns whose it is, and shown as they were given", async () => {
  await using world = await World.make();
  const seen: unknown[] = [];
  const { engine } = await up(world, {
    onStep: (step) => {
      if (step === "init:before") seen.push(policies(world));
    },
  });
  seen.length = 0;
  const view = await engine.create(box({ network: RULES }), signal);
  assert.deepEqual(seen, [[CLOSED]]);
  assert.deepEqual(view.network, RULES);
  assert.deepEqual(engine.get(view.sandboxId).network, RULES);
});

test("rules that mean nothing make no sandbox and change none", async () => {
  await using world = await World.make();
  const { engine } = await up(world);
  const wrong: EgressOptions[] = [{ allowOut: ["example.com"] }, { denyOut: ["x"] }, { allowOut: ["1.2.3.4/40"] }];
  for (const network of wrong)
    await assert.rejects(engine.create(box({ network }), signal), { code: "INVALID_ARGUMENT" });
  assert.deepEqual(engine.list().items, []);
  const { sandboxId } = await engine.create(box({ network: RULES }), signal);
  for (const network of wrong)
    await assert.rejects(engine.setNetwork(sandboxId, network), { code: "INVALID_ARGUMENT" });
  assert.deepEqual(policies(world), [CLOSED]);
});

test("an update replaces the rules as a whole, for this run and for the record", async () => {
  await using world = await World.make();
  const life = await up(world);
  const { engine } = life;
  const { sandboxId } = await engine.create(box({ network: RULES }), signal);
  await engine.setNetwork(sandboxId, { allowInternetAccess: false });
  assert.deepEqual(policies(world), [{ ...CLOSED, allow: [] }]);
  assert.deepEqual([engine.get(sandboxId).allowInternetAccess, engine.get(sandboxId).network], [false, {}]);
  await engine.setNetwork(sandboxId, {});
  assert.deepEqual(policies(world), [OPEN]);
  assert.deepEqual([engine.get(sandboxId).allowInternetAccess, engine.get(sandboxId).network], [null, {}]);
  await engine.kill(sandboxId);
  await assert.rejects(engine.setNetwork(sandboxId, {}), { code: "NOT_FOUND" });
});

test("an update that fails leaves the rules before it", async () => {
  await using world = await World.make();
  const life = await up(world);
  const { sandboxId } = await life.engine.create(box({ network: RULES }), signal);
  world.policyFails = 1;
  await assert.rejects(life.engine.setNetwork(sandboxId, {}), { code: "UNAVAILABLE" });
  assert.deepEqual(policies(world), [CLOSED]);
  assert.deepEqual(life.engine.get(sandboxId).network, RULES);
  assert.deepEqual(life.state.sandboxes.get(sandboxId)?.network, RULES);
});

test("the next server has the rules, and makes them true where the last one died before it could", async () => {
  await using world = await World.make();
  const first = await up(world);
  const { sandboxId } = await first.engine.create(box(), signal);
  await first.engine.setNetwork(sandboxId, RULES);
  await first.crash();
  for (const index of world.policies.keys()) world.policies.set(index, OPEN);
  const { engine } = await world.start();
  assert.deepEqual(engine.get(sandboxId).network, RULES);
  assert.deepEqual(policies(world), [CLOSED]);
});

test("a guest trusts its sandbox's own authority from the first transform on, and the key is never shown", async () => {
  await using world = await World.make();
  const { engine } = await up(world);
  const rules = { "api.example.com": [{ transform: { headers: { "X-Key": "k" } } }] };
  const authority = { cert: "certificate of AgentENV sandbox egress", key: "key" };
  const first = await engine.create(box({ network: { rules } }), signal);
  assert.equal(world.inits.at(-1)?.body.caBundle, authority.cert);
  assert.deepEqual(policies(world).at(-1)?.authority, authority);
  assert.deepEqual(engine.get(first.sandboxId).network, { rules });
  await engine.kill(first.sandboxId);

  const { sandboxId } = await engine.create(box(), signal);
  assert.equal(world.inits.at(-1)?.body.caBundle, undefined);
  await engine.setNetwork(sandboxId, { rules });
  assert.deepEqual(
    world.trusted.map((t) => t.authority),
    [authority.cert],
  );
  assert.notEqual(world.trusted[0]?.token, "");
  assert.deepEqual(policies(world).at(-1)?.authority, authority);
  // It stays trusted, and is not made or told again.
  await engine.setNetwork(sandboxId, {});
  await engine.setNetwork(sandboxId, { rules });
  assert.equal(world.trusted.length, 1);
  assert.deepEqual(engine.get(sandboxId).network, { rules });
});
