/**
 * Many callers ask for everything at once, at random, of the same few sandboxes, some give up, steps fail, VMs die, the
 * disk is full now and then, and the server dies in the middle. Whatever the order: no answer blames the node itself, what
 * the table says is what is on the host, and at the end nothing is left.
 */
import assert from "node:assert/strict";
import { existsSync } from "node:fs";
import { test } from "node:test";
import { AenvError, type ErrorCode, type SandboxId } from "@aenv/base";
import { type Life, until, World } from "./testing.ts";

const SEEDS = Array.from({ length: 12 }, (_, n) => n + 1);
const CALLS = 70;
/** So many writes that wait for their disk would measure the disk. */
const MEMORY = existsSync("/dev/shm") ? "/dev/shm" : undefined;
const HOUR = 3_600_000;

/** Errors that say that the node is at fault, or a file of it. */
const OWN_FAULT: ReadonlySet<ErrorCode> = new Set(["INTERNAL", "CORRUPT", "UNIMPLEMENTED"]);
const INJECTED = "a step failed as asked";

function randomFrom(seed: number): (below: number) => number {
  let x = seed * 7919;
  return (below) => {
    x = (x * 48_271) % 2_147_483_647;
    return x % below;
  };
}

const turns = async (n: number): Promise<void> => {
  for (let i = 0; i < n; i++) await new Promise((resolve) => setImmediate(resolve));
};

class Storm {
  readonly world: World;
  readonly random: (below: number) => number;
  life!: Life;
  /** One of so many steps fails; 0: none. */
  failing = 0;
  readonly wrong: string[] = [];
  pending = new Set<string>();
  readonly dead = new Set<Life>();
  readonly ids: SandboxId[] = [];
  calls = 0;
  readonly names = ["kept", "kept:v2", "other"];

  constructor(world: World, seed: number) {
    this.world = world;
    this.random = randomFrom(seed);
  }

  async start(): Promise<void> {
    this.life = await this.world.start({
      onStep: async () => {
        await turns(this.random(3));
        if (this.failing > 0 && this.random(this.failing) === 0) throw new AenvError("UNAVAILABLE", INJECTED);
      },
    });
  }

  id(): SandboxId {
    const id = this.ids[this.random(this.ids.length)];
    assert.ok(id);
    return id;
  }

  /** One call of a caller that may give up. */
  async call(): Promise<void> {
    const { engine } = this.life;
    const caller = new AbortController();
    const id = this.id();
    const name = this.names[this.random(this.names.length)] ?? "kept";
    const ops: Record<string, () => Promise<unknown>> = {
      create: async () => {
        const template = this.random(3) === 0 ? name : "base";
        this.ids.push(
          (await engine.create({ template, timeoutMs: HOUR, autoPause: this.random(2) === 0 }, caller.signal))
            .sandboxId,
        );
      },
      pause: () => engine.pause(id, { memory: this.random(4) > 0 }, caller.signal),
      connect: () => engine.connect(id, HOUR, caller.signal),
      snapshot: () => engine.snapshot(id, { name, memory: this.random(4) > 0 }, caller.signal),
      "delete snapshot": () => engine.deleteSnapshot(name),
      fork: async () => {
        const options = { count: 1 + this.random(3), timeoutMs: HOUR, atomic: this.random(2) === 0 };
        for (const r of await engine.fork(id, options, caller.signal))
          if ("view" in r) this.ids.push(r.view.sandboxId);
          else throw r.error;
      },
      checkpoint: () => engine.checkpoint(id, { name: "cp" }, caller.signal),
      rewind: () => engine.rewind(id, "cp", {}, caller.signal),
      lineage: () => engine.lineage(id),
      traffic: () => engine.resumeForTraffic(id, caller.signal),
      timeout: () => engine.setTimeout(id, this.random(6) === 0 ? 0 : HOUR),
      network: () => engine.setNetwork(id, { allowInternetAccess: this.random(2) === 0 }),
      kill: async () => this.random(3) === 0 && (await engine.kill(id)),
      "its VM dies": async () => {
        const run = engine.route(id)?.run;
        if (run !== undefined && this.random(2) === 0) await this.life.driver.crash(run, "vmm-crash");
      },
      list: async () => {
        for (const { sandboxId } of engine.list().items) engine.get(sandboxId);
      },
    };
    const names = Object.keys(ops);
    const what = names[this.random(names.length)] ?? "list";
    const asked = this.judged(`${++this.calls}: ${what} of ${id}`, ops[what]);
    if (this.random(5) === 0) {
      await turns(this.random(12));
      caller.abort(new AenvError("CANCELLED", "the caller gave up"));
    }
    await asked;
  }

