import assert from "node:assert/strict";
import { once } from "node:events";
import { type IncomingMessage, request } from "node:http";
import { Readable } from "node:stream";
import { test } from "node:test";
import { bodyOf, event, fixture, type Fixture, httpGuest, ID, RawClient, rawGuest } from "./testing.ts";

const LIMIT = { timeout: 30_000 };

function route(port: number): Record<string, string> {
  return { "E2b-Sandbox-Id": ID, "E2b-Sandbox-Port": String(port) };
}

function open(f: Fixture, port: number, o: { method?: string; headers?: Record<string, string> } = {}) {
  return request({
    host: "127.0.0.1",
    port: f.port,
    method: o.method ?? "GET",
    headers: { ...route(port), ...o.headers },
  });
}

test("server-sent events arrive one by one, while the stream stays open", LIMIT, async (t) => {
  const f = await fixture(t);
  const next: (() => void)[] = [];
  const guest = await httpGuest(t, async (_req, res) => {
    res.writeHead(200, { "Content-Type": "text/event-stream" });
    res.flushHeaders();
    for (let i = 0; i < 3; i++) {
      await new Promise<void>((resolve) => next.push(resolve));
      res.write(`data: ${i}\n\n`);
    }
    res.end();
  });
  const res = await fetch(f.origin, { headers: route(guest.port) });
  assert.equal(res.headers.get("content-type"), "text/event-stream");
  const reader = (res.body as ReadableStream<Uint8Array>).getReader();
  for (let i = 0; i < 3; i++) {
    // The guest sends an event only now that the one before has been read.
    next.shift()?.();
    assert.equal(Buffer.from((await reader.read()).value ?? []).toString(), `data: ${i}\n\n`);
  }
  assert.equal((await reader.read()).done, true);
});

test("a body is echoed piece by piece in both directions at once", LIMIT, async (t) => {
  const f = await fixture(t);
  const guest = await httpGuest(t, (req, res) => {
    res.flushHeaders();
    req.pipe(res);
  });
  const req = open(f, guest.port, { method: "POST" });
  req.flushHeaders();
  const [res] = (await once(req, "response")) as [IncomingMessage];
  for (const word of ["one", "two", "three"]) {
    req.write(word);
    const [back] = (await once(res, "data")) as [Buffer];
    assert.equal(back.toString(), word);
  }
  req.end();
  await once(res, "end");
});

test("a chunked upload of unknown length arrives whole and without its framing", LIMIT, async (t) => {
  const f = await fixture(t);
  const guest = await httpGuest(t, async (req, res) => {
    const body = await bodyOf(req);
    res.end(
      JSON.stringify({ n: body.length, te: req.headers["transfer-encoding"], cl: req.headers["content-length"] }),
    );
  });
  const parts = Array.from({ length: 50 }, (_, i) => Buffer.alloc(i * 100 + 1, i));
  const res = await fetch(f.origin, {
    method: "PUT",
    headers: route(guest.port),
    body: Readable.toWeb(Readable.from(parts)) as ReadableStream,
    duplex: "half",
  });
  assert.deepEqual(await res.json(), { n: parts.reduce((n, p) => n + p.length, 0), te: "chunked" });
});

test(
  "HEAD, 204 and 304 have their headers and no body, and the connection serves the next request",
  LIMIT,
  async (t) => {
    const f = await fixture(t);
    let connections = 0;
    const guest = await httpGuest(t, (req, res) => {
      if (req.url === "/204") res.writeHead(204, { "X-A": "1" }).end();
      else if (req.url === "/304") res.writeHead(304, { ETag: '"x"', "Content-Length": "77" }).end();
      else res.writeHead(200, { "Content-Length": "1234" }).end(req.method === "HEAD" ? undefined : "x".repeat(1234));
    });
    guest.server.on("connection", () => connections++);
    const head = await fetch(f.origin, { method: "HEAD", headers: route(guest.port) });
    assert.equal(head.headers.get("content-length"), "1234");
    const none = await fetch(`${f.origin}/204`, { headers: route(guest.port) });
    assert.equal(none.status, 204);
    assert.equal(none.headers.get("content-length"), null);
    const cached = await fetch(`${f.origin}/304`, { headers: route(guest.port) });
    assert.equal(cached.status, 304);
    assert.equal(cached.headers.get("etag"), '"x"');
    assert.equal((await (await fetch(f.origin, { headers: route(guest.port) })).text()).length, 1234);
    assert.equal(connections, 1);
  },
);

