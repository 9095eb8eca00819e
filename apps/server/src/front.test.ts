import assert from "node:assert/strict";
import { createServer } from "node:http";
import { type AddressInfo, connect } from "node:net";
import { test, type TestContext } from "node:test";
import { silentLogger } from "@aenv/base";
import { createEdge, createFrontServer } from "@aenv/proxy";
import { fakeServer } from "../test/fake-server.ts";

const LIMIT = { timeout: 20_000 };
const ID = "iaaaabbbbccccdddd000";

/** API and edge on one port, with a "guest" that tells what it was asked. */
async function node(t: TestContext): Promise<{ origin: string; port: number; key: string; guestPort: number }> {
  const guest = createServer((req, res) =>
    res.end(`guest ${req.method} ${req.url} key=${String(req.headers["x-api-key"])}`),
  );
  await new Promise<void>((resolve) => guest.listen(0, "127.0.0.1", resolve));
  const guestPort = (guest.address() as AddressInfo).port;
  const edge = createEdge({
    resolve: (id, port) => (id === ID ? { run: "raaaabbbbcccc", host: "127.0.0.1", port } : { error: "not_found" }),
    domain: "sb.test",
    logger: silentLogger,
  });
  const server = fakeServer({ server: (api) => createFrontServer({ edge, api }) });
  const origin = await server.app.listen({ port: 0, host: "127.0.0.1" });
  t.after(async () => {
    await edge.close();
    await server[Symbol.asyncDispose]();
    guest.closeAllConnections();
    guest.close();
  });
  return { origin, port: Number(new URL(origin).port), key: server.key, guestPort };
}

/** Everything that comes back for bytes sent, until the server closes. */
function raw(port: number, bytes: string): Promise<string> {
  return new Promise((resolve, reject) => {
    let text = "";
    const socket = connect(port, "127.0.0.1", () => socket.write(bytes));
    socket.on("data", (d: Buffer) => (text += d.toString("latin1")));
    socket.on("error", reject);
    socket.on("close", () => resolve(text));
  });
}

test(
  "sandbox traffic needs no API key, by header or by host, also where the API has the same path",
  LIMIT,
  async (t) => {
    const { origin, port, guestPort } = await node(t);
    for (const path of ["/health", "/sandboxes", "/docs"]) {
      const headers = { "E2b-Sandbox-Id": ID, "E2b-Sandbox-Port": String(guestPort) };
      const res = await fetch(origin + path, { headers });
      assert.equal(await res.text(), `guest GET ${path} key=undefined`);
    }
    const byHost = `GET /x HTTP/1.1\r\nHost: ${guestPort}-${ID}.sb.test\r\nConnection: close\r\n\r\n`;
    assert.match(await raw(port, byHost), /guest GET \/x/);
  },
);

test("traffic of a sandbox that is gone gets the answer that the SDKs compare", LIMIT, async (t) => {
  const { origin } = await node(t);
  const headers = { "E2b-Sandbox-Id": "izzzzbbbbccccdddd000", "E2b-Sandbox-Port": "49983" };
  const res = await fetch(`${origin}/health`, { headers });
  assert.equal(res.status, 502);
  const body = { sandboxId: "izzzzbbbbccccdddd000", message: "The sandbox was not found", code: 502 };
  assert.deepEqual(await res.json(), body);
});

test("the API answers the rest, with a chunked body too", LIMIT, async (t) => {
  const { port, key } = await node(t);
  const body = '{"templateID":"base"}';
  const request = [
    "POST /v2/sandboxes HTTP/1.1",
    "Host: localhost",
    `X-API-KEY: ${key}`,
    "Transfer-Encoding: chunked",
    "Connection: close",
    "",
    "5",
    body.slice(0, 5),
    (body.length - 5).toString(16),
    body.slice(5),
    "0",
    "",
    "",
  ].join("\r\n");
  assert.match(await raw(port, request), /^HTTP\/1\.1 201 /);
});

test("what is no HTTP, and an upgrade that nobody offers, get a JSON error", LIMIT, async (t) => {
  const { port } = await node(t);
  assert.match(await raw(port, "\x16\x03\x01 garbage\r\n\r\n"), /^HTTP\/1\.1 400 [^]*"error_code":"INVALID_ARGUMENT"/);
  const upgrade = "GET /x HTTP/1.1\r\nHost: localhost\r\nConnection: Upgrade, close\r\nUpgrade: websocket\r\n\r\n";
  assert.match(await raw(port, upgrade), /^HTTP\/1\.1 404 [^]*"code":404/);
  const headers = `GET / HTTP/1.1\r\nHost: localhost\r\nX-Big: ${"x".repeat(80_000)}\r\n\r\n`;
  assert.match(await raw(port, headers), /^HTTP\/1\.1 4\d\d [^]*"error_code":"INVALID_ARGUMENT"/);
});

test("a client that hangs up makes its create give up", LIMIT, async (t) => {
  const server = fakeServer();
  t.after(() => server[Symbol.asyncDispose]());
  const origin = await server.app.listen({ port: 0, host: "127.0.0.1" });
  const entered = Promise.withResolvers<void>();
  const aborted = Promise.withResolvers<unknown>();
  server.engine.create = (_, signal) => {
    signal.addEventListener("abort", () => aborted.resolve(signal.reason));
    entered.resolve();
    return new Promise(() => {});
  };
  const hangUp = new AbortController();
  const request = fetch(`${origin}/v2/sandboxes`, {
    method: "POST",
    body: '{"templateID":"base"}',
    headers: { "x-api-key": server.key },
    signal: hangUp.signal,
  });
  await entered.promise;
  hangUp.abort();
  await assert.rejects(request);
  assert.equal(((await aborted.promise) as { code?: string }).code, "CANCELLED");
});
