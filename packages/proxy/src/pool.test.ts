import assert from "node:assert/strict";
import type { Socket } from "node:net";
import { test } from "node:test";
import { ENVD_IDLE_MS, DEFAULT_LIMITS } from "./limits.ts";
import { event, fixture, type Fixture, gone, httpGuest, ID, rawGuest } from "./testing.ts";

const LIMIT = { timeout: 20_000 };
const OK = "HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok";

function ask(f: Fixture, port: number, init: RequestInit = {}): Promise<Response> {
  return fetch(f.origin, { ...init, headers: { "E2b-Sandbox-Id": ID, "E2b-Sandbox-Port": String(port) } });
}

test("the edge closes idle connections before envd does", () => {
  assert.ok(DEFAULT_LIMITS.idleMs < ENVD_IDLE_MS);
});

test("requests of one run share a connection; another run on the same address gets its own", LIMIT, async (t) => {
  const f = await fixture(t);
  let connections = 0;
  const guest = await httpGuest(t, (req, res) => void res.end(String(req.socket.remotePort)));
  guest.server.on("connection", () => connections++);
  let run = "r1";
  f.setTarget((_id, port) => ({ run, host: "127.0.0.1", port }));
  const first = await (await ask(f, guest.port)).text();
  assert.equal(await (await ask(f, guest.port)).text(), first);
  run = "r2";
  assert.notEqual(await (await ask(f, guest.port)).text(), first);
  assert.equal(connections, 2);
  assert.equal(f.edge.stats().idle, 2);
});

test(
  "the idle connections of a run are closed when it ends, and a late resolution does not bring it back",
  LIMIT,
  async (t) => {
    const f = await fixture(t);
    const sockets: Socket[] = [];
    const port = await rawGuest(t, (s) => {
      sockets.push(s);
      s.on("data", () => s.write(OK)).on("end", () => s.end());
    });
    await (await ask(f, port)).text();
    f.edge.endRun("r1");
    await gone(sockets[0] as Socket);
    assert.equal(f.edge.stats().idle, 0);
    const late = await ask(f, port);
    assert.equal(late.status, 502);
    assert.equal(sockets.length, 1);
  },
);

test(
  "a request on a kept connection that the guest closes meanwhile is sent again, once and only where that is safe",
  LIMIT,
  async (t) => {
    const f = await fixture(t);
    const methods: string[] = [];
    const port = await rawGuest(t, (s) => {
      let n = 0;
      s.on("data", (d: Buffer) => {
        methods.push(d.toString().slice(0, d.indexOf(" ")));
        // The first request of every connection is answered, the second meets a close.
        if (n++ === 0) s.write(OK);
        else s.resetAndDestroy();
      });
    });
    assert.equal((await ask(f, port)).status, 200);
    assert.equal((await ask(f, port)).status, 200);
    assert.deepEqual(methods, ["GET", "GET", "GET"]);
    assert.equal(f.edge.stats().retries, 1);
    methods.length = 0;
    // The last connection is kept and fresh, so this POST uses it.
    const res = await ask(f, port, { method: "POST", body: "x" });
    assert.equal(res.status, 502);
    assert.deepEqual(methods, ["POST"]);
  },
);

test("a first request on a new connection is never sent again", LIMIT, async (t) => {
  const f = await fixture(t);
  let n = 0;
  const port = await rawGuest(t, (s) => {
    s.on("data", () => {
      n++;
      s.resetAndDestroy();
    });
  });
  assert.equal((await ask(f, port)).status, 502);
  assert.equal(n, 1);
});

test(
  "a connection is not kept after HTTP/1.0, Connection: close, or a response of unknown length",
  LIMIT,
  async (t) => {
    const f = await fixture(t);
    for (const reply of [
      "HTTP/1.0 200 OK\r\nContent-Length: 2\r\n\r\nok",
      "HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: 2\r\n\r\nok",
    ]) {
      const closed = event();
      const port = await rawGuest(t, (s) => {
        s.on("data", () => s.write(reply)).on("close", () => closed.fire());
      });
      assert.equal(await (await ask(f, port)).text(), "ok");
      await closed.promise;
    }
    assert.equal(f.edge.stats().idle, 0);
  },
);

test(
  "idle connections are closed after their time, and after the guest's own where it names a shorter one",
  LIMIT,
  async (t) => {
    const f = await fixture(t, { limits: { idleMs: 30 } });
    const closed = event();
    const port = await rawGuest(t, (s) => {
      s.on("data", () => s.write(OK)).on("end", () => closed.fire());
    });
    await (await ask(f, port)).text();
    await closed.promise;
    const g = await fixture(t, { limits: { connectMs: 20 } });
    const short = event();
    const port2 = await rawGuest(t, (s) => {
      s.on("data", () => s.write(OK.replace("\r\n\r\n", "\r\nKeep-Alive: timeout=0\r\n\r\n")));
      s.on("end", () => short.fire());
    });
    await (await ask(g, port2)).text();
    await short.promise;
  },
);

test("many requests at once over few connections each get their own answer", LIMIT, async (t) => {
  const f = await fixture(t);
  const guest = await httpGuest(t, async (req, res) => {
    let body = "";
    for await (const d of req) body += String(d);
    res.end(body);
  });
  const answers = await Promise.all(
    Array.from({ length: 300 }, async (_, i) => (await ask(f, guest.port, { method: "POST", body: `n${i}` })).text()),
  );
  assert.deepEqual(
    answers,
    Array.from({ length: 300 }, (_, i) => `n${i}`),
  );
  assert.equal(f.edge.stats().active, 0);
});