test("an empty body keeps its Content-Length of 0", LIMIT, async (t) => {
  const f = await fixture(t);
  const guest = await httpGuest(t, (_req, res) => void res.writeHead(200, { "Content-Length": "0" }).end());
  const res = await fetch(f.origin, { headers: route(guest.port) });
  assert.equal(res.headers.get("content-length"), "0");
  assert.equal(await res.text(), "");
});

test("trailers pass in both directions", LIMIT, async (t) => {
  const f = await fixture(t);
  const guest = await httpGuest(t, async (req, res) => {
    await bodyOf(req);
    res.writeHead(200, { Trailer: "X-Sum" });
    res.write("body");
    res.addTrailers({ "X-Sum": String(req.trailers["x-up"]) });
    res.end();
  });
  const req = open(f, guest.port, { method: "POST", headers: { Trailer: "X-Up", "Transfer-Encoding": "chunked" } });
  req.write("abc");
  req.addTrailers({ "X-Up": "42" });
  req.end();
  const [res] = (await once(req, "response")) as [IncomingMessage];
  assert.equal((await bodyOf(res)).toString(), "body");
  assert.deepEqual({ ...res.trailers }, { "x-sum": "42" });
});

test("100 comes from the guest: a client that waits for it sends nothing before", LIMIT, async (t) => {
  const f = await fixture(t, { limits: { continueMs: 20_000 } });
  const asked = event();
  const allow = event();
  const guest = await httpGuest(t, (_req, res) => void res.writeHead(500).end());
  guest.server.on("checkContinue", (req: IncomingMessage, res) => {
    asked.fire();
    void allow.promise.then(async () => {
      res.writeContinue();
      res.end((await bodyOf(req)).toString());
    });
  });
  const req = open(f, guest.port, { method: "POST", headers: { Expect: "100-continue", "Content-Length": "3" } });
  let continued = false;
  req.on("continue", () => {
    continued = true;
    req.end("abc");
  });
  req.flushHeaders();
  await asked.promise;
  assert.equal(continued, false);
  allow.fire();
  const [res] = (await once(req, "response")) as [IncomingMessage];
  assert.equal((await bodyOf(res)).toString(), "abc");
});

test("a guest that refuses instead of saying 100 is heard, and the body stays where it is", LIMIT, async (t) => {
  const f = await fixture(t);
  const guest = await httpGuest(t, () => {});
  guest.server.on("checkContinue", (_req, res) => void res.writeHead(417).end("no"));
  const req = open(f, guest.port, { method: "POST", headers: { Expect: "100-continue", "Content-Length": "3" } });
  req.on("continue", () => assert.fail("nobody said 100"));
  req.flushHeaders();
  const [res] = (await once(req, "response")) as [IncomingMessage];
  assert.equal(res.statusCode, 417);
  assert.equal((await bodyOf(res)).toString(), "no");
  req.destroy();
});

test("a guest that knows no 100 gets the body after a moment all the same", LIMIT, async (t) => {
  const f = await fixture(t, { limits: { continueMs: 10 } });
  const port = await rawGuest(t, (s) => {
    let seen = "";
    s.on("data", (d: Buffer) => {
      seen += d.toString();
      if (seen.endsWith("abc")) s.end("HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok");
    });
  });
  const req = open(f, port, { method: "POST", headers: { Expect: "100-continue", "Content-Length": "3" } });
  req.on("continue", () => req.end("abc"));
  req.flushHeaders();
  const [res] = (await once(req, "response")) as [IncomingMessage];
  assert.equal((await bodyOf(res)).toString(), "ok");
});

