import assert from "node:assert/strict";
import { test } from "node:test";
import { AenvError, type SandboxId } from "@aenv/base";
import { run } from "@aenv/host";
import { NotFoundError, RateLimitError, Sandbox, type SandboxInfo, SandboxNotFoundError, Template } from "e2b";
import { type FakeServer, fakeServer } from "../test/fake-server.ts";

const LIMIT = { timeout: 60_000 };

async function listening(): Promise<FakeServer & { opts: { apiKey: string; apiUrl: string; sandboxUrl: string } }> {
  const server = fakeServer();
  const apiUrl = await server.app.listen({ port: 0, host: "127.0.0.1" });
  return { ...server, opts: { apiKey: server.key, apiUrl, sandboxUrl: apiUrl } };
}

async function listed(paginator: ReturnType<typeof Sandbox.list>): Promise<SandboxInfo[]> {
  const all: SandboxInfo[] = [];
  while (paginator.hasNext) all.push(...(await paginator.nextItems()));
  return all;
}

test("the TypeScript SDK creates, reads, extends, connects, measures and kills", LIMIT, async () => {
  await using server = await listening();
  const { opts } = server;
  const sandbox = await Sandbox.create("base", {
    ...opts,
    timeoutMs: 60_000,
    metadata: { "k 1": "v&w" },
    envs: { A: "1" },
  });
  const info = await sandbox.getInfo();
  assert.equal(info.sandboxId, sandbox.sandboxId);
  assert.equal(info.state, "running");
  assert.deepEqual(info.metadata, { "k 1": "v&w" });
  assert.equal(info.endAt.getTime() - info.startedAt.getTime(), 60_000);

  await sandbox.setTimeout(100_000);
  const longer = (await sandbox.getInfo()).endAt.getTime();
  assert.ok(longer > info.endAt.getTime());
  const again = await Sandbox.connect(sandbox.sandboxId, { ...opts, timeoutMs: 1000 });
  assert.equal(again.sandboxId, sandbox.sandboxId);
  assert.equal((await again.getInfo()).endAt.getTime(), longer);

  const [sample] = await sandbox.getMetrics();
  assert.equal(sample?.cpuCount, 1);
  assert.ok(sample.timestamp instanceof Date && sample.memTotal > sample.memUsed);
  assert.deepEqual(await sandbox.getMetrics({ start: new Date(0), end: new Date(1000) }), []);

  assert.equal(await sandbox.kill(), true);
  assert.equal(await Sandbox.kill(sandbox.sandboxId, opts), false);
  assert.equal(await Sandbox.kill("non-existing-sandbox", opts), false);
  await assert.rejects(Sandbox.connect(sandbox.sandboxId, opts), NotFoundError);
  await assert.rejects(Sandbox.getInfo("non-existing-sandbox", opts), NotFoundError);
});

test("the TypeScript SDK pages and filters its list", LIMIT, async () => {
  await using server = await listening();
  const { opts } = server;
  const ids: string[] = [];
  for (const n of ["1", "2", "3"])
    ids.unshift((await Sandbox.create("base", { ...opts, metadata: { n, "a=b": "ü %" } })).sandboxId);
  const found = await listed(Sandbox.list({ ...opts, limit: 1, query: { metadata: { "a=b": "ü %" } } }));
  assert.deepEqual(found.map((s) => s.sandboxId).toSorted(), ids.toSorted());
  const one = await listed(Sandbox.list({ ...opts, query: { metadata: { n: "2" }, state: ["running", "paused"] } }));
  assert.deepEqual(
    one.map((s) => s.sandboxId),
    [ids[1]],
  );
  assert.deepEqual(await listed(Sandbox.list({ ...opts, query: { metadata: { n: "4" } } })), []);
});

test("the TypeScript SDK gets errors that it understands", LIMIT, async () => {
  await using server = await listening();
  const { opts } = server;
  await assert.rejects(Sandbox.create("no-such-template", opts), /no-such-template/);
  await assert.rejects(Sandbox.create("base", { ...opts, apiKey: `e2b_${"0".repeat(40)}` }), {
    name: "AuthenticationError",
  });
  await assert.rejects(Sandbox.create("base", { ...opts, timeoutMs: 0 }), /at least 1 second/);
  await assert.rejects(Sandbox.create("base", { ...opts, allowInternetAccess: false }), /allow_internet_access/);
  assert.equal(await Template.exists("base", opts), true);
  assert.equal(await Template.exists("no-such-template", opts), false);
});

