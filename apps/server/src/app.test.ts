import assert from "node:assert/strict";
import { test } from "node:test";
import { messageOf } from "@aenv/base";
import { LATER, type RouteDef, ROUTE_IDS, ROUTES } from "@aenv/contract";
import { run } from "@aenv/host";
import { call, errorOf, send } from "../test/client.ts";
import { fakeServer } from "../test/fake-server.ts";

const defs: [string, RouteDef][] = ROUTE_IDS.map((id) => [id, ROUTES[id]]);
const example = (path: string): string => path.replace(/\{\w+\}/g, "iaaaabbbbccccdddd000");

test("what is mounted is the route table and what is announced for later, nothing else", async () => {
  await using server = fakeServer();
  await server.app.ready();
  const mounted = new Set(server.mounted.filter((m) => !m.startsWith("HEAD ")));
  const wanted = [...defs.map(([, d]) => d), ...LATER].map((d) => `${d.method} ${d.path.replace(/\{(\w+)\}/g, ":$1")}`);
  assert.deepEqual([...mounted].toSorted(), wanted.toSorted());
});

test("every route that needs a key refuses a request without one before it reads anything else", async () => {
  await using server = fakeServer();
  for (const [id, def] of defs) {
    if (def.auth !== "key") continue;
    const r = await send(server, def.method, example(def.path), { headers: { "x-api-key": "" } });
    const e = errorOf(r, 401, "UNAUTHENTICATED");
    assert.match(e.message, /X-API-KEY/, id);
  }
});

test("a wrong key, a malformed key and a deleted key are refused", async () => {
  await using server = fakeServer();
  const { key, record } = server.state.keys.create("default", "other");
  assert.equal((await send(server, "GET", "/sandboxes", { headers: { "x-api-key": key } })).status, 200);
  server.state.keys.revoke("default", record.id);
  for (const wrong of [key, `e2b_${"0".repeat(40)}`, "e2b_", "x", "Ω", `${server.key}0`, server.key.toUpperCase()])
    errorOf(await send(server, "GET", "/sandboxes", { headers: { "x-api-key": wrong } }), 401, "UNAUTHENTICATED");
});

test("the key may come as a bearer token", async () => {
  await using server = fakeServer();
  const headers = { "x-api-key": "", authorization: `Bearer ${server.key}` };
  assert.equal((await send(server, "GET", "/teams", { headers })).status, 200);
});

test("routes without auth answer strangers", async () => {
  await using server = fakeServer();
  for (const url of ["/health", "/docs", "/openapi.json"])
    assert.equal((await send(server, "GET", url, { headers: { "x-api-key": "" } })).status, 200, url);
});

test("endpoints of later versions answer 501 and say what is missing", async () => {
  await using server = fakeServer();
  for (const { method, path, feature } of LATER) {
    const e = errorOf(await send(server, method, example(path)), 501, "UNIMPLEMENTED");
    assert.ok(e.message.includes(feature));
  }
});

test("an unknown path is 404 with a pointer to the documents", async () => {
  await using server = fakeServer();
  assert.match(errorOf(await send(server, "GET", "/nothing/here?x=1"), 404, "NOT_FOUND").message, /\/docs/);
  errorOf(await send(server, "PUT", "/sandboxes"), 404, "NOT_FOUND");
});

test("a path that is no URL is refused", async () => {
  await using server = fakeServer();
  errorOf(await send(server, "GET", "/sandboxes/%zz"), 400, "INVALID_ARGUMENT");
});

test("every answer names its request", async () => {
  await using server = fakeServer();
  const a = await send(server, "GET", "/health");
  const b = await send(server, "GET", "/nothing");
  assert.match(String(a.headers["x-request-id"]), /^[a-z0-9]{12}$/);
  assert.notEqual(a.headers["x-request-id"], b.headers["x-request-id"]);
});

test("an unexpected failure is 500, names the request and tells nothing else", async () => {
  await using server = fakeServer();
  server.engine.list = () => {
    throw new TypeError("secret detail");
  };
  const r = await send(server, "GET", "/v2/sandboxes");
  const e = errorOf(r, 500, "INTERNAL");
  assert.ok(e.message.includes(String(r.headers["x-request-id"])));
  assert.doesNotMatch(r.text, /secret/);
});

test("the node describes itself", async () => {
  await using server = fakeServer();
  await call(server, "createSandboxV2", { body: { templateID: "base" } });
  const { body } = await call(server, "node");
  assert.equal(body.sandboxes.running, 1);
  assert.deepEqual(body.base, { state: "ready" });
  assert.ok(body.timings.some((t) => t.metric === "event_loop_delay"));
  assert.equal((await call(server, "doctor")).body.ok, true);
  assert.equal((await call(server, "health")).body.status, "ok");
});

