import assert from "node:assert/strict";
import { test } from "node:test";
import { AenvError, type SandboxId } from "@aenv/base";
import { encodeMetadataFilter, type ListedSandbox } from "@aenv/contract";
import { call, errorOf, type Received, send } from "../../test/client.ts";
import { type FakeServer, fakeServer, ManualClock } from "../../test/fake-server.ts";

const UNKNOWN = "iaaaabbbbccccdddd000";
const NO_IDS = ["non-existing-sandbox", "x", "UPPERCASE1234", "..%2F..%2Fetc", "%00", "a".repeat(400), "i%20j"];

async function make(server: FakeServer, body: Record<string, unknown> = {}): Promise<string> {
  const r = await call(server, "createSandboxV2", { body: { templateID: "base", ...body } });
  return r.body.sandboxID;
}

test("create answers what the SDKs need, and the sandbox is there at once", async () => {
  await using server = fakeServer();
  const { status, body } = await call(server, "createSandboxV2", {
    body: { templateID: "base", metadata: { a: "1" }, envVars: { B: "2" } },
  });
  assert.equal(status, 201);
  assert.match(body.sandboxID, /^i[a-z0-9]{19}$/);
  assert.ok(body.clientID.length > 0);
  assert.match(body.envdAccessToken ?? "", /^[0-9a-f]{64}$/);
  assert.equal(body.domain, "localhost:8000");
  assert.equal(body.trafficAccessToken, null);
  assert.equal(body.alias, "base");
  const detail = await call(server, "getSandbox", { params: { sandboxID: body.sandboxID } });
  assert.equal(detail.body.envdAccessToken, body.envdAccessToken);
  assert.equal(detail.body.state, "running");
  assert.deepEqual(detail.body.metadata, { a: "1" });
  assert.deepEqual(detail.body.lifecycle, { onTimeout: "kill", autoResume: false });
  assert.equal(detail.body.allowInternetAccess, null);
});

test("the two versions of create differ in the time to live and in who may be insecure", async () => {
  const clock = new ManualClock();
  await using server = fakeServer({ clock });
  const lifeOf = async (r: Received): Promise<number> => {
    const { sandboxID } = JSON.parse(r.text) as { sandboxID: string };
    const d = await call(server, "getSandbox", { params: { sandboxID } });
    return (Date.parse(d.body.endAt) - Date.parse(d.body.startedAt)) / 1000;
  };
  const body = { templateID: "base" };
  assert.equal(await lifeOf(await send(server, "POST", "/v2/sandboxes", { body })), 300);
  assert.equal(await lifeOf(await send(server, "POST", "/sandboxes", { body })), 15);
  assert.equal(await lifeOf(await send(server, "POST", "/sandboxes", { body: { ...body, timeout: 77 } })), 77);
  const insecure = { ...body, secure: false };
  assert.doesNotMatch((await send(server, "POST", "/sandboxes", { body: insecure })).text, /envdAccessToken/);
  assert.match((await send(server, "POST", "/v2/sandboxes", { body: insecure })).text, /envdAccessToken/);
});

test("what the SDKs send by default, nulls and unknown fields are accepted", async () => {
  await using server = fakeServer();
  const bodies: Record<string, unknown>[] = [
    { templateID: "base", timeout: 300, secure: true, allow_internet_access: true, autoPause: false },
    { templateID: "base", metadata: {}, envVars: {}, mcp: null, network: null, volumeMounts: [], iam: {} },
    { templateID: "base", metadata: null, envVars: null, timeout: null, autoResume: { enabled: false }, network: {} },
    { templateID: "base", autoPauseMemory: true, fromTheFuture: { deep: [1, 2, 3] } },
    { templateID: "team/base:default", network: { allowOut: [], denyOut: [], allowPublicTraffic: true } },
  ];
  for (const body of bodies)
    for (const url of ["/sandboxes", "/v2/sandboxes"]) {
      const r = await send(server, "POST", url, { body });
      assert.equal(r.status, 201, r.text);
    }
});

