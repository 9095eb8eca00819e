import assert from "node:assert/strict";
import { randomBytes } from "node:crypto";
import { once } from "node:events";
import { test, type TestContext } from "node:test";
import { setImmediate as turn } from "node:timers/promises";
import { WebSocket, WebSocketServer } from "ws";
import { event, fixture, gone, httpGuest, ID, RawClient, rawGuest } from "./testing.ts";

const LIMIT = { timeout: 20_000 };
const SWITCH = "HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: raw\r\n\r\n";

async function echoSockets(t: TestContext): Promise<number> {
  const guest = await httpGuest(t, (_req, res) => void res.end("plain"));
  const wss = new WebSocketServer({ server: guest.server, perMessageDeflate: true });
  wss.on("connection", (ws, req) => {
    ws.on("error", () => {});
    ws.send(`hello ${req.url}`);
    ws.on("message", (data: Buffer, binary) => ws.send(data, { binary }));
    ws.on("close", (code) => wss.emit("left", code));
  });
  t.after(() => wss.close());
  return guest.port;
}

/** An upgraded connection through the edge, and the guest's end of it. */
async function rawTunnel(t: TestContext, f: Awaited<ReturnType<typeof fixture>>) {
  const guest = event<import("node:net").Socket>();
  const port = await rawGuest(t, (s) => {
    s.once("data", () => {
      s.write(SWITCH);
      guest.fire(s);
    });
  });
  const client = new RawClient(
    f.port,
    `GET / HTTP/1.1\r\nHost: ${f.host(port)}\r\nConnection: Upgrade\r\nUpgrade: raw\r\n\r\n`,
  );
  await client.until("\r\n\r\n");
  assert.equal(client.text, SWITCH);
  client.text = "";
  return { client, guest: await guest.promise };
}

test("a WebSocket passes text, binary, large and compressed messages, and its close code", LIMIT, async (t) => {
  const f = await fixture(t);
  const port = await echoSockets(t);
  const ws = new WebSocket(`ws://127.0.0.1:${f.port}/chat?x=1`, {
    headers: { "E2b-Sandbox-Id": ID, "E2b-Sandbox-Port": String(port) },
  });
  const [hello] = (await once(ws, "message")) as [Buffer];
  assert.equal(hello.toString(), "hello /chat?x=1");
  for (const message of [Buffer.from("text"), randomBytes(3_000_000)]) {
    ws.send(message);
    const [back] = (await once(ws, "message")) as [Buffer];
    assert.ok(back.equals(message));
  }
  ws.close(4001, "bye");
  const [code] = (await once(ws, "close")) as [number];
  assert.equal(code, 4001);
});

test("WebSocket messages of both sides interleave without loss", LIMIT, async (t) => {
  const f = await fixture(t);
  const port = await echoSockets(t);
  const ws = new WebSocket(`ws://127.0.0.1:${f.port}`, { headers: { Host: f.host(port) } });
  await once(ws, "message");
  const got: number[] = [];
  const all = event();
  ws.on("message", (m: Buffer) => {
    got.push(Number(m.toString()));
    if (got.length === 500) all.fire();
  });
  for (let i = 0; i < 500; i++) ws.send(String(i));
  await all.promise;
  assert.deepEqual(
    got,
    Array.from({ length: 500 }, (_, i) => i),
  );
  ws.terminate();
});

test("any protocol passes as raw bytes, and each direction ends on its own", LIMIT, async (t) => {
  const f = await fixture(t);
  const { client, guest } = await rawTunnel(t, f);
  client.socket.write("ping\0\xff");
  const [up] = (await once(guest, "data")) as [Buffer];
  assert.equal(up.toString(), "ping\0\xff");
  client.socket.end();
  guest.resume();
  await once(guest, "end");
  // The client has ended its half: the guest still answers.
  guest.end("late");
  await client.until("late");
  assert.equal(await client.closed, undefined);
  await gone(guest);
  assert.equal(f.edge.stats().active, 0);
});

test("bytes that either side sends along with its head are not lost", LIMIT, async (t) => {
  const f = await fixture(t);
  const got = event<string>();
  const port = await rawGuest(t, (s) => {
    let seen = "";
    s.on("data", (d: Buffer) => {
      const first = seen === "";
      seen += d.toString();
      if (first) s.write(`${SWITCH}early`);
      if (seen.endsWith("ahead")) got.fire(seen);
    });
  });
  const client = new RawClient(
    f.port,
    `GET / HTTP/1.1\r\nHost: ${f.host(port)}\r\nConnection: Upgrade\r\nUpgrade: raw\r\n\r\nahead`,
  );
  await client.until("early");
  assert.match(await got.promise, /\r\n\r\nahead$/);
  client.socket.destroy();
});

test("a guest that does not switch answers like to any request", LIMIT, async (t) => {
  const f = await fixture(t);
  const guest = await httpGuest(t, (_req, res) => void res.writeHead(426, { "X-Why": "no" }).end("upgrade what?"));
  guest.server.on("upgrade", (_req, socket) => {
    socket.end("HTTP/1.1 403 Forbidden\r\nContent-Length: 2\r\n\r\nno");
  });
  const client = new RawClient(
    f.port,
    `GET / HTTP/1.1\r\nHost: ${f.host(guest.port)}\r\nConnection: Upgrade\r\nUpgrade: raw\r\n\r\n`,
  );
  assert.equal(await client.closed, undefined);
  assert.match(client.text, /^HTTP\/1\.1 403 Forbidden\r\n[^]*\r\n\r\nno$/);
  assert.equal(f.edge.stats().active, 0);
});

