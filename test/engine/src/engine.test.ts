/** The engine on real parts: QEMU, blockd, vmd, network slots, control groups and the guest's agent. */
import assert from "node:assert/strict";
import { after, before, test } from "node:test";
import { AenvError, type SandboxId, sleep } from "@aenv/base";
import type { Engine, EngineConfigInput, LaunchSource, SandboxView } from "@aenv/engine";
import { GuestClient } from "@aenv/guest";
import { procIdentity } from "@aenv/host";
import { TestNode } from "./node.ts";

const signal = new AbortController().signal;
const HOUR = 3_600_000;
const marks = (hot: number, prepared: number) => ({
  hot: { low: hot, high: hot },
  prepared: { low: prepared, high: prepared },
});
const pool = (hot: number, prepared: number): Partial<EngineConfigInput> => ({
  pool: { pinned: ["base"], watermarks: marks(hot, prepared), perTemplate: {} },
});

let node: TestNode;
before(async () => {
  node = await TestNode.make();
  await node.open(pool(0, 0));
  await node.buildTemplate("base", await node.baseLayer());
  await node.closeLife();
});
after(() => node[Symbol.asyncDispose]());

async function withEngine(config: Partial<EngineConfigInput>, fn: (engine: Engine) => Promise<void>): Promise<void> {
  const engine = await node.open(config);
  try {
    await fn(engine);
    for (const { sandboxId } of engine.list().items) await engine.kill(sandboxId);
  } finally {
    await node.closeLife();
  }
}

const create = (engine: Engine) => engine.create({ template: "base", timeoutMs: HOUR }, signal);

async function sh(engine: Engine, id: SandboxId, script: string, user = "user"): Promise<string> {
  const route = engine.route(id);
  assert.ok(route, `sandbox ${id} runs`);
  const guest = new GuestClient({
    host: route.host,
    ...(route.accessToken === undefined ? {} : { accessToken: route.accessToken }),
  });
  try {
    const result = await guest.exec({ cmd: "/bin/bash", args: ["-c", script], user }, AbortSignal.timeout(60_000));
    assert.equal(result.exitCode, 0, result.stderr);
    return result.stdout.trim();
  } finally {
    guest.close();
  }
}

async function until(condition: () => boolean, what: string): Promise<void> {
  const end = performance.now() + 120_000;
  while (!condition()) {
    assert.ok(performance.now() < end, `never: ${what}`);
    await sleep(20);
  }
}

const idle = (engine: Engine) => until(() => engine.resources().length === 0, "everything is released");
const warm = (engine: Engine) =>
  until(() => {
    const [p] = engine.pools();
    return p !== undefined && p.refilling === 0 && p.hot === p.wantHot && p.prepared === p.wantPrepared;
  }, "the pool is warm");

for (const [source, hot, prepared] of [
  ["cold", 0, 0],
  ["prepared", 0, 1],
  ["hot", 1, 0],
] as const satisfies readonly (readonly [LaunchSource, number, number])[])
  test(`two sandboxes, the first of a ${source} launch, are two machines; killed ones leave nothing`, async () => {
    await withEngine(pool(hot, prepared), async (engine) => {
      await warm(engine);
      const one = await create(engine);
      const two = await create(engine);
      assert.equal(engine.timing(one.sandboxId)?.source, source);
      const facts = async (v: SandboxView): Promise<string[]> =>
        (await sh(engine, v.sandboxId, "hostname; cat /etc/machine-id; head -c 16 /dev/urandom | base64")).split("\n");
      const [a, b] = await Promise.all([facts(one), facts(two)]);
      assert.equal(a[0], one.sandboxId);
      assert.equal(b[0], two.sandboxId);
      for (const n of [1, 2]) assert.notEqual(a[n], b[n]);
      const clock = Number(await sh(engine, one.sandboxId, "date +%s"));
      assert.ok(Math.abs(clock - Date.now() / 1000) < 5, "the guest's clock is right");
      await sh(engine, one.sandboxId, "echo mine > ~/file; sync");
      await sh(engine, two.sandboxId, "test ! -e ~/file");
      await engine.kill(one.sandboxId);
      await engine.kill(two.sandboxId);
    });
    await withEngine(pool(0, 0), async (engine) => {
      await idle(engine);
      for (const [kind, names] of Object.entries(await node.leftovers())) assert.deepEqual(names, [], kind);
    });
  });

