import assert from "node:assert/strict";
import { test } from "node:test";
import { event, fixture, type Fixture, httpGuest, ID, RawClient } from "./testing.ts";

const LIMIT = { timeout: 20_000 };

async function ask(
  f: Fixture,
  headers: Record<string, string>,
  path = "/",
): Promise<{ status: number; text: string; headers: Headers }> {
  const res = await fetch(f.origin + path, { headers: { "E2b-Sandbox-Id": ID, ...headers } });
  return { status: res.status, text: await res.text(), headers: res.headers };
}

test("a bad id or port in the headers, or in a host of ours, is 400", LIMIT, async (t) => {
  const f = await fixture(t);
  const wrong: Record<string, string>[] = [
    { "E2b-Sandbox-Id": "NOT_AN_ID" },
    { "E2b-Sandbox-Port": "99999" },
    { "E2b-Sandbox-Port": "x" },
  ];
  for (const headers of wrong) {
    const res = await ask(f, headers);
    assert.equal(res.status, 400);
    assert.equal((JSON.parse(res.text) as { code: number }).code, 400);
  }
  const client = new RawClient(f.port, `GET / HTTP/1.1\r\nHost: 0-${ID}.sandbox.test\r\n\r\n`);
  await client.until('"code":400');
  client.socket.destroy();
});

test("envd's internal routes are 404 from outside, and only on envd's port", LIMIT, async (t) => {
  const f = await fixture(t);
  const guest = await httpGuest(t, (_req, res) => void res.end("mine"));
  f.setTarget(() => ({ run: "r1", host: "127.0.0.1", port: guest.port }));
  for (const path of ["/init", "//init", "/%69nit", "/freeze?x", "/a/../fsthaw"]) {
    const client = new RawClient(
      f.port,
      `POST ${path} HTTP/1.1\r\nHost: ${f.host(49983)}\r\nContent-Length: 0\r\n\r\n`,
    );
    await client.until("HTTP/1.1 404");
    client.socket.destroy();
  }
  assert.equal((await ask(f, { "E2b-Sandbox-Port": "3000" }, "/init")).text, "mine");
  assert.equal((await ask(f, {}, "/health")).text, "mine");
});

test("private traffic needs its token on every port but envd's, and the guest never sees it", LIMIT, async (t) => {
  const f = await fixture(t);
  const guest = await httpGuest(t, (req, res) => void res.end(String(req.headers["e2b-traffic-access-token"])));
  f.setTarget(() => ({ run: "r1", host: "127.0.0.1", port: guest.port, requiredTrafficToken: "secret" }));
  const port = { "E2b-Sandbox-Port": "3000" };
  assert.equal((await ask(f, port)).status, 403);
  assert.equal((await ask(f, { ...port, "E2b-Traffic-Access-Token": "wrong!" })).status, 403);
  assert.equal((await ask(f, { ...port, "E2b-Traffic-Access-Token": "secret, secret" })).status, 403);
  const ok = await ask(f, { ...port, "E2b-Traffic-Access-Token": "secret" });
  assert.deepEqual([ok.status, ok.text], [200, "undefined"]);
  assert.equal((await ask(f, { "E2b-Sandbox-Port": "49983" })).status, 200);
});

test(
  "a sandbox has so many connections at a time; the next one is told to wait, other sandboxes are not",
  LIMIT,
  async (t) => {
    const f = await fixture(t, { limits: { connectionsPerSandbox: 2 } });
    const two = event();
    const finish = event();
    let open = 0;
    const guest = await httpGuest(t, async (req, res) => {
      if (req.url === "/wait") {
        if (++open === 2) two.fire();
        await finish.promise;
      }
      res.end("ok");
    });
    f.setTarget((id) => ({ run: `r${id}`, host: "127.0.0.1", port: guest.port }));
    const waiting = [ask(f, {}, "/wait"), ask(f, {}, "/wait")];
    await two.promise;
    const more = await ask(f, {});
    assert.equal(more.status, 429);
    assert.equal(more.headers.get("retry-after"), "1");
    assert.equal((JSON.parse(more.text) as { code: number }).code, 429);
    assert.equal((await ask(f, { "E2b-Sandbox-Id": "iother" })).status, 200);
    finish.fire();
    for (const w of waiting) assert.equal((await w).status, 200);
    assert.equal((await ask(f, {})).status, 200);
    assert.equal(f.edge.stats().rateLimited, 1);
  },
);

test("a browser gets a page, without a chance for what it shows to be markup", LIMIT, async (t) => {
  const f = await fixture(t);
  const browser = { Accept: "text/html,*/*", "User-Agent": "Mozilla/5.0" };
  const res = await ask(f, { ...browser, "E2b-Sandbox-Id": "inone" });
  assert.equal(res.status, 502);
  assert.match(res.headers.get("content-type") ?? "", /^text\/html/);
  assert.match(res.text, /The sandbox was not found/);
  assert.match(res.headers.get("content-security-policy") ?? "", /default-src 'none'/);
  f.setTarget(() => ({ error: "forbidden", message: "<script>alert(1)</script>" }));
  assert.doesNotMatch((await ask(f, browser)).text, /<script/);
  // A script of a page accepts anything and wants JSON.
  assert.match((await ask(f, { "User-Agent": "Mozilla/5.0" })).headers.get("content-type") ?? "", /json/);
});

test("what the resolver says is what the client gets, at once or later", LIMIT, async (t) => {
  const f = await fixture(t);
  for (const [error, status] of [
    ["forbidden", 403],
    ["conflict", 409],
    ["unavailable", 503],
    ["not_found", 502],
  ] as const) {
    f.setTarget(() => ({ error }));
    assert.equal((await ask(f, {})).status, status);
    f.setTarget(() => ({ wake: () => Promise.resolve({ error }) }));
    assert.equal((await ask(f, {})).status, status);
  }
  f.setTarget(() => ({ wake: () => Promise.reject(new Error("boom")) }));
  assert.equal((await ask(f, {})).status, 503);
});
