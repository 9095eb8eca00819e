import assert from "node:assert/strict";
import { test } from "node:test";
import { AenvError, type SandboxId } from "@aenv/base";
import type { SandboxForkResult, SnapshotInfo } from "@aenv/contract";
import { call, errorOf, send } from "../../test/client.ts";
import { type FakeServer, fakeServer, ManualClock } from "../../test/fake-server.ts";

const UNKNOWN = "iaaaabbbbccccdddd000";
const NO_IDS = [UNKNOWN, "non-existing-sandbox", "x", "..%2F..%2Fetc", "%00", "a".repeat(400)];
/** Of a route below /sandboxes/{id}, with a body that is right. */
const ACTIONS: readonly [method: "GET" | "POST", action: string, body: unknown][] = [
  ["POST", "pause", {}],
  ["POST", "resume", { timeout: 5 }],
  ["POST", "fork", { count: 2 }],
  ["POST", "snapshots", {}],
  ["POST", "checkpoints", {}],
  ["GET", "checkpoints", undefined],
  ["POST", "rewind", { checkpoint: "c" }],
  ["GET", "lineage", undefined],
];

async function make(server: FakeServer, body: Record<string, unknown> = {}): Promise<string> {
  const r = await call(server, "createSandboxV2", { body: { templateID: "base", ...body } });
  return r.body.sandboxID;
}

async function stateOf(server: FakeServer, sandboxID: string): Promise<string> {
  return (await call(server, "getSandbox", { params: { sandboxID } })).body.state;
}

async function paused(server: FakeServer, body: Record<string, unknown> = {}): Promise<string> {
  const sandboxID = await make(server, body);
  await call(server, "pauseSandbox", { params: { sandboxID } });
  return sandboxID;
}

test("every action on a sandbox that is not there is 404 with a numeric code", async () => {
  await using server = fakeServer();
  const killed = await make(server);
  await call(server, "killSandbox", { params: { sandboxID: killed } });
  for (const [method, action, body] of ACTIONS)
    for (const id of [...NO_IDS, killed])
      errorOf(await send(server, method, `/sandboxes/${id}/${action}`, { body }), 404, "NOT_FOUND");
});

test("strangers reach none of it", async () => {
  await using server = fakeServer();
  const id = await make(server);
  const headers = { "x-api-key": "e2b_00" };
  for (const [method, action, body] of ACTIONS)
    errorOf(await send(server, method, `/sandboxes/${id}/${action}`, { body, headers }), 401, "UNAUTHENTICATED");
  errorOf(await send(server, "GET", "/snapshots", { headers }), 401, "UNAUTHENTICATED");
  assert.equal(await stateOf(server, id), "running");
});

test("bodies of a wrong shape are 400, and nothing happens", async () => {
  await using server = fakeServer();
  const id = await make(server);
  const bad: [string, unknown][] = [
    ["pause", { memory: "no" }],
    ["pause", { requireHealthyGuest: "yes" }],
    ["snapshots", { memory: 0 }],
    ["resume", { timeout: 0 }],
    ["resume", { timeout: 1.5 }],
    ["resume", { autoPause: 1 }],
    ["fork", { count: 0 }],
    ["fork", { count: -1 }],
    ["fork", { count: 1.5 }],
    ["fork", { count: 17 }],
    ["fork", { count: 101 }],
    ["fork", { count: "2" }],
    ["fork", { timeout: 0 }],
    ["fork", { atomic: "yes" }],
    ["snapshots", { name: "" }],
    ["snapshots", { name: "Upper" }],
    ["snapshots", { name: "a b" }],
    ["snapshots", { name: "a/b/c" }],
    ["snapshots", { name: "a:b:c" }],
    ["snapshots", { name: "a:" }],
    ["snapshots", { name: "../etc" }],
    ["snapshots", { name: "n".repeat(129) }],
    ["snapshots", { name: 7 }],
    ["checkpoints", { name: "" }],
    ["checkpoints", { name: "-x" }],
    ["checkpoints", { name: "n".repeat(65) }],
    ["rewind", {}],
    ["rewind", { checkpoint: "" }],
    ["rewind", { checkpoint: "c", timeout: 0 }],
  ];
  for (const [action, body] of bad) {
    const r = await send(server, "POST", `/sandboxes/${id}/${action}`, { body });
    errorOf(r, 400, "INVALID_ARGUMENT");
  }
  errorOf(await send(server, "POST", `/sandboxes/${id}/rewind`), 400, "INVALID_ARGUMENT");
  assert.equal(server.engine.sandboxes.size, 1);
  assert.equal(await stateOf(server, id), "running");
  assert.deepEqual((await call(server, "listSnapshots")).body, []);
  assert.deepEqual((await call(server, "listCheckpoints", { params: { sandboxID: id } })).body, []);
});

