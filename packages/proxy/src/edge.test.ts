import assert from "node:assert/strict";
import { type IncomingMessage, request } from "node:http";
import { test } from "node:test";
import { bodyOf, event, fixture, httpGuest, ID, RawClient } from "./testing.ts";

const LIMIT = { timeout: 20_000 };

async function get(origin: string, headers: Record<string, string>, path = "/"): Promise<Response> {
  return fetch(origin + path, { headers });
}

test(
  "a request with the routing headers reaches the guest's port, and its answer comes back whole",
  LIMIT,
  async (t) => {
    const guest = await httpGuest(t, async (req, res) => {
      const body = await bodyOf(req);
      res.writeHead(201, "Made", { "X-Seen": `${req.method} ${req.url}`, "Set-Cookie": ["a=1", "b=2"] });
      res.end(`${String(req.headers["x-custom"])}:${body.toString()}`);
    });
    const f = await fixture(t);
    const res = await fetch(`${f.origin}/a/b?c=%20d`, {
      method: "POST",
      body: "hello",
      headers: { "E2b-Sandbox-Id": ID, "E2b-Sandbox-Port": String(guest.port), "X-Custom": "yes" },
    });
    assert.equal(res.status, 201);
    assert.equal(res.statusText, "Made");
    assert.equal(res.headers.get("x-seen"), "POST /a/b?c=%20d");
    assert.deepEqual(res.headers.getSetCookie(), ["a=1", "b=2"]);
    assert.equal(await res.text(), "yes:hello");
  },
);

test("a host of the form <port>-<id>.<domain> is routed, and the guest sees that host", LIMIT, async (t) => {
  const guest = await httpGuest(t, (req, res) => void res.end(req.headers.host));
  const f = await fixture(t);
  const text = await new Promise<string>((resolve, reject) => {
    request({ port: f.port, host: "127.0.0.1", headers: { host: f.host(guest.port) } }, (res) => {
      bodyOf(res).then((b) => resolve(b.toString()), reject);
    })
      .on("error", reject)
      .end();
  });
  assert.equal(text, f.host(guest.port));
});

test("what names no sandbox is the API's", LIMIT, async (t) => {
  const f = await fixture(t);
  assert.equal(await (await get(f.origin, {})).text(), "api");
});

test("an unknown sandbox gives exactly the 502 body that the SDKs compare, on every port", LIMIT, async (t) => {
  const f = await fixture(t);
  for (const port of ["49983", "8000"]) {
    const res = await get(f.origin, { "E2b-Sandbox-Id": "iunknown", "E2b-Sandbox-Port": port });
    assert.equal(res.status, 502);
    assert.deepEqual(await res.json(), { sandboxId: "iunknown", message: "The sandbox was not found", code: 502 });
  }
});

test("a port without a listener gives exactly the 502 body with the port", LIMIT, async (t) => {
  const f = await fixture(t);
  const res = await get(f.origin, { "E2b-Sandbox-Id": ID, "E2b-Sandbox-Port": "1" });
  assert.equal(res.status, 502);
  assert.deepEqual(await res.json(), {
    sandboxId: ID,
    message: "The sandbox is running but port is not open",
    port: 1,
    code: 502,
  });
});

test("a stream of an ended run breaks at the client instead of ending, and new requests get 502", LIMIT, async (t) => {
  const begun = event();
  const guest = await httpGuest(t, (_req, res) => {
    res.write("first");
    begun.fire();
  });
  const f = await fixture(t);
  const headers = { "E2b-Sandbox-Id": ID, "E2b-Sandbox-Port": String(guest.port) };
  const res = await get(f.origin, headers);
  await begun.promise;
  const reader = (res.body as ReadableStream<Uint8Array>).getReader();
  await reader.read();
  f.edge.endRun("r1");
  await assert.rejects(reader.read());
  const after = await get(f.origin, headers);
  assert.equal(after.status, 502);
  assert.equal(((await after.json()) as { message: string }).message, "The sandbox was not found");
});

test("a body for the API must come in time, one for a sandbox may take as long as it wants", LIMIT, async (t) => {
  const given = event<unknown>();
  const api = (req: IncomingMessage): void => {
    bodyOf(req).then(() => given.fire("whole"), given.fire);
  };
  const f = await fixture(t, { api, apiBodyMs: 20 });
  const guest = await httpGuest(t, async (req, res) => void res.end(await bodyOf(req)));
  const slow = new RawClient(f.port, `POST / HTTP/1.1\r\nHost: ${f.host(guest.port)}\r\nContent-Length: 4\r\n\r\nab`);
  const api1 = new RawClient(f.port, "POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 4\r\n\r\nab");
  assert.ok((await given.promise) instanceof Error);
  await api1.closed;
  slow.socket.write("cd");
  await slow.until("abcd");
  slow.socket.destroy();
});