test("an option that the node cannot keep is refused with a reason, never ignored", async () => {
  await using server = fakeServer({ features: { pause: false } });
  const options: [string, unknown][] = [
    ["autoPause", true],
    ["autoResume", { enabled: true }],
    ["allow_internet_access", false],
    ["volumeMounts", [{ name: "v", path: "/v" }]],
    ["mcp", { browserbase: {} }],
    ["iam", { tokens: { t: { audience: "a", tokenType: "JWT-SVID" } } }],
    ["network", { denyOut: ["0.0.0.0/0"] }],
    ["network", { allowOut: ["example.org"], denyOut: ["0.0.0.0/0"] }],
    ["network", { rules: { "a.example": [] } }],
    ["network", { egressProxy: { address: "127.0.0.1:1080" } }],
    ["network", { maskRequestHost: "two words" }],
    ["network", { maskRequestHost: "a.test\r\nX-Other: 1" }],
    ["network", { maskRequestHost: "${HOST}" }],
    ["network", { httpsPorts: [49_983] }],
  ];
  for (const [name, value] of options) {
    const r = await send(server, "POST", "/v2/sandboxes", { body: { templateID: "base", [name]: value } });
    assert.match(errorOf(r, 400, "INVALID_ARGUMENT").message, new RegExp(name), name);
  }
  assert.equal(server.engine.sandboxes.size, 0);
});

test("an option is passed on where the node can keep it", async () => {
  await using server = fakeServer({ features: { pause: true, internetOff: true, privateTraffic: true } });
  const { body } = await call(server, "createSandboxV2", {
    body: {
      templateID: "base",
      autoPause: true,
      autoResume: { enabled: true },
      allow_internet_access: false,
      network: { allowPublicTraffic: false, maskRequestHost: "localhost:${PORT}", httpsPorts: [8443, 8443] },
    },
  });
  assert.match(body.trafficAccessToken ?? "", /^[0-9a-f]{64}$/);
  const d = await call(server, "getSandbox", { params: { sandboxID: body.sandboxID } });
  assert.deepEqual(d.body.lifecycle, { onTimeout: "pause", autoResume: true });
  assert.equal(d.body.allowInternetAccess, false);
  assert.deepEqual(d.body.network, {
    allowPublicTraffic: false,
    maskRequestHost: "localhost:${PORT}",
    httpsPorts: [8443],
  });
});

test("egress rules are passed on, shown as they were given, and replaced as a whole", async () => {
  await using server = fakeServer({ features: { internetOff: true, egressRules: true } });
  const rules = { allowOut: ["1.1.1.1", "*.example.com"], denyOut: ["0.0.0.0/0"] };
  const { body } = await call(server, "createSandboxV2", { body: { templateID: "base", network: rules } });
  const params = { sandboxID: body.sandboxID };
  const detail = async (): Promise<unknown[]> => {
    const d = (await call(server, "getSandbox", { params })).body;
    return [d.allowInternetAccess, d.network];
  };
  assert.deepEqual(await detail(), [null, rules]);
  const put = async (update: Record<string, unknown>, status = 204): Promise<Received> => {
    const r = await send(server, "PUT", `/sandboxes/${body.sandboxID}/network`, { body: update });
    assert.equal(r.status, status, r.text);
    return r;
  };
  await put({ denyOut: ["9.9.9.9"], allow_internet_access: false, rules: {}, egressProxy: null });
  assert.deepEqual(await detail(), [false, { denyOut: ["9.9.9.9"] }]);
  await put({ fromTheFuture: 1 });
  assert.deepEqual(await detail(), [null, undefined]);
  for (const wrong of [{ allowOut: "1.1.1.1" }, { denyOut: [1] }, { allow_internet_access: "no" }, { rules: [] }])
    errorOf(await put(wrong, 400), 400, "INVALID_ARGUMENT");
  await put({ egressProxy: { address: "proxy.example.com:1080", username: "me", password: "secret" } });
  assert.deepEqual(await detail(), [null, { egressProxy: { address: "proxy.example.com:1080", username: "me" } }]);
  const transforms = { "api.example.com": [{ transform: { headers: { "X-Key": "k" } } }] };
  await put({ rules: transforms });
  assert.deepEqual(await detail(), [null, { rules: transforms }]);
  errorOf(await put({ rules: { "a.example": [{ transform: { headers: { a: 1 } } }] } }, 400), 400, "INVALID_ARGUMENT");
  errorOf(await send(server, "PUT", `/sandboxes/${UNKNOWN}/network`, { body: {} }), 404, "NOT_FOUND");
});

test("private traffic is refused where the edge cannot keep it private", async () => {
  await using server = fakeServer({ features: { privateTraffic: false } });
  const body = { templateID: "base", network: { allowPublicTraffic: false } };
  errorOf(await send(server, "POST", "/v2/sandboxes", { body }), 400, "INVALID_ARGUMENT");
});

