import assert from "node:assert/strict";
import { test } from "node:test";
import { run } from "@aenv/host";
import { NotFoundError, Sandbox, type SandboxInfo, Template } from "e2b";
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