test("the TypeScript SDK pauses, resumes, forks, and keeps snapshots", LIMIT, async () => {
  await using server = await listening();
  const { opts, engine } = server;
  const lifecycle = { onTimeout: "pause", autoResume: true } as const;
  const sandbox = await Sandbox.create("base", { ...opts, timeoutMs: 60_000, lifecycle });
  assert.deepEqual((await sandbox.getInfo()).lifecycle, lifecycle);
  assert.equal(await sandbox.pause(), true);
  assert.equal(await sandbox.pause(), false);
  assert.equal(engine.states.keptMemory.get(sandbox.sandboxId as SandboxId), true);
  assert.equal((await sandbox.getInfo()).state, "paused");
  const other = await Sandbox.create("base", opts);
  const ids = async (state: ("running" | "paused")[]) =>
    (await listed(Sandbox.list({ ...opts, limit: 1, query: { state } }))).map((s) => s.sandboxId);
  assert.deepEqual(await ids(["paused"]), [sandbox.sandboxId]);
  assert.deepEqual(await ids(["running"]), [other.sandboxId]);
  assert.deepEqual(new Set(await ids(["running", "paused"])), new Set([sandbox.sandboxId, other.sandboxId]));
  const again = await Sandbox.connect(sandbox.sandboxId, { ...opts, onResume: "reboot" });
  assert.equal((await again.getInfo()).state, "running");
  assert.deepEqual(engine.resumedWith, { memory: false });
  assert.equal(await sandbox.pause({ keepMemory: false }), true);
  assert.equal(engine.states.keptMemory.get(sandbox.sandboxId as SandboxId), false);
  await Sandbox.connect(sandbox.sandboxId, opts);

  engine.failChild.set(1, new AenvError("RATE_LIMITED", "too many sandboxes"));
  const [one, two, three] = await sandbox.fork({ count: 3, timeoutMs: 30_000 });
  assert.ok(one instanceof Sandbox && three instanceof Sandbox);
  assert.notEqual(one.sandboxId, three.sandboxId);
  assert.ok(two instanceof RateLimitError);
  assert.equal((await Sandbox.fork(sandbox.sandboxId, opts)).length, 1);
  await assert.rejects(sandbox.fork({ count: 17 }), /at most 16/);

  const first = await sandbox.createSnapshot({ name: "kept:v1" });
  assert.deepEqual(first.names, [first.snapshotId]);
  const second = await sandbox.createSnapshot();
  const from = await Sandbox.create(first.snapshotId, opts);
  const snapshots = async (paginator: ReturnType<typeof Sandbox.listSnapshots>) => {
    const found: string[] = [];
    while (paginator.hasNext) found.push(...(await paginator.nextItems()).map((s) => s.snapshotId));
    return found;
  };
  assert.deepEqual(
    new Set(await snapshots(sandbox.listSnapshots({ limit: 1 }))),
    new Set([first.snapshotId, second.snapshotId]),
  );
  assert.deepEqual(await snapshots(from.listSnapshots()), []);
  assert.deepEqual(await snapshots(Sandbox.listSnapshots({ ...opts, name: "kept" })), [first.snapshotId]);
  assert.deepEqual(await snapshots(Sandbox.listSnapshots({ ...opts, name: "nope" })), []);
  for (const { snapshotId } of [first, second]) {
    assert.equal(await Sandbox.deleteSnapshot(snapshotId, opts), true);
    assert.equal(await Sandbox.deleteSnapshot(snapshotId, opts), false);
  }

  await sandbox.kill();
  await assert.rejects(sandbox.pause(), SandboxNotFoundError);
  await assert.rejects(sandbox.fork(), SandboxNotFoundError);
  await assert.rejects(sandbox.createSnapshot(), SandboxNotFoundError);
  await assert.rejects(Sandbox.connect(sandbox.sandboxId, opts), SandboxNotFoundError);
});

const python = process.env["AENV_TEST_PYTHON"];
test("the Python SDK does the same", {
  ...LIMIT,
  skip: python === undefined && "AENV_TEST_PYTHON names no Python with e2b (npm test sets it)",
}, async () => {
  await using server = await listening();
  const { stdout } = await run(python ?? "", [`${import.meta.dirname}/../test/sdk_shapes.py`], {
    env: {
      PATH: process.env["PATH"] ?? "",
      E2B_API_KEY: server.key,
      E2B_API_URL: server.opts.apiUrl,
      E2B_SANDBOX_URL: server.opts.apiUrl,
    },
  });
  assert.equal(stdout.trim().split("\n").at(-1), "all as expected");
});
