import assert from "node:assert/strict";
import { test } from "node:test";
import { DEFAULT_TEAM, LIFECYCLE } from "@aenv/state";
import { newSandboxId, newSnapshotId, newTemplateId, type SandboxId } from "@aenv/base";
import { call, errorOf, send } from "../../test/client.ts";
import { type FakeServer, fakeServer } from "../../test/fake-server.ts";

const SECRET = "0123456789abcdef";

/** A sandbox as the database knows it; the fake engine keeps its own. */
function recorded(server: FakeServer, startedAt: number): SandboxId {
  const id = newSandboxId("tst");
  server.state.sandboxes.insert({
    id,
    team: DEFAULT_TEAM,
    template: newTemplateId(),
    snapshot: newSnapshotId(),
    state: "running",
    startedAt,
    endAt: startedAt + 1000,
    metadata: { k: "v" },
    envVars: {},
    secure: true,
    onTimeout: "kill",
    pauseMemory: true,
    autoResume: false,
    interrupted: false,
    timeoutMs: 1000,
    allowInternetAccess: null,
    allowPublicTraffic: true,
  });
  return id;
}

const happen = (server: FakeServer, id: SandboxId, message: string): void =>
  server.state.tx(() =>
    server.state.events.add(id, { timestamp: 1_700_000_000_000, level: "info", message, fields: { run: "r1" } }),
  );

test("logs by page: direction, level, search, and a token that loses nothing", async () => {
  await using server = fakeServer();
  const created = await call(server, "createSandboxV2", { body: { templateID: "base" } });
  const params = { sandboxID: created.body.sandboxID };
  const all = (await call(server, "sandboxLogsV2", { params })).body.logs.map((e) => e.message);
  assert.equal(all.length, 2);
  const first = await call(server, "sandboxLogsV2", { params, query: { limit: 1 } });
  const token = String(first.headers["x-next-token"]);
  const second = await call(server, "sandboxLogsV2", { params, query: { limit: 2, nextToken: token } });
  assert.deepEqual(
    [...first.body.logs, ...second.body.logs].map((e) => e.message),
    all,
  );
  assert.equal(second.headers["x-next-token"], undefined);
  const back = await call(server, "sandboxLogsV2", { params, query: { direction: "backward" } });
  assert.deepEqual(
    back.body.logs.map((e) => e.message),
    all.toReversed(),
  );
  const info = await call(server, "sandboxLogsV2", { params, query: { level: "info" } });
  assert.deepEqual(
    info.body.logs.map((e) => e.level),
    ["info"],
  );
  assert.equal((await call(server, "sandboxLogsV2", { params, query: { search: "Linux" } })).body.logs.length, 1);
  for (const q of ["nextToken=x", "limit=0", "limit=1001", "direction=up", "level=loud", "cursor=-1"])
    errorOf(await send(server, "GET", `/v2/sandboxes/${params.sandboxID}/logs?${q}`), 400, "INVALID_ARGUMENT");
  errorOf(await send(server, "GET", `/v2/sandboxes/${newSandboxId("tst")}/logs`), 404, "NOT_FOUND");
});

test("a team sees how many sandboxes it had; another team's numbers are nobody's", async () => {
  await using server = fakeServer();
  const now = Math.floor(Date.now() / 1000);
  for (let i = 0; i < 3; i++) recorded(server, (now - 100) * 1000);
  const params = { teamID: DEFAULT_TEAM };
  const { body } = await call(server, "teamMetrics", { params, query: { start: now - 600, end: now } });
  assert.ok(body.length > 10 && body.length <= 301, String(body.length));
  assert.deepEqual(
    body.filter((p) => p.concurrentSandboxes > 0).map((p) => [p.concurrentSandboxes, p.sandboxStartRate]),
    [[3, 0.3]],
  );
  const query = { start: now - 600, end: now };
  const most = await call(server, "maxTeamMetric", { params, query: { ...query, metric: "concurrent_sandboxes" } });
  assert.equal(most.body.value, 3);
  const rate = await call(server, "maxTeamMetric", { params, query: { ...query, metric: "sandbox_start_rate" } });
  assert.equal(rate.body.value, 0.3);
  errorOf(await send(server, "GET", "/teams/other/metrics"), 403, "PERMISSION_DENIED");
  errorOf(await send(server, "GET", `/teams/${DEFAULT_TEAM}/metrics/max`), 400, "INVALID_ARGUMENT");
  errorOf(await send(server, "GET", `/teams/${DEFAULT_TEAM}/metrics?start=9&end=5`), 400, "INVALID_ARGUMENT");
});