test("an unknown template is 404 and names it", async () => {
  await using server = fakeServer();
  const r = await send(server, "POST", "/v2/sandboxes", { body: { templateID: "no-such-template" } });
  assert.match(errorOf(r, 404, "NOT_FOUND").message, /no-such-template/);
});

test("a body of create that is not right is 400 and tells which field", async () => {
  await using server = fakeServer();
  const bodies: [unknown, RegExp][] = [
    [{}, /templateID/],
    [{ templateID: "" }, /templateID/],
    [{ templateID: 7 }, /templateID/],
    [{ templateID: "x".repeat(1000) }, /templateID/],
    [{ templateID: "base", timeout: -1 }, /timeout: must be at least 1 second/],
    [{ templateID: "base", timeout: 0 }, /timeout/],
    [{ templateID: "base", timeout: 1.5 }, /timeout/],
    [{ templateID: "base", timeout: "300" }, /timeout/],
    [{ templateID: "base", timeout: 1e300 }, /timeout/],
    [{ templateID: "base", metadata: { a: 1 } }, /metadata.a/],
    [{ templateID: "base", metadata: ["a"] }, /metadata/],
    [{ templateID: "base", metadata: { a: "x".repeat(70_000) } }, /metadata/],
    [{ templateID: "base", envVars: { "A=B": "1" } }, /envVars/],
    [{ templateID: "base", envVars: { A: "1\0" } }, /envVars/],
    [{ templateID: "base", envVars: { A: "x".repeat(600_000) } }, /envVars/],
    [{ templateID: "base", secure: "yes" }, /secure/],
    [[], /body/],
    ["base", /body/],
    [null, /needs a JSON body/],
  ];
  for (const [body, why] of bodies)
    assert.match(errorOf(await send(server, "POST", "/sandboxes", { body }), 400, "INVALID_ARGUMENT").message, why);
  assert.match(errorOf(await send(server, "POST", "/sandboxes"), 400).message, /needs a JSON body/);
});

test("failures of the machine room keep their status, and say whether a retry helps", async () => {
  await using server = fakeServer();
  const cases = [
    ["SLOT_EXHAUSTED", 503, "true", "1"],
    ["RATE_LIMITED", 429, "true", "1"],
    ["GUEST_FAILED", 502, "true", undefined],
    ["DEADLINE", 504, "true", undefined],
    ["NO_SPACE", 507, "true", undefined],
    ["CORRUPT", 500, "false", undefined],
  ] as const;
  for (const [code, status, retry, after] of cases) {
    server.engine.failCreate = new AenvError(code, "it went wrong", { cause: new Error("secret") });
    const r = await send(server, "POST", "/v2/sandboxes", { body: { templateID: "base" } });
    errorOf(r, status, code);
    assert.equal(r.headers["should-retry"], retry, code);
    assert.equal(r.headers["retry-after"], after, code);
    assert.doesNotMatch(r.text, /secret/);
  }
});

test("the same Idempotency-Key gives the same sandbox, and with another body a conflict", async () => {
  await using server = fakeServer();
  const headers = { "idempotency-key": "f3a1-key" };
  const create = (body: Record<string, unknown>): Promise<Received> =>
    send(server, "POST", "/v2/sandboxes", { body: { templateID: "base", ...body }, headers });
  const first = await create({});
  const second = await create({});
  assert.equal(second.status, 201);
  assert.equal(second.text, first.text);
  assert.equal(server.engine.sandboxes.size, 1);
  errorOf(await create({ timeout: 5 }), 409, "CONFLICT");
  for (const bad of ["", " ", "x".repeat(256), "a b", "ü"])
    errorOf(
      await send(server, "POST", "/v2/sandboxes", {
        body: { templateID: "base" },
        headers: { "idempotency-key": bad },
      }),
      400,
      "INVALID_ARGUMENT",
    );
});

test("an id of no sandbox is 404 with a numeric code, whatever it looks like", async () => {
  await using server = fakeServer();
  for (const id of [UNKNOWN, ...NO_IDS]) {
    errorOf(await send(server, "GET", `/sandboxes/${id}`), 404, "NOT_FOUND");
    errorOf(await send(server, "DELETE", `/sandboxes/${id}`), 404, "NOT_FOUND");
    errorOf(await send(server, "POST", `/sandboxes/${id}/timeout`, { body: { timeout: 5 } }), 404, "NOT_FOUND");
    errorOf(await send(server, "POST", `/sandboxes/${id}/refreshes`), 404, "NOT_FOUND");
    errorOf(await send(server, "POST", `/v2/sandboxes/${id}/connect`), 404, "NOT_FOUND");
    errorOf(await send(server, "GET", `/sandboxes/${id}/metrics`), 404, "NOT_FOUND");
    errorOf(await send(server, "GET", `/sandboxes/${id}/logs`), 404, "NOT_FOUND");
  }
});