test("pause answers 204, and 409 where it is paused already", async () => {
  await using server = fakeServer();
  for (const body of [undefined, {}, { memory: null }, { memory: true }, { memory: false }]) {
    const sandboxID = await make(server);
    const url = `/sandboxes/${sandboxID}/pause`;
    assert.equal((await send(server, "POST", url, { body })).status, 204);
    assert.equal(await stateOf(server, sandboxID), "paused");
    assert.equal(server.engine.states.keptMemory.get(sandboxID as SandboxId), body?.memory !== false);
    const again = await send(server, "POST", url, { body });
    errorOf(again, 409, "CONFLICT");
    assert.equal(again.headers["should-retry"], undefined);
  }
});

test("a pause that asks for a healthy guest is refused where the agent is silent, and may be tried again", async () => {
  await using server = fakeServer();
  const params = { sandboxID: await make(server) };
  server.engine.silent.add(params.sandboxID as SandboxId);
  const r = await send(server, "POST", `/sandboxes/${params.sandboxID}/pause`, { body: { requireHealthyGuest: true } });
  errorOf(r, 503, "UNAVAILABLE");
  assert.equal(await stateOf(server, params.sandboxID), "running");
  await call(server, "pauseSandbox", { params });
});

test("a sandbox that is changing its state: 503 for a pause, because each 409 tells the SDKs that it is paused; else 409", async () => {
  await using server = fakeServer();
  const id = await make(server);
  server.engine.changing.add(id as SandboxId);
  for (const [method, action, body] of ACTIONS.filter(([m]) => m === "POST")) {
    if (action === "resume") continue;
    const r = await send(server, method, `/sandboxes/${id}/${action}`, { body });
    if (action === "pause") errorOf(r, 503, "UNAVAILABLE");
    else errorOf(r, 409, "IN_TRANSITION");
    assert.equal(r.headers["should-retry"], "true", action);
  }
  for (const version of ["", "/v2"]) {
    const r = await send(server, "POST", `${version}/sandboxes/${id}/connect`, { body: { timeout: 5 } });
    errorOf(r, 409, "IN_TRANSITION");
  }
});

test("connect answers 200 for a running sandbox and 201 for one it resumed, with the same tokens", async () => {
  await using server = fakeServer();
  const made = await call(server, "createSandboxV2", { body: { templateID: "base" } });
  const params = { sandboxID: made.body.sandboxID };
  for (const id of ["connectSandbox", "connectSandboxV2"] as const) {
    await call(server, "pauseSandbox", { params });
    const first = await call(server, id, { params, body: { timeout: 60 } });
    assert.deepEqual([first.status, first.body], [201, made.body]);
    const second = await call(server, id, { params, body: { timeout: 60 } });
    assert.deepEqual([second.status, second.body], [200, made.body]);
  }
});

test("connect never shortens a life, and a resumed sandbox lives from now", async () => {
  const clock = new ManualClock();
  await using server = fakeServer({ clock });
  const params = { sandboxID: await make(server, { timeout: 600 }) };
  const endAt = async (): Promise<string> => (await call(server, "getSandbox", { params })).body.endAt;
  const before = await endAt();
  await call(server, "connectSandboxV2", { params, body: { timeout: 1 } });
  assert.equal(await endAt(), before);
  await call(server, "pauseSandbox", { params });
  clock.ms += 3_600_000;
  await call(server, "connectSandboxV2", { params });
  assert.equal(Date.parse(await endAt()) - clock.ms, 300_000);
});

