import assert from "node:assert/strict";
import { once } from "node:events";
import { mkdtempSync, rmSync } from "node:fs";
import { createServer, type IncomingMessage, type ServerResponse } from "node:http";
import { connect as connectH2, type ClientHttp2Session, constants, type IncomingHttpHeaders } from "node:http2";
import { request as httpsRequest } from "node:https";
import { type AddressInfo, connect as connectTcp } from "node:net";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { test, type TestContext } from "node:test";
import { connect as connectTls } from "node:tls";
import { silentLogger } from "@aenv/base";
import { Certificates, ensureAuthority } from "@aenv/names";
import { createEdge, createFrontServer, type Edge } from "@aenv/proxy";
import { fakeServer } from "../test/fake-server.ts";

const LIMIT = { timeout: 60_000 };
const ID = "iaaaabbbbccccdddd000";

interface Node {
  port: number;
  key: string;
  ca: string;
  edge: Edge;
  /** Host name of the guest's port. */
  host: string;
  close(): Promise<void>;
}

/** API, edge and TLS on one port, in front of one guest. */
async function node(t: TestContext, handler: (req: IncomingMessage, res: ServerResponse) => void): Promise<Node> {
  const guest = createServer(handler);
  await new Promise<void>((resolve) => guest.listen(0, "127.0.0.1", resolve));
  const guestPort = (guest.address() as AddressInfo).port;
  const dir = mkdtempSync(join(tmpdir(), "aenv-tls-"));
  const edge = createEdge({
    resolve: (id, port) => (id === ID ? { run: "r1", host: "127.0.0.1", port } : { error: "not_found" }),
    domain: "localhost",
    logger: silentLogger,
  });
  const tls = await Certificates.open({ dir, domain: "localhost", names: [], logger: silentLogger });
  const server = fakeServer({ server: (api) => createFrontServer({ edge, api, tls }) });
  const origin = await server.app.listen({ port: 0, host: "127.0.0.1" });
  let closing: Promise<void> | undefined;
  const close = (): Promise<void> =>
    (closing ??= (async () => {
      await edge.close();
      await server[Symbol.asyncDispose]();
    })());
  t.after(async () => {
    await close();
    tls[Symbol.dispose]();
    guest.closeAllConnections();
    guest.close();
    rmSync(dir, { recursive: true });
  });
  const { cert } = await ensureAuthority(dir, Date.now());
  return {
    port: Number(new URL(origin).port),
    key: server.key,
    ca: cert,
    edge,
    host: `${guestPort}-${ID}.localhost`,
    close,
  };
}

/** Names lead here without a resolver. */
const here = (n: Node, host: string): { ca: string; servername: string; host: string; port: number } => ({
  ca: n.ca,
  servername: host,
  host: "127.0.0.1",
  port: n.port,
});

function h2(t: TestContext, n: Node, host = n.host): ClientHttp2Session {
  const session = connectH2(`https://${host}:${n.port}`, {
    createConnection: () => connectTls({ ...here(n, host), ALPNProtocols: ["h2"] }),
  });
  session.on("error", () => {});
  t.after(() => session.destroy());
  return session;
}

interface Got {
  headers: IncomingHttpHeaders & { ":status"?: number | undefined };
  body: string;
  /** HTTP/2 error code of the stream. */
  code: number;
}

/** One request over HTTP/2; resolves when its stream is closed, however that ended. */
function get(session: ClientHttp2Session, headers: Record<string, string>, body?: string | Buffer): Promise<Got> {
  return new Promise((resolve) => {
    const stream = session.request(headers, { endStream: body === undefined });
    const got: Got = { headers: {}, body: "", code: -1 };
    stream.on("response", (h) => (got.headers = h));
    stream.setEncoding("utf8").on("data", (d: string) => (got.body += d));
    stream.on("error", () => {});
    stream.on("close", () => resolve({ ...got, code: stream.rstCode }));
    if (body !== undefined) stream.end(body);
  });
}

/** A guest that tells what it was asked, and with which body. */
function echo(req: IncomingMessage, res: ServerResponse): void {
  const parts: Buffer[] = [];
  req.on("data", (d: Buffer) => parts.push(d));
  req.on("end", () => {
    res.setHeader("X-Answer", ["one", "two"]);
    const { method, url, headers } = req;
    res.end(JSON.stringify({ method, url, headers, bytes: Buffer.concat(parts).length }));
  });
}

function https(
  n: Node,
  host: string,
  path: string,
  headers: Record<string, string> = {},
): Promise<{ status: number; body: string }> {
  return new Promise((resolve, reject) => {
    const req = httpsRequest(
      { ...here(n, host), path, headers: { host: `${host}:${n.port}`, ...headers }, agent: false },
      (res) => {
        let body = "";
        res.setEncoding("utf8").on("data", (d: string) => (body += d));
        res.on("end", () => resolve({ status: res.statusCode ?? 0, body }));
      },
    );
    req.on("error", reject).end();
  });
}