test("an id may be percent-encoded and may carry the client id of old SDKs", async () => {
  await using server = fakeServer();
  const id = await make(server);
  const encoded = id.replace(/./g, (c) => `%${c.charCodeAt(0).toString(16)}`);
  assert.equal((await send(server, "GET", `/sandboxes/${encoded}`)).status, 200);
  assert.equal((await send(server, "GET", `/sandboxes/${id}-deadbeef`)).status, 200);
  assert.equal((await send(server, "GET", `/sandboxes/${id}/`)).status, 200);
});

test("a killed sandbox is gone, and the second kill is 404", async () => {
  await using server = fakeServer();
  const id = await make(server);
  assert.equal((await call(server, "killSandbox", { params: { sandboxID: id } })).status, 204);
  errorOf(await send(server, "DELETE", `/sandboxes/${id}`), 404);
  errorOf(await send(server, "GET", `/sandboxes/${id}`), 404);
});

test("a sandbox that is being killed is not shown", async () => {
  await using server = fakeServer();
  const id = await make(server);
  server.engine.get(id as SandboxId).state = "killing";
  errorOf(await send(server, "GET", `/sandboxes/${id}`), 404);
  assert.equal((await send(server, "GET", "/v2/sandboxes")).text, "[]");
});

test("timeout sets the end, also to now; connect and refreshes never shorten", async () => {
  const clock = new ManualClock();
  await using server = fakeServer({ clock });
  const params = { sandboxID: await make(server, { timeout: 100 }) };
  const end = async (): Promise<number> =>
    (Date.parse((await call(server, "getSandbox", { params })).body.endAt) - clock.ms) / 1000;
  await call(server, "setSandboxTimeout", { params, body: { timeout: 50 } });
  assert.equal(await end(), 50);
  for (const timeout of [10, 0])
    assert.equal((await call(server, "connectSandboxV2", { params, body: { timeout } })).status, 200);
  await call(server, "refreshSandbox", { params });
  await call(server, "refreshSandbox", { params, body: { duration: 49 } });
  assert.equal(await end(), 50);
  await call(server, "refreshSandbox", { params, body: { duration: 60 } });
  assert.equal(await end(), 60);
  await call(server, "connectSandbox", { params, body: { timeout: 70 } });
  assert.equal(await end(), 70);
  await call(server, "connectSandboxV2", { params });
  assert.equal(await end(), 300);
  await call(server, "setSandboxTimeout", { params, body: { timeout: -5 } });
  errorOf(await send(server, "GET", `/sandboxes/${params.sandboxID}`), 404);
});

test("timeouts that are no whole seconds or far out of range are 400", async () => {
  await using server = fakeServer();
  const id = await make(server);
  const bad: [string, unknown][] = [
    [`/sandboxes/${id}/timeout`, {}],
    [`/sandboxes/${id}/timeout`, { timeout: 1.5 }],
    [`/sandboxes/${id}/timeout`, { timeout: "5" }],
    [`/sandboxes/${id}/timeout`, { timeout: 1e20 }],
    [`/sandboxes/${id}/refreshes`, { duration: -1 }],
    [`/sandboxes/${id}/refreshes`, { duration: 3601 }],
    [`/sandboxes/${id}/connect`, {}],
    [`/sandboxes/${id}/connect`, { timeout: -1 }],
    [`/v2/sandboxes/${id}/connect`, { timeout: -1 }],
    [`/v2/sandboxes/${id}/connect`, { timeout: 1, memory: "no" }],
  ];
  for (const [url, body] of bad) errorOf(await send(server, "POST", url, { body }), 400, "INVALID_ARGUMENT");
});

test("connect gives the tokens again, and 201 where the sandbox had to be resumed", async () => {
  await using server = fakeServer();
  const made = await call(server, "createSandboxV2", { body: { templateID: "base" } });
  const params = { sandboxID: made.body.sandboxID };
  const again = await call(server, "connectSandboxV2", { params, body: {} });
  assert.equal(again.status, 200);
  assert.deepEqual(again.body, made.body);
  server.engine.get(params.sandboxID as SandboxId).state = "paused";
  const paused = await call(server, "getSandbox", { params });
  assert.equal(paused.body.state, "paused");
  assert.equal((await call(server, "connectSandbox", { params, body: { timeout: 5 } })).status, 201);
});