test("requests are counted by route, without ids in the labels", async () => {
  await using server = fakeServer();
  await send(server, "GET", "/sandboxes/iaaaabbbbccccdddd000");
  await send(server, "GET", "/never/heard/of");
  const { text } = await call(server, "nodeMetrics");
  assert.match(text, /aenv_api_request_seconds_count\{route="getSandbox",method="GET",status="404"\} 1/);
  assert.match(text, /aenv_api_request_seconds_count\{route="none",method="GET",status="404"\} 1/);
  assert.match(text, /aenv_nodejs_eventloop_lag_p99_seconds/);
});

test("the document for machines is the route table's", async () => {
  await using server = fakeServer();
  const { text, headers } = await call(server, "openapi");
  assert.match(String(headers["content-type"]), /^application\/json/);
  const { paths } = JSON.parse(text) as { paths: Record<string, unknown> };
  assert.deepEqual(Object.keys(paths).toSorted(), [...new Set(defs.map(([, d]) => d.path))].toSorted());
});

test("the page for people shows every route and error and loads nothing from elsewhere", async () => {
  await using server = fakeServer();
  const { text, headers } = await call(server, "docs");
  assert.match(String(headers["content-type"]), /^text\/html/);
  assert.match(String(headers["content-security-policy"]), /default-src 'none'/);
  for (const [id, def] of defs) {
    assert.ok(text.includes(`id="${id}"`), id);
    assert.ok(text.includes(def.path), def.path);
  }
  const anchors = new Set([...text.matchAll(/ id="([^"]+)"/g)].map((m) => m[1]));
  for (const [, target] of text.matchAll(/href="#([^"]+)"/g)) assert.ok(anchors.has(target), target);
  assert.doesNotMatch(text, /<script|<link|<img|src=|@import|url\(/);
});

/** What a reader copies from the page. */
const examplesOf = (html: string): string[] =>
  [...html.matchAll(/<pre>([^]*?)<\/pre>/g)].map(([, code = ""]) =>
    code.replace(/&(amp|lt|gt|quot);/g, (_, name: string) => ({ amp: "&", lt: "<", gt: ">", quot: '"' })[name] ?? ""),
  );

test("the page's examples name the node as its reader has reached it, and nothing that has to be filled in or installed", async () => {
  await using server = fakeServer();
  for (const [headers, base] of [
    [{ host: "node.example:8123" }, "http://node.example:8123"],
    [{ host: "[::1]:8000" }, "http://[::1]:8000"],
    [{ host: "sb.example", "x-forwarded-proto": "https" }, "https://sb.example"],
    [{ host: 'a"<script>' }, "http://localhost:8000"],
  ] as const) {
    const { text } = await send(server, "GET", "/docs", { headers });
    const examples = examplesOf(text);
    for (const url of examples.flatMap((e) => e.match(/https?:\/\/[^\s"'$]+/g) ?? []))
      assert.ok(
        [base, "http://8080-", "https://service.example/"].some((known) => url.startsWith(known)),
        url,
      );
    assert.ok(examples.some((e) => e.includes(`export E2B_API_URL=${base}\n`)));
    assert.ok(
      examples.some((e) => e.includes("http://8080-$id.localhost:8000/")),
      "the node's own domain",
    );
    assert.ok(examples.filter((e) => e.startsWith("curl")).every((e) => e.includes(base)));
    assert.doesNotMatch(examples.join("\n"), /\bjq\b|@/);
    assert.doesNotMatch(text, /<script/);
  }
});

test("the page's first example runs as it stands", async (t) => {
  await using server = fakeServer();
  const origin = await server.app.listen({ port: 0, host: "127.0.0.1" });
  const page = await (await fetch(`${origin}/docs`)).text();
  const create = /^id=\$\([^]*?\)$/m.exec(examplesOf(page).find((e) => e.startsWith("id=")) ?? "")?.[0];
  assert.ok(create);
  try {
    const env = { PATH: process.env["PATH"] ?? "", E2B_API_KEY: server.key };
    const { stdout } = await run("bash", ["-c", `${create}; echo "$id"`], { env });
    assert.ok(server.engine.sandboxes.has(stdout.trim()), stdout);
  } catch (e) {
    if (!/curl: command not found/.test(messageOf(e))) throw e;
    t.skip("curl is not installed");
  }
});

test("the page marks what this version does not have", async () => {
  await using server = fakeServer();
  const { text } = await call(server, "docs");
  const later = text.slice(text.indexOf('id="later"'), text.indexOf('id="errors"'));
  for (const { method, path } of LATER) {
    const row = later.split("<tr>").find((r) => r.includes(`>${method}<`) && r.includes(`<code>${path}</code>`));
    assert.match(row ?? "", /not available yet/, `${method} ${path}`);
  }
});
