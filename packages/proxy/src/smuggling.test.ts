import assert from "node:assert/strict";
import { once } from "node:events";
import { test, type TestContext } from "node:test";
import { event, fixture, type Fixture, httpGuest, ID, RawClient, rawGuest } from "./testing.ts";

const LIMIT = { timeout: 20_000 };
const OK = "HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok";

/** A guest that records every byte and answers every head. */
async function recorder(t: TestContext): Promise<{ port: number; seen: () => string }> {
  let seen = "";
  const port = await rawGuest(t, (s) => {
    s.on("data", (d: Buffer) => {
      seen += d.toString("latin1");
      if (seen.endsWith("\r\n\r\n")) s.write(OK);
    });
  });
  return { port, seen: () => seen };
}

function headers(f: Fixture, port: number): string {
  return `Host: ${f.host(port)}\r\n`;
}

const REFUSED: readonly (readonly [what: string, request: (host: string) => string])[] = [
  [
    "length and chunked",
    (h) => `POST / HTTP/1.1\r\n${h}Content-Length: 4\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n`,
  ],
  [
    "chunked and length",
    (h) => `POST / HTTP/1.1\r\n${h}Transfer-Encoding: chunked\r\nContent-Length: 4\r\n\r\n0\r\n\r\n`,
  ],
  ["two lengths", (h) => `POST / HTTP/1.1\r\n${h}Content-Length: 1\r\nContent-Length: 2\r\n\r\nab`],
  ["a signed length", (h) => `POST / HTTP/1.1\r\n${h}Content-Length: +1\r\n\r\na`],
  ["a list of lengths", (h) => `POST / HTTP/1.1\r\n${h}Content-Length: 1, 1\r\n\r\na`],
  ["a coding that is nearly chunked", (h) => `POST / HTTP/1.1\r\n${h}Transfer-Encoding: xchunked\r\n\r\n0\r\n\r\n`],
  ["chunked that is not last", (h) => `POST / HTTP/1.1\r\n${h}Transfer-Encoding: chunked, identity\r\n\r\n0\r\n\r\n`],
  ["a second coding", (h) => `POST / HTTP/1.1\r\n${h}Transfer-Encoding: gzip, chunked\r\n\r\n0\r\n\r\n`],
  ["two hosts", (h) => `GET / HTTP/1.1\r\n${h}Host: other\r\n\r\n`],
  ["a blank before the colon", (h) => `GET / HTTP/1.1\r\n${h}Content-Length : 3\r\n\r\nabc`],
  ["a NUL in a value", (h) => `GET / HTTP/1.1\r\n${h}A: b\0c\r\n\r\n`],
  ["a bare CR in a value", (h) => `GET / HTTP/1.1\r\n${h}A: b\rC: d\r\n\r\n`],
  ["a blank in the target", (h) => `GET /a b HTTP/1.1\r\n${h}\r\n`],
  ["no HTTP", (h) => `GET /\r\n${h}\r\n`],
];

test("a request whose end can be read in two ways is refused, and the guest sees no byte of it", LIMIT, async (t) => {
  const f = await fixture(t);
  const guest = await recorder(t);
  for (const [what, request] of REFUSED) {
    const client = new RawClient(f.port, request(headers(f, guest.port)));
    await client.until("\r\n\r\n");
    assert.match(client.text, /^HTTP\/1\.1 400 /, what);
    client.socket.destroy();
  }
  assert.equal(guest.seen(), "");
});

test("a broken chunked body is cut: the guest never sees the end of a request", LIMIT, async (t) => {
  const f = await fixture(t);
  let seen = "";
  const begun = event();
  const closed = event();
  const port = await rawGuest(t, (s) => {
    s.on("data", (d: Buffer) => {
      seen += d.toString("latin1");
      if (seen.includes("abc")) begun.fire();
    });
    s.on("close", () => closed.fire());
  });
  const client = new RawClient(
    f.port,
    `POST / HTTP/1.1\r\n${headers(f, port)}Transfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n`,
  );
  await begun.promise;
  client.socket.write("zzz\r\n0\r\n\r\n");
  await client.closed;
  await closed.promise;
  assert.doesNotMatch(seen, /\r\n0\r\n/);
});