async function pages(server: FakeServer, query: string): Promise<ListedSandbox[][]> {
  const out: ListedSandbox[][] = [];
  let token: string | number | string[] | undefined;
  do {
    const r = await send(server, "GET", `/v2/sandboxes?${query}${token ? `&nextToken=${String(token)}` : ""}`);
    assert.equal(r.status, 200, r.text);
    out.push(JSON.parse(r.text) as ListedSandbox[]);
    token = r.headers["x-next-token"];
    assert.ok(out.length < 20);
  } while (token !== undefined);
  return out;
}

test("the list comes newest first, page by page, with no token on the last page", async () => {
  const clock = new ManualClock();
  await using server = fakeServer({ clock });
  const ids: string[] = [];
  for (let i = 0; i < 5; i++) {
    ids.push(await make(server));
    clock.ms += i % 2 === 0 ? 0 : 1000;
  }
  for (const limit of [1, 2, 5, 100]) {
    const got = await pages(server, `limit=${limit}`);
    assert.equal(got.length, Math.ceil(5 / limit));
    assert.deepEqual(
      got
        .flat()
        .map((s) => s.sandboxID)
        .toSorted(),
      ids.toSorted(),
    );
    const times = got.flat().map((s) => Date.parse(s.startedAt));
    assert.deepEqual(
      times,
      times.toSorted((a, b) => b - a),
    );
  }
  const up = (await pages(server, "limit=2&order=asc")).flat().map((s) => Date.parse(s.startedAt));
  assert.deepEqual(
    up,
    up.toSorted((a, b) => a - b),
  );
  const { headers } = await call(server, "listSandboxesV2", { query: { limit: 1 } });
  assert.equal(headers["x-total-running"], "5");
});

test("the list filters by metadata, state, template and start", async () => {
  const clock = new ManualClock();
  await using server = fakeServer({ clock });
  const odd = { "k 1": "v&w", "ü=": "100%" };
  const a = await make(server, { metadata: { ...odd, plain: "x" } });
  clock.ms += 1000;
  const b = await make(server, { templateID: "code-interpreter", metadata: { plain: "x" } });
  server.engine.get(a as SandboxId).state = "paused";
  const ids = async (query: Parameters<typeof call<"listSandboxesV2">>[2]): Promise<string[]> =>
    (await call(server, "listSandboxesV2", query)).body.map((s) => s.sandboxID);
  assert.deepEqual(await ids({}), [b, a]);
  assert.deepEqual(await ids({ query: { metadata: encodeMetadataFilter(odd) } }), [a]);
  assert.deepEqual(await ids({ query: { metadata: "plain=x" } }), [b, a]);
  assert.deepEqual(await ids({ query: { metadata: "plain=y" } }), []);
  assert.deepEqual(await ids({ query: { state: ["paused"] } }), [a]);
  assert.deepEqual(await ids({ query: { state: ["running", "paused"] } }), [b, a]);
  assert.deepEqual(await ids({ query: { template: "base" } }), [a]);
  assert.deepEqual(await ids({ query: { template: "unknown" } }), []);
  assert.deepEqual(await ids({ query: { startedAfter: new Date(clock.ms).toISOString() } }), [b]);
  const running = await call(server, "listSandboxes", { query: { metadata: "plain=x" } });
  assert.deepEqual(
    running.body.map((s) => s.sandboxID),
    [b],
  );
});

test("the first list gives every running sandbox, beyond one page", async () => {
  await using server = fakeServer();
  for (let i = 0; i < 120; i++) await make(server);
  assert.equal((await call(server, "listSandboxes")).body.length, 120);
});

test("queries of the list that are not right are 400", async () => {
  await using server = fakeServer();
  const queries = [
    "limit=0",
    "limit=101",
    "limit=-1",
    "limit=99999999999999999999",
    "limit=abc",
    "limit=1&limit=2",
    "order=sideways",
    "state=stopped",
    "state=running,stopped",
    "startedAfter=yesterday",
    "startedAfter=2026-99-99",
    "nextToken=abc",
    `nextToken=${"A".repeat(5000)}`,
    "nextToken=..%2F..",
    "metadata=a%3D%25zz",
    "metadata=a%3D1%26a%3D2",
    "template=base:v1",
  ];
  for (const q of queries) errorOf(await send(server, "GET", `/v2/sandboxes?${q}`), 400, "INVALID_ARGUMENT");
  errorOf(await send(server, "GET", "/sandboxes?metadata=a%3D%25zz"), 400, "INVALID_ARGUMENT");
});

