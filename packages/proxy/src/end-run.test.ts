import assert from "node:assert/strict";
import { once } from "node:events";
import { type IncomingMessage, request } from "node:http";
import { test } from "node:test";
import { event, fixture, type Fixture, httpGuest, ID, RawClient, rawGuest } from "./testing.ts";

const LIMIT = { timeout: 20_000 };

function route(port: number): Record<string, string> {
  return { "E2b-Sandbox-Id": ID, "E2b-Sandbox-Port": String(port) };
}

async function streaming(f: Fixture, port: number): Promise<IncomingMessage> {
  const req = request({ host: "127.0.0.1", port: f.port, headers: route(port) }).end();
  // The request hears of a reset, too; what counts here is the response.
  req.on("error", () => {});
  const [res] = (await once(req, "response")) as [IncomingMessage];
  await once(res, "data");
  return res;
}

for (const [what, length] of [
  ["chunked", undefined],
  ["of a known length", "100"],
] as const) {
  test(`node:http sees the reset of a response that is ${what}`, LIMIT, async (t) => {
    const f = await fixture(t);
    const guest = await httpGuest(t, (_req, res) => {
      if (length) res.setHeader("Content-Length", length);
      res.write("part");
    });
    const res = await streaming(f, guest.port);
    const failed = once(res, "error");
    res.on("end", () => assert.fail("a clean end"));
    f.edge.endRun("r1");
    const [error] = (await failed) as [NodeJS.ErrnoException];
    assert.equal(error.code, "ECONNRESET");
    assert.equal(f.edge.stats().reset, 1);
  });
}

test("a response that only the connection's end would end is reset, too", LIMIT, async (t) => {
  const f = await fixture(t);
  const port = await rawGuest(t, (s) => void s.once("data", () => s.write("HTTP/1.0 200 OK\r\n\r\npart")));
  const client = new RawClient(f.port, `GET / HTTP/1.0\r\nHost: ${f.host(port)}\r\n\r\n`);
  await client.until("part");
  f.edge.endRun("r1");
  assert.equal((await client.closed)?.code, "ECONNRESET");
});

test("who has no byte of an answer yet gets the 502 of a sandbox that is gone", LIMIT, async (t) => {
  const f = await fixture(t);
  const asked = event();
  const guest = await httpGuest(t, () => asked.fire());
  const answer = fetch(f.origin, { headers: route(guest.port) });
  await asked.promise;
  f.edge.endRun("r1");
  const res = await answer;
  assert.equal(res.status, 502);
  assert.deepEqual(await res.json(), { sandboxId: ID, message: "The sandbox was not found", code: 502 });
});

test("an upload that is under way gets the 502, too", LIMIT, async (t) => {
  const f = await fixture(t);
  const begun = event();
  const guest = await httpGuest(t, (req) => {
    req.on("error", () => {});
    req.once("data", () => begun.fire());
  });
  const req = request({
    host: "127.0.0.1",
    port: f.port,
    method: "POST",
    headers: { ...route(guest.port), "Content-Length": "10" },
  });
  req.write("abc");
  await begun.promise;
  f.edge.endRun("r1");
  const [res] = (await once(req, "response")) as [IncomingMessage];
  assert.equal(res.statusCode, 502);
  req.end("defghij");
  res.resume();
  await once(res, "end");
});

test("other runs and the guest's new run do not notice", LIMIT, async (t) => {
  const f = await fixture(t);
  const guest = await httpGuest(t, (req, res) => {
    if (req.url === "/stream") res.write("part");
    else res.end("ok");
  });
  f.setTarget((id, port) => ({ run: id === ID ? "r1" : "r2", host: "127.0.0.1", port }));
  const other = request({
    host: "127.0.0.1",
    port: f.port,
    path: "/stream",
    headers: { ...route(guest.port), "E2b-Sandbox-Id": "iother" },
  }).end();
  const [res] = (await once(other, "response")) as [IncomingMessage];
  await once(res, "data");
  f.edge.endRun("r1");
  assert.equal(f.edge.stats().active, 1);
  f.setTarget((_id, port) => ({ run: "r3", host: "127.0.0.1", port }));
  const again = await fetch(f.origin, { headers: route(guest.port) });
  assert.equal(await again.text(), "ok");
  res.on("error", () => {});
  other.destroy();
});

test("close() resets what does not end in time and refuses what comes later", LIMIT, async (t) => {
  const f = await fixture(t, { limits: { drainMs: 20 } });
  const guest = await httpGuest(t, (_req, res) => void res.write("part"));
  const res = await streaming(f, guest.port);
  const failed = once(res, "error");
  await f.edge.close();
  await failed;
  const refused = await fetch(f.origin, { headers: route(guest.port) });
  assert.equal(refused.status, 503);
  assert.equal(refused.headers.get("retry-after"), "5");
});

test("close() lets a response end that can", LIMIT, async (t) => {
  const f = await fixture(t, { limits: { drainMs: 15_000 } });
  const asked = event();
  const finish = event();
  const guest = await httpGuest(t, async (_req, res) => {
    asked.fire();
    await finish.promise;
    res.end("whole");
  });
  const answer = fetch(f.origin, { headers: route(guest.port) });
  await asked.promise;
  const closed = f.edge.close();
  finish.fire();
  assert.equal(await (await answer).text(), "whole");
  await closed;
});