test("events of sandboxes, newest first, also of one sandbox, page by page", async () => {
  await using server = fakeServer();
  const [one, two] = [recorded(server, 1), recorded(server, 2)];
  happen(server, one, LIFECYCLE.created);
  happen(server, two, LIFECYCLE.created);
  happen(server, one, "last lines of its console");
  happen(server, one, LIFECYCLE.killed);
  const short = (e: { type: string; sandboxId: string }): string => `${e.type.split(".").at(-1)} ${e.sandboxId}`;
  const all = await call(server, "listEvents", {});
  assert.deepEqual(all.body.map(short), [`killed ${one}`, `created ${two}`, `created ${one}`]);
  assert.deepEqual(all.body[0]?.eventData, { sandbox_metadata: { k: "v" } });
  assert.equal(all.body[0]?.sandboxExecutionId, "r1");
  const mine = await call(server, "listSandboxEvents", { params: { sandboxID: one }, query: { orderAsc: true } });
  assert.deepEqual(mine.body.map(short), [`created ${one}`, `killed ${one}`]);
  const page = await call(server, "listEvents", { query: { offset: 1, limit: 1 } });
  assert.deepEqual(page.body.map(short), [`created ${two}`]);
});

test("webhooks are made, listed without their secret, changed and deleted", async () => {
  await using server = fakeServer();
  const body = { name: "n", url: "https://service.test/hook", signatureSecret: SECRET };
  const made = await call(server, "createWebhook", { body });
  assert.equal(made.body.events.length, 6);
  const params = { webhookID: made.body.id };
  const shown = await send(server, "GET", "/events/webhooks");
  assert.deepEqual(JSON.parse(shown.text), [made.body]);
  assert.ok(!shown.text.includes(SECRET));
  happen(server, recorded(server, 1), LIFECYCLE.created);
  const off = await call(server, "changeWebhook", { params, body: { enabled: false } });
  assert.deepEqual(off.body, { ...made.body, enabled: false });
  const on = await call(server, "changeWebhook", {
    params,
    body: { enabled: true, events: ["sandbox.lifecycle.killed"], name: "m" },
  });
  assert.deepEqual(on.body, { ...made.body, name: "m", events: ["sandbox.lifecycle.killed"] });
  assert.equal(server.state.webhooks.enabled()[0]?.told, server.state.events.latest());
  assert.deepEqual((await call(server, "getWebhook", { params })).body, on.body);
  assert.equal((await send(server, "DELETE", `/events/webhooks/${params.webhookID}`)).status, 200);
  errorOf(await send(server, "DELETE", `/events/webhooks/${params.webhookID}`), 404, "NOT_FOUND");
  errorOf(await send(server, "GET", `/events/webhooks/${params.webhookID}`), 404, "NOT_FOUND");
  errorOf(await send(server, "PATCH", `/events/webhooks/${params.webhookID}`, { body: {} }), 404, "NOT_FOUND");
});

test("a webhook that could not work is refused, and so is one too many", async () => {
  await using server = fakeServer();
  const good = { name: "n", url: "http://localhost:9/hook", signatureSecret: SECRET };
  for (const wrong of [
    { url: "ftp://a.test/" },
    { url: "not a url" },
    { signatureSecret: "short" },
    { events: [] },
    { events: ["sandbox.lifecycle.exploded"] },
    { name: "" },
  ])
    errorOf(await send(server, "POST", "/events/webhooks", { body: { ...good, ...wrong } }), 400, "INVALID_ARGUMENT");
  for (let i = 0; i < 20; i++) await call(server, "createWebhook", { body: good });
  errorOf(await send(server, "POST", "/events/webhooks", { body: good }), 409, "CONFLICT");
});