test("hop-by-hop headers stay at the edge, in both directions, and end-to-end ones pass", LIMIT, async (t) => {
  const f = await fixture(t);
  let seen = "";
  const port = await rawGuest(t, (s) => {
    s.on("data", (d: Buffer) => {
      seen += d.toString("latin1");
      s.write(
        "HTTP/1.1 200 OK\r\nConnection: X-Hop, keep-alive\r\nX-Hop: 1\r\nKeep-Alive: timeout=9\r\nProxy-Authenticate: x\r\nX-End: 2\r\nContent-Length: 2\r\n\r\nok",
      );
    });
  });
  const client = new RawClient(
    f.port,
    `GET /p?q HTTP/1.1\r\n${headers(f, port)}Connection: close, X-Mine, Content-Length, Host\r\nX-Mine: 1\r\nKeep-Alive: 5\r\nTE: trailers, deflate\r\nProxy-Connection: x\r\nProxy-Authorization: x\r\nUpgrade: h2c\r\nHTTP2-Settings: x\r\nX-Forwarded-For: 9.9.9.9\r\nX-Forwarded-Host: evil\r\nX-Forwarded-Proto: evil\r\nE2b-Traffic-Access-Token: secret\r\nX-Kept: \xe4\r\n\r\n`,
  );
  await client.closed;
  const lines = seen.split("\r\n").map((l) => l.toLowerCase());
  assert.equal(lines[0], "get /p?q http/1.1");
  const names = lines.slice(1, -2).map((l) => l.slice(0, l.indexOf(":")));
  assert.deepEqual(names.toSorted(), [
    "host",
    "te",
    "x-forwarded-for",
    "x-forwarded-host",
    "x-forwarded-proto",
    "x-kept",
  ]);
  assert.ok(lines.includes("te: trailers"));
  assert.ok(lines.includes("x-forwarded-for: 9.9.9.9, 127.0.0.1"));
  assert.ok(lines.includes(`x-forwarded-host: ${f.host(port)}`));
  assert.ok(lines.includes("x-forwarded-proto: http"));
  assert.ok(lines.includes("x-kept: \xe4"));
  assert.match(client.text, /X-End: 2/);
  assert.doesNotMatch(client.text, /X-Hop|timeout=9|Proxy-Authenticate/i);
});

test("pipelined requests are answered in their order, each from its own sandbox port", LIMIT, async (t) => {
  const f = await fixture(t);
  const slow = Promise.withResolvers<void>();
  const a = await httpGuest(t, async (_q, res) => {
    await slow.promise;
    res.end("first");
  });
  const b = await httpGuest(t, (_q, res) => {
    slow.resolve();
    res.end("second");
  });
  const client = new RawClient(
    f.port,
    `GET / HTTP/1.1\r\n${headers(f, a.port)}\r\nGET / HTTP/1.1\r\n${headers(f, b.port)}Connection: close\r\n\r\n`,
  );
  await client.closed;
  assert.ok(client.text.indexOf("first") < client.text.indexOf("second"));
  assert.ok(client.text.includes("first"));
});

test("an absolute request target decides the sandbox, and the guest gets a path", LIMIT, async (t) => {
  const f = await fixture(t);
  const guest = await recorder(t);
  const client = new RawClient(
    f.port,
    `GET http://${f.host(guest.port)}/x?y HTTP/1.1\r\nHost: ignored\r\nConnection: close\r\n\r\n`,
  );
  await client.closed;
  assert.match(guest.seen(), new RegExp(`^GET /x\\?y HTTP/1.1\\r\\nHost: ${f.host(guest.port)}\\r\\n`));
});

test("an oversized request head gets 431, and a CONNECT no tunnel", LIMIT, async (t) => {
  const f = await fixture(t);
  const big = new RawClient(f.port, `GET / HTTP/1.1\r\n${headers(f, 1)}A: ${"b".repeat(70_000)}\r\n\r\n`);
  await big.until("HTTP/1.1 431");
  big.socket.destroy();
  const tunnel = new RawClient(f.port, `CONNECT ${f.host(22)}:22 HTTP/1.1\r\n${headers(f, 22)}\r\n`);
  await tunnel.closed;
  assert.doesNotMatch(tunnel.text, /200/);
});

test("a folded request header reaches the guest as one line or not at all", LIMIT, async (t) => {
  const f = await fixture(t);
  const guest = await recorder(t);
  const client = new RawClient(
    f.port,
    `GET / HTTP/1.1\r\n${headers(f, guest.port)}A: b\r\n Content-Length: 5\r\nConnection: close\r\n\r\n`,
  );
  await once(client.socket, "close");
  assert.doesNotMatch(guest.seen(), /^\s*content-length/im);
});

test("the id of another sandbox in a header does not change where a host leads", LIMIT, async (t) => {
  const f = await fixture(t);
  const guest = await recorder(t);
  const asked: string[] = [];
  f.setTarget((id, port) => {
    asked.push(`${id}:${port}`);
    return { run: "r1", host: "127.0.0.1", port: guest.port };
  });
  const client = new RawClient(
    f.port,
    `GET / HTTP/1.1\r\n${headers(f, 80)}E2b-Sandbox-Id: other\r\nE2b-Sandbox-Port: 81\r\nConnection: close\r\n\r\n`,
  );
  await client.closed;
  assert.deepEqual(asked, [`${ID}:80`]);
});