test(
  "an upgrade for an unknown sandbox, a closed port or envd's own routes gets the usual answers",
  LIMIT,
  async (t) => {
    const f = await fixture(t);
    const ask = async (host: string, path = "/"): Promise<string> => {
      const c = new RawClient(
        f.port,
        `GET ${path} HTTP/1.1\r\nHost: ${host}\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\r\n`,
      );
      await c.closed;
      return c.text;
    };
    assert.match(await ask(f.host(80, "inone")), /^HTTP\/1\.1 502 [^]*"The sandbox was not found"/);
    assert.match(await ask(f.host(1)), /^HTTP\/1\.1 502 [^]*port is not open/);
    assert.match(await ask(f.host(49983), "/init"), /^HTTP\/1\.1 404 /);
    assert.match(await ask(f.host(99999)), /^HTTP\/1\.1 400 /);
  },
);

test("an offer of h2c and an upgrade with a body are served as plain HTTP", LIMIT, async (t) => {
  const f = await fixture(t);
  const guest = await httpGuest(t, async (req, res) => {
    let body = "";
    for await (const d of req) body += String(d);
    res.end(`${req.headers.upgrade ?? "plain"}:${body}`);
  });
  const h2c = new RawClient(
    f.port,
    `GET / HTTP/1.1\r\nHost: ${f.host(guest.port)}\r\nConnection: Upgrade, HTTP2-Settings, close\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMA\r\n\r\n`,
  );
  await h2c.until("plain:");
  const body = new RawClient(
    f.port,
    `POST / HTTP/1.1\r\nHost: ${f.host(guest.port)}\r\nConnection: Upgrade, close\r\nUpgrade: raw\r\nContent-Length: 3\r\n\r\nabc`,
  );
  await body.until("plain:abc");
  h2c.socket.destroy();
  body.socket.destroy();
});

test("a tunnel is reset on both sides when its run ends", LIMIT, async (t) => {
  const f = await fixture(t);
  const { client, guest } = await rawTunnel(t, f);
  const closed = gone(guest);
  guest.resume();
  f.edge.endRun("r1");
  const error = await client.closed;
  assert.equal(error?.code, "ECONNRESET");
  await closed;
  assert.equal(f.edge.stats().active, 0);
});

test("either side's abrupt end is the other's reset", LIMIT, async (t) => {
  const f = await fixture(t);
  const one = await rawTunnel(t, f);
  one.guest.resetAndDestroy();
  assert.ok(await one.client.closed);
  const two = await rawTunnel(t, f);
  const closed = gone(two.guest);
  two.client.socket.resetAndDestroy();
  await closed;
  assert.equal(f.edge.stats().active, 0);
});

test(
  "a raw connection passes bytes as they are, each half on its own, for who has the access token",
  LIMIT,
  async (t) => {
    const f = await fixture(t);
    const port = await rawGuest(t, (s) => {
      s.write("banner ");
      s.on("data", (d: Buffer) => s.write(d));
      s.on("end", () => s.end(" bye"));
    });
    const refusing = await rawGuest(t, (s) => s.destroy());
    f.setTarget((_id, p) => ({ run: "r1", host: "127.0.0.1", port: p, accessToken: "secret" }));
    const head = (p: number, token: string): string =>
      `GET / HTTP/1.1\r\nHost: ${f.host(p)}\r\nX-Access-Token: ${token}\r\nConnection: Upgrade\r\nUpgrade: aenv-tcp\r\n\r\n`;
    const client = new RawClient(f.port, `${head(port, "secret")}\0early`);
    await client.until("early");
    client.socket.write(Buffer.from([1, 2, 255]));
    await client.until("\x01\x02\xff");
    client.socket.end();
    await client.until(" bye");
    assert.match(client.text, /^HTTP\/1\.1 101 [^]*\r\nUpgrade: aenv-tcp\r\n\r\nbanner \0early/);
    assert.equal(await client.closed, undefined);

    for (const [p, token, status] of [
      [port, "wrong", 403],
      [49_983, "secret", 403],
      [1, "secret", 502],
    ] as const) {
      const refused = new RawClient(f.port, head(p, token));
      await refused.until("}");
      assert.match(refused.text, new RegExp(`^HTTP/1\\.1 ${status} `));
      refused.socket.destroy();
    }
    const cut = new RawClient(f.port, head(refusing, "secret"));
    await cut.closed;
    while (f.edge.stats().active > 0) await turn();
  },
);

test("a raw connection is reset when its run ends", LIMIT, async (t) => {
  const f = await fixture(t);
  const port = await rawGuest(t, (s) => void s.write("up"));
  const client = new RawClient(
    f.port,
    `GET / HTTP/1.1\r\nHost: ${f.host(port)}\r\nConnection: Upgrade\r\nUpgrade: aenv-tcp\r\n\r\n`,
  );
  await client.until("up");
  f.edge.endRun("r1");
  assert.equal((await client.closed)?.code, "ECONNRESET");
});
