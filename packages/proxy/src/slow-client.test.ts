import assert from "node:assert/strict";
import { once } from "node:events";
import { test } from "node:test";
import { bodyOf, event, fixture, httpGuest, RawClient } from "./testing.ts";

const LIMIT = { timeout: 30_000 };

test(
  "a client that does not finish its request head is answered and cut, however busily it sends",
  LIMIT,
  async (t) => {
    const f = await fixture(t, { headMs: 200 });
    const silent = new RawClient(f.port, "GET / HTTP/1.1\r\nHost: x\r\n");
    const busy = new RawClient(f.port, "GET / HTTP/1.1\r\n");
    busy.socket.on("error", () => {});
    const dripping = setInterval(() => busy.socket.write("X-A: b\r\n"), 20);
    t.after(() => clearInterval(dripping));
    await Promise.all([silent.closed, busy.closed]);
    assert.match(silent.text, /^HTTP\/1\.1 408 /);
  },
);

test("a body that comes byte by byte has all the time that it wants", LIMIT, async (t) => {
  const f = await fixture(t, { headMs: 100, apiBodyMs: 100 });
  const asked = event();
  const guest = await httpGuest(t, async (req, res) => {
    asked.fire();
    res.end(await bodyOf(req));
  });
  const client = new RawClient(f.port);
  await once(client.socket, "connect");
  client.socket.write(`POST / HTTP/1.1\r\nHost: ${f.host(guest.port)}\r\nContent-Length: 50\r\n\r\n`);
  await asked.promise;
  for (let i = 0; i < 50; i++) {
    client.socket.write("b");
    await new Promise((resolve) => setTimeout(resolve, 10));
  }
  await client.until("b".repeat(50));
  assert.match(client.text, /^HTTP\/1\.1 200 /);
  client.socket.destroy();
});

test("clients that hang within their heads keep nobody from being served", LIMIT, async (t) => {
  const f = await fixture(t);
  const guest = await httpGuest(t, (_req, res) => void res.end("served"));
  const hanging = Array.from({ length: 200 }, () => new RawClient(f.port, "GET / HTTP/1.1\r\nHost: x\r\nX-"));
  t.after(() => {
    for (const c of hanging) c.socket.destroy();
  });
  for (const c of hanging) if (c.socket.connecting) await once(c.socket, "connect");
  const client = new RawClient(f.port, `GET / HTTP/1.1\r\nHost: ${f.host(guest.port)}\r\n\r\n`);
  await client.until("served");
  client.socket.destroy();
});