test("whether memory is used is asked of the engine, and only where it was said", async () => {
  await using server = fakeServer();
  for (const version of ["/v2", ""])
    for (const memory of [undefined, null, true, false]) {
      const id = await paused(server);
      const body = { timeout: 60, memory };
      assert.equal((await send(server, "POST", `${version}/sandboxes/${id}/connect`, { body })).status, 201);
      assert.deepEqual(server.engine.resumedWith, { memory: memory !== false });
    }
});

test("the first form of resume is 201, and 409 where the sandbox runs", async () => {
  const clock = new ManualClock();
  await using server = fakeServer({ clock });
  const params = { sandboxID: await paused(server, { autoPause: true }) };
  const detail = async () => (await call(server, "getSandbox", { params })).body;
  assert.equal((await call(server, "resumeSandbox", { params })).status, 201);
  assert.equal(Date.parse((await detail()).endAt) - clock.ms, 15_000);
  assert.equal((await detail()).lifecycle?.onTimeout, "pause");
  errorOf(await send(server, "POST", `/sandboxes/${params.sandboxID}/resume`), 409, "CONFLICT");
  await call(server, "pauseSandbox", { params });
  const body = { timeout: 77, autoPause: false, memory: false };
  assert.equal((await call(server, "resumeSandbox", { params, body })).body.sandboxID, params.sandboxID);
  assert.equal(Date.parse((await detail()).endAt) - clock.ms, 77_000);
  assert.equal((await detail()).lifecycle?.onTimeout, "kill");
  assert.deepEqual(server.engine.resumedWith, { memory: false, autoPause: false });
});

test("a sandbox with autoPause is paused at its end, one without is gone", async () => {
  const clock = new ManualClock();
  await using server = fakeServer({ clock });
  const kept = await make(server, { timeout: 10, autoPause: true });
  const lost = await make(server, { timeout: 10 });
  clock.ms += 10_000;
  assert.equal(await stateOf(server, kept), "paused");
  errorOf(await send(server, "GET", `/sandboxes/${lost}`), 404, "NOT_FOUND");
  const list = async (state?: ("paused" | "running")[]) =>
    (await call(server, "listSandboxesV2", { query: state ? { state } : {} })).body.map((s) => s.sandboxID);
  assert.deepEqual(await list(["paused"]), [kept]);
  assert.deepEqual(await list(["running"]), []);
  assert.deepEqual(await list(), [kept]);
  assert.deepEqual((await call(server, "listSandboxes")).body, []);
  const node = (await call(server, "node")).body;
  assert.deepEqual(node.sandboxes, { running: 0, paused: 1 });
  await call(server, "killSandbox", { params: { sandboxID: kept } });
  errorOf(await send(server, "GET", `/sandboxes/${kept}`), 404, "NOT_FOUND");
});

test("autoResume cannot do without the memory that autoPauseMemory: false throws away", async () => {
  await using server = fakeServer();
  const body = { templateID: "base", autoPause: true, autoPauseMemory: false };
  const both = { ...body, autoResume: { enabled: true } };
  for (const url of ["/sandboxes", "/v2/sandboxes"]) {
    assert.match(
      errorOf(await send(server, "POST", url, { body: both }), 400, "INVALID_ARGUMENT").message,
      /autoResume/,
    );
    assert.equal((await send(server, "POST", url, { body })).status, 201);
    const off = { ...body, autoResume: { enabled: false } };
    assert.equal((await send(server, "POST", url, { body: off })).status, 201);
  }
});

const sandboxesOf = (results: SandboxForkResult[]) => results.flatMap((r) => (r.sandbox ? [r.sandbox] : []));