test("early hints reach the client before the response", LIMIT, async (t) => {
  const f = await fixture(t);
  const guest = await httpGuest(t, (_req, res) => {
    res.writeEarlyHints({ link: "</a.css>; rel=preload; as=style" });
    res.end("x");
  });
  const req = open(f, guest.port);
  const hints: unknown[] = [];
  req.on("information", (i) => hints.push([i.statusCode, i.headers["link"]]));
  req.end();
  const [res] = (await once(req, "response")) as [IncomingMessage];
  await bodyOf(res);
  assert.deepEqual(hints, [[103, "</a.css>; rel=preload; as=style"]]);
});

test("an answer that comes before the upload is done reaches a client that goes on sending", LIMIT, async (t) => {
  const f = await fixture(t);
  // As Go's server does it: it answers, ends its half, and reads no more.
  const port = await rawGuest(t, (s) => {
    s.once("data", () => {
      s.pause();
      s.end('HTTP/1.1 507 Insufficient Storage\r\nConnection: close\r\nContent-Length: 12\r\n\r\n{"code":507}');
    });
  });
  const body = Buffer.alloc(8 * 1024 * 1024, "x");
  const res = await fetch(f.origin, { method: "POST", headers: route(port), body });
  assert.equal(res.status, 507);
  assert.deepEqual(await res.json(), { code: 507 });
});

test("an upload to an unknown sandbox gets its 502 although the body is large", LIMIT, async (t) => {
  const f = await fixture(t);
  const body = Buffer.alloc(8 * 1024 * 1024, "x");
  const res = await fetch(f.origin, { method: "POST", headers: { "E2b-Sandbox-Id": "inone" }, body });
  assert.equal(res.status, 502);
  assert.equal(((await res.json()) as { message: string }).message, "The sandbox was not found");
});

test("a client that stops within its upload is a broken request at the guest, not a short one", LIMIT, async (t) => {
  const f = await fixture(t);
  const begun = event();
  const outcome = event<unknown>();
  const guest = await httpGuest(t, async (req) => {
    req.once("data", () => begun.fire());
    try {
      await bodyOf(req);
      outcome.fire("whole");
    } catch (e) {
      outcome.fire(e);
    }
  });
  for (const framing of ["Content-Length: 100\r\n\r\nabc", "Transfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n"]) {
    const client = new RawClient(f.port, `POST / HTTP/1.1\r\nHost: ${f.host(guest.port)}\r\n${framing}`);
    await begun.promise;
    client.socket.destroy();
    assert.ok((await outcome.promise) instanceof Error);
  }
});

test("a client that leaves within a download stops the guest", LIMIT, async (t) => {
  const f = await fixture(t);
  const gone = event();
  const guest = await httpGuest(t, (_req, res) => {
    res.on("close", () => gone.fire());
    const more = (): void => {
      while (!res.destroyed && res.write(Buffer.alloc(65536)));
    };
    res.on("drain", more);
    more();
  });
  const abort = new AbortController();
  const res = await fetch(f.origin, { headers: route(guest.port), signal: abort.signal });
  await (res.body as ReadableStream<Uint8Array>).getReader().read();
  abort.abort();
  await gone.promise;
});

test("an HTTP/1.0 client gets a body that ends with the connection", LIMIT, async (t) => {
  const f = await fixture(t);
  const guest = await httpGuest(t, (_req, res) => {
    res.write("a");
    res.end("b");
  });
  const client = new RawClient(f.port, `GET / HTTP/1.0\r\nHost: ${f.host(guest.port)}\r\n\r\n`);
  assert.equal(await client.closed, undefined);
  assert.match(client.text, /\r\n\r\nab$/);
});
