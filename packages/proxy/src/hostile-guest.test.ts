import assert from "node:assert/strict";
import { test } from "node:test";
import { cannedGuest, event, fixture, type Fixture, ID, RawClient, rawGuest } from "./testing.ts";

const LIMIT = { timeout: 20_000 };

function ask(f: Fixture, port: number, init: RequestInit = {}): Promise<Response> {
  return fetch(f.origin, { ...init, headers: { "E2b-Sandbox-Id": ID, "E2b-Sandbox-Port": String(port) } });
}

const GARBAGE: readonly (readonly [what: string, reply: string])[] = [
  ["bytes that are no HTTP", "SSH-2.0-OpenSSH_9.2\r\n\r\n"],
  ["a status of two digits", "HTTP/1.1 20 OK\r\n\r\n"],
  ["a header without a colon", "HTTP/1.1 200 OK\r\nnonsense\r\n\r\n"],
  ["a header name with a blank", "HTTP/1.1 200 OK\r\na b: c\r\n\r\n"],
  ["a folded header", "HTTP/1.1 200 OK\r\na: b\r\n c\r\n\r\n"],
  ["a header value with a NUL", "HTTP/1.1 200 OK\r\na: b\0c\r\n\r\n"],
  ["a header value with a bare CR", "HTTP/1.1 200 OK\r\na: b\rSet-Cookie: x\r\n\r\n"],
  ["two different lengths", "HTTP/1.1 200 OK\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\nab"],
  ["a length that is no number", "HTTP/1.1 200 OK\r\nContent-Length: -1\r\n\r\n"],
  ["length and chunked at once", "HTTP/1.1 200 OK\r\nContent-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n"],
  ["an unknown transfer coding", "HTTP/1.1 200 OK\r\nTransfer-Encoding: gzip\r\n\r\nx"],
  ["a protocol switch that nobody asked for", "HTTP/1.1 101 Switching Protocols\r\nUpgrade: x\r\n\r\n"],
  ["nothing at all", ""],
  ["half a head", "HTTP/1.1 200 OK\r\nContent-Le"],
];

test("a guest that answers garbage gives a 502 with the reason, never its bytes", LIMIT, async (t) => {
  const f = await fixture(t);
  for (const [what, reply] of GARBAGE) {
    await t.test(what, async (t) => {
      const res = await ask(f, await cannedGuest(t, reply));
      assert.equal(res.status, 502);
      const body = (await res.json()) as { sandboxId: string; code: number; message: string };
      assert.equal(body.sandboxId, ID);
      assert.equal(body.code, 502);
      assert.match(body.message, /^The server in the sandbox /);
    });
  }
  assert.equal(f.edge.stats().active, 0);
});

const BROKEN: readonly (readonly [what: string, reply: string])[] = [
  ["a body shorter than its length", "HTTP/1.1 200 OK\r\nContent-Length: 10\r\n\r\nabc"],
  ["a chunked body without its end", "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n"],
  ["a chunk size that is no number", "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\nxyz\r\n"],
  ["a chunk longer than it said", "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabcdef\r\n0\r\n\r\n"],
  [
    "a chunk size beyond counting",
    "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n1\r\na\r\nffffffffffffffffff\r\n",
  ],
];

test("a response that breaks after its head is an error at the client, not a short body", LIMIT, async (t) => {
  const f = await fixture(t);
  for (const [what, reply] of BROKEN) {
    await t.test(what, async (t) => {
      const port = await cannedGuest(t, reply);
      await assert.rejects(async () => (await ask(f, port)).text());
    });
  }
});

test("a header that never ends is cut at the limit", LIMIT, async (t) => {
  const f = await fixture(t, { limits: { responseHeadBytes: 8192 } });
  const reset = event();
  const port = await rawGuest(t, (s) => {
    s.write("HTTP/1.1 200 OK\r\n");
    const more = (): void => {
      while (!s.destroyed && s.write(`x: ${"y".repeat(1000)}\r\n`));
    };
    s.on("drain", more).on("close", () => reset.fire());
    more();
  });
  const res = await ask(f, port);
  assert.equal(res.status, 502);
  assert.match(await res.text(), /too large/);
  await reset.promise;
});

test("interim responses without end are cut at the limit", LIMIT, async (t) => {
  const f = await fixture(t, { limits: { responseHeadBytes: 8192 } });
  const port = await rawGuest(t, (s) => {
    const more = (): void => {
      while (!s.destroyed && s.write("HTTP/1.1 102 Processing\r\n\r\n"));
    };
    s.on("drain", more);
    more();
  });
  assert.equal((await ask(f, port)).status, 502);
});

test("a guest that answers nothing, and one that stops within its head, give 504", LIMIT, async (t) => {
  const f = await fixture(t, { limits: { responseStartMs: 50, responseHeadMs: 50 } });
  const silent = await rawGuest(t, () => {});
  assert.equal((await ask(f, silent)).status, 504);
  const slow = await cannedGuest(t, "HTTP/1.1 200 OK\r\nX: ", false);
  assert.equal((await ask(f, slow)).status, 504);
});

test("a client that sends its request and goes away takes the guest's connection with it", LIMIT, async (t) => {
  const f = await fixture(t);
  const asked = event();
  const gone = event();
  const port = await rawGuest(t, (s) => {
    s.once("data", () => asked.fire());
    s.once("close", () => gone.fire());
  });
  const client = new RawClient(f.port, `GET / HTTP/1.1\r\nHost: ${f.host(port)}\r\n\r\n`);
  await asked.promise;
  client.socket.destroy();
  await gone.promise;
  assert.equal(f.edge.stats().active, 0);
});

test("what a guest sends after its response is not the answer to the next request", LIMIT, async (t) => {
  const f = await fixture(t);
  let n = 0;
  const port = await rawGuest(t, (s) => {
    const mine = ++n;
    s.on("data", () => {
      s.write(`HTTP/1.1 200 OK\r\nContent-Length: 1\r\n\r\n${mine}HTTP/1.1 200 OK\r\nContent-Length: 6\r\n\r\npoison`);
    });
  });
  for (const want of ["1", "2", "3"]) assert.equal(await (await ask(f, port)).text(), want);
});

test("heads with bare line feeds are understood, as curl does", LIMIT, async (t) => {
  const f = await fixture(t);
  const res = await ask(f, await cannedGuest(t, "HTTP/1.0 200 OK\nX-A: b\n\nhello"));
  assert.equal(res.headers.get("x-a"), "b");
  assert.equal(await res.text(), "hello");
});