test("fork gives children with ids and tokens of their own, from running and from paused sandboxes", async () => {
  const clock = new ManualClock();
  await using server = fakeServer({ clock });
  const source = (await call(server, "createSandboxV2", { body: { templateID: "base", metadata: { a: "1" } } })).body;
  const params = { sandboxID: source.sandboxID };
  for (const state of ["running", "paused"]) {
    if (state === "paused") await call(server, "pauseSandbox", { params });
    const before = (await call(server, "getSandbox", { params })).body;
    const { status, body } = await call(server, "forkSandbox", { params, body: { count: 16, timeout: 50 } });
    assert.equal(status, 201);
    const children = sandboxesOf(body);
    assert.equal(children.length, 16);
    const all = [source, ...children];
    assert.equal(new Set(all.map((s) => s.sandboxID)).size, 17);
    assert.equal(new Set(all.map((s) => s.envdAccessToken)).size, 17);
    for (const { sandboxID } of children) {
      const child = (await call(server, "getSandbox", { params: { sandboxID } })).body;
      assert.deepEqual([child.state, child.metadata], ["running", { a: "1" }]);
      assert.equal(Date.parse(child.endAt) - clock.ms, 50_000);
    }
    assert.deepEqual((await call(server, "getSandbox", { params })).body, before);
  }
});

test("fork makes one child that lives 300 s unless it is told otherwise", async () => {
  const clock = new ManualClock();
  await using server = fakeServer({ clock });
  const params = { sandboxID: await make(server) };
  for (const body of [undefined, {}, { count: null, timeout: null, atomic: null }]) {
    const r = await send(server, "POST", `/sandboxes/${params.sandboxID}/fork`, { body });
    assert.equal(r.status, 201, r.text);
    const [child, ...more] = sandboxesOf(JSON.parse(r.text) as SandboxForkResult[]);
    assert.equal(more.length, 0);
    const detail = (await call(server, "getSandbox", { params: { sandboxID: child?.sandboxID ?? "" } })).body;
    assert.equal(Date.parse(detail.endAt) - clock.ms, 300_000);
  }
});

test("the number of children is limited by the node, and the refusal says how to raise it", async () => {
  await using server = fakeServer({ forkLimit: 3 });
  const params = { sandboxID: await make(server) };
  assert.equal((await call(server, "forkSandbox", { params, body: { count: 3 } })).body.length, 3);
  const r = await send(server, "POST", `/sandboxes/${params.sandboxID}/fork`, { body: { count: 4 } });
  assert.match(errorOf(r, 400, "INVALID_ARGUMENT").message, /at most 3 .*AENV_FORK_LIMIT/);
});

test("a child that fails is an error in its place; with atomic there is none then", async () => {
  await using server = fakeServer();
  const params = { sandboxID: await make(server) };
  server.engine.failChild.set(1, new AenvError("SLOT_EXHAUSTED", "no slot is free"));
  const some = (await call(server, "forkSandbox", { params, body: { count: 3 } })).body;
  assert.deepEqual(
    some.map((r) => Object.keys(r)),
    [["sandbox"], ["error"], ["sandbox"]],
  );
  assert.deepEqual(some[1]?.error, {
    code: 503,
    message: "no slot is free. Kill sandboxes or raise the limit of network slots.",
    error_code: "SLOT_EXHAUSTED",
  });
  const alive = server.engine.sandboxes.size;
  const none = (await call(server, "forkSandbox", { params, body: { count: 3, atomic: true } })).body;
  assert.deepEqual(
    none.map((r) => r.error?.error_code),
    ["CANCELLED", "SLOT_EXHAUSTED", "CANCELLED"],
  );
  assert.equal(server.engine.sandboxes.size, alive);
});

test("a snapshot has its names, can be created from when its source is gone, and is deleted once", async () => {
  await using server = fakeServer();
  const params = { sandboxID: await make(server) };
  const bare = (await call(server, "createSnapshot", { params })).body;
  assert.match(bare.snapshotID, /^t[a-z0-9]{16}:default$/);
  assert.deepEqual([bare.names, bare.sandboxID], [[], params.sandboxID]);
  const full = ["default/prepared:default", "default/prepared:v1"];
  for (const [name, is] of [
    ["prepared", full[0]],
    ["default/prepared:v1", full[1]],
  ] as const) {
    const { body } = await call(server, "createSnapshot", { params, body: { name } });
    assert.deepEqual([body.snapshotID, body.names], [is, [is]]);
  }
  assert.equal(await stateOf(server, params.sandboxID), "running");
  await call(server, "killSandbox", { params });
  for (const templateID of [bare.snapshotID, "prepared", "prepared:v1", ...full]) await make(server, { templateID });
  errorOf(await send(server, "POST", "/v2/sandboxes", { body: { templateID: "prepared:v2" } }), 404, "NOT_FOUND");
  for (const id of [bare.snapshotID, ...full]) {
    const url = `/templates/${encodeURIComponent(id)}`;
    assert.equal((await send(server, "DELETE", url)).status, 204, id);
    errorOf(await send(server, "DELETE", url), 404, "NOT_FOUND");
  }
  assert.deepEqual((await call(server, "listSnapshots")).body, []);
});