test("one port speaks HTTP, HTTPS and HTTP/2, to the API and to sandboxes", LIMIT, async (t) => {
  const n = await node(t, echo);
  const plain = await fetch(`http://127.0.0.1:${n.port}/health`);
  assert.equal(plain.status, 200);
  assert.equal((await https(n, "api.localhost", "/v2/sandboxes", { "x-api-key": n.key })).body, "[]");
  const guest = JSON.parse((await https(n, n.host, "/a")).body) as { headers: Record<string, string> };
  assert.equal(guest.headers["x-forwarded-proto"], "https");

  const api = await get(h2(t, n, "api.localhost"), { ":path": "/v2/sandboxes", "x-api-key": n.key });
  assert.deepEqual([api.headers[":status"], api.body, api.code], [200, "[]", 0]);
  const refused = await get(h2(t, n, "api.localhost"), { ":path": "/v2/sandboxes" });
  assert.equal(refused.headers[":status"], 401);
  const missing = await get(h2(t, n, "80-iunknown.localhost"), { ":path": "/" });
  assert.equal(missing.headers[":status"], 502);
  assert.equal((JSON.parse(missing.body) as { message: string }).message, "The sandbox was not found");
});

test(
  "a guest sees an HTTP/2 request as HTTP/1.1: host, cookies, body, client; and its headers come back",
  LIMIT,
  async (t) => {
    const n = await node(t, echo);
    const session = h2(t, n);
    const ask = async (
      headers: Record<string, string>,
      body?: string,
    ): Promise<{ method: string; url: string; headers: Record<string, string>; bytes: number }> => {
      const got = await get(session, headers, body);
      assert.equal(got.headers[":status"], 200, got.body);
      assert.equal(got.headers["x-answer"], "one, two");
      assert.equal(got.headers["connection"], undefined);
      return JSON.parse(got.body) as Awaited<ReturnType<typeof ask>>;
    };
    const first = await ask({ ":path": "/a?b=c", cookie: "a=1", te: "trailers" });
    assert.deepEqual([first.method, first.url, first.bytes], ["GET", "/a?b=c", 0]);
    assert.equal(first.headers["host"], `${n.host}:${n.port}`);
    assert.equal(first.headers["cookie"], "a=1");
    assert.equal(first.headers["x-forwarded-for"], "127.0.0.1");
    assert.equal(first.headers["x-forwarded-proto"], "https");
    const known = await ask({ ":path": "/", ":method": "PUT", "content-length": "5" }, "hello");
    assert.deepEqual(
      [known.bytes, known.headers["content-length"], known.headers["transfer-encoding"]],
      [5, "5", undefined],
    );
    const unknown = await ask({ ":path": "/", ":method": "POST" }, "x".repeat(300_000));
    assert.deepEqual([unknown.bytes, unknown.headers["transfer-encoding"]], [300_000, "chunked"]);
    const empty = await ask({ ":path": "/", ":method": "POST" });
    assert.deepEqual([empty.bytes, empty.headers["content-length"]], [0, "0"]);
  },
);

test("a response of HTTP/2 has its status, its lack of a body, its trailers and its length", LIMIT, async (t) => {
  const n = await node(t, (req, res) => {
    if (req.url === "/none") res.writeHead(204).end();
    else if (req.url === "/head") res.writeHead(200, { "content-length": "10" }).end();
    else if (req.url === "/large") res.end(Buffer.alloc(5_000_000, "y"));
    else {
      res.writeHead(200, { trailer: "x-sum" });
      res.write("part");
      res.addTrailers({ "x-sum": "42" });
      res.end();
    }
  });
  const session = h2(t, n);
  const none = await get(session, { ":path": "/none" });
  assert.deepEqual([none.headers[":status"], none.body, none.code], [204, "", 0]);
  const head = await get(session, { ":path": "/head", ":method": "HEAD" });
  assert.deepEqual([head.headers["content-length"], head.body, head.code], ["10", "", 0]);
  const many = await Promise.all(Array.from({ length: 20 }, () => get(session, { ":path": "/large" })));
  for (const large of many)
    assert.deepEqual([large.headers["content-length"], large.body.length, large.code], ["5000000", 5_000_000, 0]);
  const stream = session.request({ ":path": "/trailers" });
  const trailers = once(stream, "trailers");
  stream.resume();
  assert.equal(((await trailers) as [IncomingHttpHeaders])[0]["x-sum"], "42");
});

test("events arrive one by one over HTTP/2, and a client that leaves stops the guest", LIMIT, async (t) => {
  const said = Promise.withResolvers<ServerResponse>();
  const gone = Promise.withResolvers<void>();
  const n = await node(t, (_req, res) => {
    res.writeHead(200, { "content-type": "text/event-stream" });
    res.flushHeaders();
    res.on("close", () => gone.resolve());
    said.resolve(res);
  });
  const stream = h2(t, n).request({ ":path": "/" });
  await once(stream, "response");
  const guest = await said.promise;
  for (const text of ["one", "two"]) {
    guest.write(text);
    const [data] = (await once(stream, "data")) as [Buffer];
    assert.equal(data.toString(), text);
  }
  stream.on("error", () => {}).close(constants.NGHTTP2_CANCEL);
  await gone.promise;
});