  /** Errors of the caller are fine. */
  async judged(what: string, ask: (() => Promise<unknown>) | undefined): Promise<void> {
    const { life, pending } = this;
    pending.add(what);
    try {
      await ask?.();
    } catch (e) {
      // Nobody hears what a dead server says.
      if (this.dead.has(life)) return;
      const own = !(e instanceof AenvError) || OWN_FAULT.has(e.code);
      if (own) this.wrong.push(`${what}: ${e instanceof Error ? e.stack : String(e)}`);
    } finally {
      pending.delete(what);
    }
  }

  async answered(): Promise<void> {
    await until(() => this.pending.size === 0, "").catch(() =>
      assert.deepEqual([...this.pending], [], "every call is answered"),
    );
  }

  /** What the table says is what is there. */
  async assertConsistent(): Promise<void> {
    const { engine, state } = this.life;
    await until(() => {
      const moving = engine.count();
      return moving.creating + moving.pausing + moving.resuming + moving.rewinding + moving.killing === 0;
    }, "no transition goes on for ever");
    const running = engine.list().items.filter((s) => s.state === "running");
    await until(() => this.world.vmms.alive.length === running.length, `${running.length} VMs for as many sandboxes`);
    for (const { sandboxId } of running) {
      const run = engine.route(sandboxId)?.run;
      assert.ok(run !== undefined && this.world.vmms.alive.includes(run), sandboxId);
      assert.equal(state.sandboxes.get(sandboxId)?.run, run);
    }
    for (const record of state.sandboxes.live()) assert.equal(engine.get(record.id).state, record.state);
    const layers = new Set(state.layers.list().map((l) => l.id));
    for (const s of state.snapshots.list()) for (const l of s.layers) assert.ok(layers.has(l.id), `${s.id}: ${l.id}`);
  }
}

for (const seed of SEEDS)
  test(`storm ${seed}`, { timeout: 300_000 }, async () => {
    await using world = await World.make(MEMORY);
    const storm = new Storm(world, seed);
    await storm.start();
    await world.addTemplate(storm.life, "base");
    const empty = await world.inventory();
    for (let n = 0; n < 3; n++)
      storm.ids.push(
        (await storm.life.engine.create({ template: "base", timeoutMs: HOUR }, new AbortController().signal)).sandboxId,
      );
    for (let part = 0; part < 3; part++) {
      storm.failing = part === 0 ? 0 : 40;
      for (let n = 0; n < CALLS / 3; n++) {
        if (part === 2) world.storeFails = storm.random(8) === 0 ? 13 : 0;
        void storm.call();
        await turns(storm.random(8));
      }
      world.storeFails = 0;
      if (part === 1) {
        // In the middle of what goes on; callers of a dead server never hear.
        await turns(storm.random(20));
        storm.dead.add(storm.life);
        await storm.life.crash();
        storm.pending = new Set();
        storm.failing = 0;
        await storm.start();
      } else await storm.answered();
      storm.failing = 0;
      world.clock.advance(60_000);
      await storm.assertConsistent();
      assert.deepEqual(storm.wrong, []);
    }
    const { engine, state } = storm.life;
    for (const { sandboxId } of engine.list().items) {
      await engine.connect(sandboxId, HOUR, new AbortController().signal);
      await engine.kill(sandboxId);
    }
    for (const { snapshotId } of engine.listSnapshots().items)
      assert.equal(await engine.deleteSnapshot(snapshotId), true);
    await until(async () => {
      world.clock.advance(1000);
      return JSON.stringify(await world.inventory()) === JSON.stringify(empty);
    }, "all is freed").catch(async () => assert.deepEqual(await world.inventory(), empty));
    assert.deepEqual(state.resources.list(), []);
    assert.deepEqual(state.runs.list(), []);
    assert.equal(state.snapshots.list().length, 1);
  });