test("a snapshot is one of the disk only where memory is false", async () => {
  await using server = fakeServer();
  const params = { sandboxID: await make(server) };
  for (const memory of [undefined, null, true, false]) {
    assert.equal(
      (await send(server, "POST", `/sandboxes/${params.sandboxID}/snapshots`, { body: { memory } })).status,
      201,
    );
    assert.deepEqual(server.engine.snapshotWith, { team: "default", memory: memory !== false });
  }
});

test("the same name again replaces the snapshot, and a template's name is not taken", async () => {
  const clock = new ManualClock();
  await using server = fakeServer({ clock });
  const params = { sandboxID: await make(server) };
  const first = (await call(server, "createSnapshot", { params, body: { name: "again" } })).body;
  clock.ms += 1000;
  const second = (await call(server, "createSnapshot", { params, body: { name: "again" } })).body;
  assert.deepEqual([second.snapshotID, second.templateID], [first.snapshotID, first.templateID]);
  assert.deepEqual((await call(server, "listSnapshots")).body, [second]);
  for (const name of ["base", "default/base:v1"])
    errorOf(
      await send(server, "POST", `/sandboxes/${params.sandboxID}/snapshots`, { body: { name } }),
      409,
      "CONFLICT",
    );
  const foreign = { name: "others/thing" };
  const r = await send(server, "POST", `/sandboxes/${params.sandboxID}/snapshots`, { body: foreign });
  assert.match(errorOf(r, 403, "PERMISSION_DENIED").message, /team others.* write default\//);
});

test("snapshots are listed newest first, filtered, and page by page without a gap while others come and go", async () => {
  const clock = new ManualClock();
  await using server = fakeServer({ clock });
  const a = { sandboxID: await make(server) };
  const b = { sandboxID: await make(server) };
  const made: SnapshotInfo[] = [];
  for (let i = 0; i < 5; i++) {
    // Two have the same time: the cursor still tells them apart.
    if (i !== 3) clock.ms += 1000;
    const params = i % 2 === 0 ? a : b;
    made.unshift((await call(server, "createSnapshot", { params, body: { name: `n${i}` } })).body);
  }
  const list = async (query: Record<string, string | number>) => await call(server, "listSnapshots", { query });
  assert.deepEqual((await list({})).body, made);
  assert.deepEqual(
    (await list({ sandboxID: b.sandboxID })).body.map((s) => s.names),
    [["default/n3:default"], ["default/n1:default"]],
  );
  for (const name of ["n1", "n1:default", "default/n1", "default/n1:default"])
    assert.equal((await list({ name })).body.length, 1, name);
  for (const query of [{ name: "nope" }, { name: "n1:v9" }, { sandboxID: UNKNOWN }, { sandboxID: "no-such_id" }])
    assert.deepEqual((await list(query)).body, []);
  for (const query of ["limit=0", "limit=101", "limit=x", "nextToken=%%"])
    errorOf(await send(server, "GET", `/snapshots?${query}`), 400, "INVALID_ARGUMENT");
  const seen: SnapshotInfo[] = [];
  let nextToken: string | undefined;
  do {
    const page = await list({ limit: 2, ...(nextToken === undefined ? {} : { nextToken }) });
    seen.push(...page.body);
    nextToken = page.headers["x-next-token"] as string | undefined;
    clock.ms += 1000;
    await call(server, "createSnapshot", { params: a });
    // The place where the page ended is gone.
    const last = seen.at(-1)?.snapshotID ?? "";
    assert.equal((await send(server, "DELETE", `/templates/${encodeURIComponent(last)}`)).status, 204);
  } while (nextToken !== undefined);
  assert.deepEqual(seen, made);
});

test("checkpoints are listed oldest first; rewind takes the sandbox back in place by id or name", async () => {
  const clock = new ManualClock();
  await using server = fakeServer({ clock });
  const made = (await call(server, "createSandboxV2", { body: { templateID: "base" } })).body;
  const params = { sandboxID: made.sandboxID };
  const first = (await call(server, "createCheckpoint", { params, body: { name: "before" } })).body;
  assert.deepEqual([first.name, first.sandboxID], ["before", params.sandboxID]);
  clock.ms += 1000;
  const second = (await call(server, "createCheckpoint", { params })).body;
  assert.equal("name" in second, false);
  assert.deepEqual((await call(server, "listCheckpoints", { params })).body, [first, second]);
  for (const checkpoint of ["before", second.checkpointID]) {
    const r = await call(server, "rewindSandbox", { params, body: { checkpoint } });
    assert.deepEqual([r.status, r.body], [200, made]);
  }
  const at = async () => (await call(server, "sandboxLineage", { params })).body.nodeID;
  const atSecond = await at();
  await call(server, "rewindSandbox", { params, body: { checkpoint: first.checkpointID } });
  assert.notEqual(await at(), atSecond);
  const other = { sandboxID: await make(server) };
  for (const [sandbox, checkpoint] of [
    [params, "nope"],
    [other, "before"],
    [other, first.checkpointID],
  ] as const) {
    const r = await send(server, "POST", `/sandboxes/${sandbox.sandboxID}/rewind`, { body: { checkpoint } });
    assert.match(errorOf(r, 404, "NOT_FOUND").message, new RegExp(`checkpoint .*${checkpoint}`));
  }
});

test("a rewound paused sandbox runs for a while, a running one keeps its end unless it is extended", async () => {
  const clock = new ManualClock();
  await using server = fakeServer({ clock });
  const params = { sandboxID: await make(server, { timeout: 100 }) };
  const left = async () => Date.parse((await call(server, "getSandbox", { params })).body.endAt) - clock.ms;
  await call(server, "createCheckpoint", { params, body: { name: "c" } });
  await call(server, "rewindSandbox", { params, body: { checkpoint: "c" } });
  assert.equal(await left(), 100_000);
  await call(server, "rewindSandbox", { params, body: { checkpoint: "c", timeout: 200 } });
  assert.equal(await left(), 200_000);
  await call(server, "rewindSandbox", { params, body: { checkpoint: "c", timeout: 1 } });
  assert.equal(await left(), 200_000);
  await call(server, "pauseSandbox", { params });
  clock.ms += 3_600_000;
  await call(server, "rewindSandbox", { params, body: { checkpoint: "c" } });
  assert.equal(await left(), 300_000);
  assert.equal(await stateOf(server, params.sandboxID), "running");
});

test("lineage shows each state after its parent, with cause, time and sizes, and who went on from it", async () => {
  await using server = fakeServer();
  const params = { sandboxID: await make(server) };
  await call(server, "createCheckpoint", { params, body: { name: "c" } });
  const [child] = sandboxesOf((await call(server, "forkSandbox", { params })).body);
  await call(server, "pauseSandbox", { params });
  const tree = (await call(server, "sandboxLineage", { params })).body;
  assert.equal(tree.sandboxID, params.sandboxID);
  assert.deepEqual(
    tree.nodes.map((n) => [n.cause, n.names]),
    [
      ["build", []],
      ["checkpoint", ["c"]],
      ["fork", []],
      ["pause", []],
    ],
  );
  const seen = new Set<string>();
  for (const n of tree.nodes) {
    assert.ok(n.parentID === undefined ? n.cause === "build" : seen.has(n.parentID));
    seen.add(n.nodeID);
  }
  assert.deepEqual(
    new Map(tree.sandboxes.map((s) => [s.sandboxID, [s.nodeID, s.state]])),
    new Map([
      [params.sandboxID, [tree.nodes[3]?.nodeID, "paused"]],
      [child?.sandboxID, [tree.nodes[2]?.nodeID, "running"]],
    ]),
  );
});