test("a stream of a VM that ends is reset, over HTTP/2 and HTTPS; what comes next gets 502", LIMIT, async (t) => {
  const n = await node(t, (_req, res) => void res.write("part"));
  const session = h2(t, n);
  const stream = session.request({ ":path": "/" }).on("error", () => {});
  await once(stream, "data");
  const secure = httpsRequest({ ...here(n, n.host), headers: { host: n.host }, agent: false })
    .on("error", () => {})
    .end();
  const [res] = (await once(secure, "response")) as [IncomingMessage];
  await once(res, "data");
  const closed = new Promise((resolve) => stream.once("close", resolve));
  const failed = once(res, "error");
  n.edge.endRun("r1");
  await closed;
  assert.notEqual(stream.rstCode, constants.NGHTTP2_NO_ERROR);
  await failed;
  assert.equal(res.complete, false);
  assert.equal((await get(session, { ":path": "/" })).headers[":status"], 502);
});

test("an upload that is refused at once gets its answer, and is told to stop", LIMIT, async (t) => {
  const n = await node(t, (_req, res) => void res.writeHead(413).end("too large"));
  const stream = h2(t, n).request({ ":path": "/", ":method": "POST" });
  stream.on("error", () => {});
  let body = "";
  stream.on("data", (d: Buffer) => (body += d.toString()));
  const response = once(stream, "response") as Promise<[IncomingHttpHeaders & { ":status": number }]>;
  const closed = new Promise((resolve) => stream.once("close", resolve));
  const more = (): void => {
    if (!stream.destroyed) stream.write(Buffer.alloc(16_384), () => setImmediate(more));
  };
  more();
  assert.equal((await response)[0][":status"], 413);
  await closed;
  assert.equal(body, "too large");
});

test("a request of HTTP/2 that could be read in two ways reaches no guest", LIMIT, async (t) => {
  let asked = 0;
  const n = await node(t, (_req, res) => {
    asked++;
    res.end();
  });
  const bad: Record<string, string>[] = [
    { ":path": "/", host: "1-iother.localhost" },
    { ":path": "/", ":authority": "a b" },
    { ":path": "http://other.test/" },
    { ":path": "/", ":method": "GET /x HTTP/1.1" },
    { ":path": "/", "content-length": "7" },
  ];
  for (const headers of bad) {
    const got = await get(h2(t, n), headers).catch(() => undefined);
    assert.notEqual(got?.headers[":status"], 200, JSON.stringify(headers));
  }
  const long = await get(h2(t, n), { ":path": "/", ":method": "POST", "content-length": "3" }, "12345");
  assert.notEqual(long.headers[":status"], 200);
  assert.equal(asked, 0);
});

test("what is neither HTTP nor TLS gets 400, a handshake that breaks off hurts nobody", LIMIT, async (t) => {
  const n = await node(t, echo);
  const raw = connectTcp(n.port, "127.0.0.1", () => raw.end("\x01nonsense\r\n\r\n"));
  const [answer] = (await once(raw, "data")) as [Buffer];
  assert.match(answer.toString(), /^HTTP\/1\.1 400 /);
  const broken = connectTcp(n.port, "127.0.0.1", () => broken.end(Buffer.from("160301000501000001", "hex")));
  broken.on("error", () => {}).resume();
  await once(broken, "close");
  assert.equal((await https(n, "localhost", "/health")).status, 200);
});

test("an upgraded connection passes bytes both ways over TLS", LIMIT, async (t) => {
  const guest = createServer().on("upgrade", (_req, socket) => {
    socket.write("HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: echo\r\n\r\n");
    socket.pipe(socket);
  });
  await new Promise<void>((resolve) => guest.listen(0, "127.0.0.1", resolve));
  t.after(() => guest.close());
  const n = await node(t, echo);
  const host = `${(guest.address() as AddressInfo).port}-${ID}.localhost`;
  const client = connectTls({ ...here(n, host), ALPNProtocols: ["http/1.1"] });
  client.write(`GET / HTTP/1.1\r\nHost: ${host}\r\nConnection: Upgrade\r\nUpgrade: echo\r\n\r\n`);
  const [head] = (await once(client, "data")) as [Buffer];
  assert.match(head.toString(), /^HTTP\/1\.1 101 /);
  client.write("there and back");
  const [back] = (await once(client, "data")) as [Buffer];
  assert.equal(back.toString(), "there and back");
  const closed = once(client, "close");
  client.end();
  await closed;
});

test("closing the node ends idle connections, those that never said a word and those of HTTP/2", LIMIT, async (t) => {
  const n = await node(t, echo);
  const silent = connectTcp(n.port, "127.0.0.1");
  await once(silent, "connect");
  silent.on("error", () => {}).resume();
  const session = h2(t, n);
  assert.equal((await get(session, { ":path": "/" })).headers[":status"], 200);
  const ends = [once(silent, "close"), once(session, "close")];
  await n.close();
  await Promise.all(ends);
});