test("a sandbox does not notice that the server is stopped and started", async () => {
  const engine = await node.open(pool(0, 0));
  const view = await create(engine);
  const seen = await sh(
    engine,
    view.sandboxId,
    "(sleep 1000 >/dev/null 2>&1 & echo $!); cat /proc/sys/kernel/random/boot_id",
  );
  await node.closeLife();
  await withEngine(pool(0, 0), async (again) => {
    assert.deepEqual(again.get(view.sandboxId), view);
    const [pid, boot] = seen.split("\n");
    assert.equal(await sh(again, view.sandboxId, `kill -0 ${pid} && cat /proc/sys/kernel/random/boot_id`), boot);
  });
});

const ENDS: readonly (readonly [string, string, (engine: Engine, id: SandboxId) => Promise<unknown>])[] = [
  ["its VMM is killed", "vmm-crash", async (engine, id) => process.kill(vmmPid(engine, id), "SIGKILL")],
  [
    "its kernel panics",
    "guest-panic",
    (engine, id) => sh(engine, id, "(sleep 0.1; echo c > /proc/sysrq-trigger) >/dev/null 2>&1 &", "root"),
  ],
];
for (const [how, cause, end] of ENDS)
  test(`a sandbox is over when ${how}, and says so`, async () => {
    await withEngine(pool(0, 0), async (engine) => {
      const { sandboxId } = await create(engine);
      const ended = Promise.withResolvers<SandboxId>();
      engine.onRunEnded((_run, id) => ended.resolve(id));
      await end(engine, sandboxId);
      assert.equal(await ended.promise, sandboxId);
      assert.throws(
        () => engine.get(sandboxId),
        (e: unknown) => e instanceof AenvError && e.code === "NOT_FOUND" && e.data["cause"] === cause,
      );
      assert.equal(engine.logs(sandboxId).findLast((e) => e.level === "error")?.fields["cause"], cause);
      await idle(engine);
    });
  });

function vmmPid(engine: Engine, id: SandboxId): number {
  const own = engine.resources().find((r) => r.kind === "process" && r.owner.id === id);
  assert.ok(own);
  return Number(own.name);
}

test("kill -9 of blockd loses nothing of a sandbox, and its waiting VMMs are replaced", async () => {
  await withEngine(pool(0, 1), async (engine) => {
    await warm(engine);
    const { sandboxId } = await create(engine);
    await warm(engine);
    const waiting = engine.resources().find((r) => r.kind === "process" && r.owner.kind === "spare")?.name;
    const sum = await sh(engine, sandboxId, "head -c 3000000 /dev/urandom > ~/data; sync; sha256sum < ~/data");
    await node.stopChild("blockd", "SIGKILL");
    await node.startChild("blockd");
    assert.equal(
      await sh(
        engine,
        sandboxId,
        "echo 3 | tee /proc/sys/vm/drop_caches >/dev/null; sha256sum < /home/user/data",
        "root",
      ),
      sum,
    );
    await until(() => {
      const now = engine.resources().find((r) => r.kind === "process" && r.owner.kind === "spare")?.name;
      return now !== undefined && now !== waiting;
    }, "the waiting VMM is another one");
    const next = await create(engine);
    assert.equal(await sh(engine, next.sandboxId, "echo ok"), "ok");
  });
});

test("eight creates at once all work and all end", async () => {
  await withEngine(pool(1, 1), async (engine) => {
    await warm(engine);
    const views = await Promise.all(Array.from({ length: 8 }, () => create(engine)));
    const names = await Promise.all(views.map((v) => sh(engine, v.sandboxId, "hostname")));
    assert.deepEqual(
      names,
      views.map((v) => v.sandboxId),
    );
    const vmms = views.map((v) => vmmPid(engine, v.sandboxId));
    assert.equal(new Set(vmms).size, 8);
    await Promise.all(views.map((v) => engine.kill(v.sandboxId)));
    assert.equal(engine.list().items.length, 0);
    for (const pid of vmms) assert.equal(procIdentity(pid), undefined, "a killed sandbox's VMM is dead at once");
  });
});