test("a body may be of any content type, chunked, with a byte-order mark or absent where it is optional", async () => {
  await using server = fakeServer();
  const payload = JSON.stringify({ templateID: "base" });
  for (const type of [
    "text/plain",
    "application/x-www-form-urlencoded",
    "application/json; charset=utf-8",
    "",
    "x",
    ";;",
  ])
    assert.equal(
      (await send(server, "POST", "/sandboxes", { payload, headers: { "content-type": type } })).status,
      201,
      type,
    );
  assert.equal((await send(server, "POST", "/sandboxes", { payload: `\uFEFF${payload}\n` })).status, 201);
  const id = await make(server);
  for (const body of ["", "{}", "null", " "])
    assert.equal((await send(server, "POST", `/v2/sandboxes/${id}/connect`, { payload: body })).status, 200, body);
  assert.equal((await send(server, "DELETE", `/sandboxes/${id}`, { payload: "" })).status, 204);
});

test("bad JSON is 400, and more than 16 MiB is 413", async () => {
  await using server = fakeServer();
  for (const payload of ["{", "{'a':1}", "\0", '{"templateID":"base"', "undefined", Buffer.from([0xff, 0xfe, 0x00])])
    assert.match(
      errorOf(await send(server, "POST", "/sandboxes", { payload }), 400, "INVALID_ARGUMENT").message,
      /JSON/,
    );
  const big = Buffer.alloc(16 * 1024 * 1024 + 1, 0x20);
  errorOf(await send(server, "POST", "/sandboxes", { payload: big }), 413, "TOO_LARGE");
  const deep = "[".repeat(1_000_000);
  errorOf(await send(server, "POST", "/sandboxes", { payload: deep }), 400, "INVALID_ARGUMENT");
});

test("keys that name Object.prototype are plain metadata", async () => {
  await using server = fakeServer();
  const payload = `{"templateID":"base","metadata":{"constructor":"x","toString":"y"},"__proto__":{"timeout":-1}}`;
  const r = await send(server, "POST", "/v2/sandboxes", { payload });
  assert.equal(r.status, 201, r.text);
  const { sandboxID } = JSON.parse(r.text) as { sandboxID: string };
  const d = await call(server, "getSandbox", { params: { sandboxID } });
  assert.deepEqual(d.body.metadata, { constructor: "x", toString: "y" });
});

test("metrics of one sandbox keep to their window; of several they leave strangers out", async () => {
  const clock = new ManualClock();
  await using server = fakeServer({ clock });
  const id = await make(server);
  const params = { sandboxID: id };
  const at = clock.ms / 1000;
  assert.equal((await call(server, "sandboxMetrics", { params })).body.length, 1);
  assert.equal((await call(server, "sandboxMetrics", { params, query: { start: at, end: at } })).body.length, 1);
  assert.deepEqual((await call(server, "sandboxMetrics", { params, query: { start: 0, end: at - 100 } })).body, []);
  const many = await call(server, "sandboxesMetrics", { query: { sandbox_ids: [id, UNKNOWN, "not-an-id"] } });
  assert.deepEqual(Object.keys(many.body.sandboxes), [id]);
  for (const q of ["", "?sandbox_ids=", `?sandbox_ids=${Array(101).fill(id).join(",")}`])
    errorOf(await send(server, "GET", `/sandboxes/metrics${q}`), 400, "INVALID_ARGUMENT");
  for (const q of ["start=-1", "start=x", "end=1.5"])
    errorOf(await send(server, "GET", `/sandboxes/${id}/metrics?${q}`), 400, "INVALID_ARGUMENT");
});

test("logs come as lines that the CLI parses and as entries", async () => {
  await using server = fakeServer();
  const params = { sandboxID: await make(server) };
  const { body } = await call(server, "sandboxLogs", { params });
  assert.equal(body.logs.length, 2);
  const line = JSON.parse(body.logs[0]?.line ?? "") as Record<string, unknown>;
  assert.deepEqual([line["level"], line["logger"], line["message"]], ["info", "engine", "sandbox started"]);
  assert.equal(body.logEntries[0]?.fields["phases"], "3");
  assert.equal((await call(server, "sandboxLogs", { params, query: { limit: 1 } })).body.logs.length, 1);
  errorOf(await send(server, "GET", `/sandboxes/${params.sandboxID}/logs?limit=1001`), 400);
});
