import assert from "node:assert/strict";
import { createServer, type IncomingMessage, type Server, type ServerResponse } from "node:http";
import { createServer as createTcpServer, type AddressInfo } from "node:net";
import { test, type TestContext } from "node:test";
import fc from "fast-check";
import { GuestClient } from "./client.ts";
import { EnvelopeReader } from "./transport.ts";

/** A guest that answers whatever the test wants. */
async function guest(
  t: TestContext,
  answer: (req: IncomingMessage, res: ServerResponse) => void,
): Promise<GuestClient> {
  const server: Server = createServer((req, res) => {
    req.resume();
    answer(req, res);
  });
  await new Promise<void>((done) => server.listen(0, "127.0.0.1", done));
  const client = new GuestClient({ host: "127.0.0.1", port: (server.address() as AddressInfo).port });
  t.after(async () => {
    client.close();
    server.closeAllConnections();
    await new Promise((done) => server.close(done));
  });
  return client;
}

const signal = (): AbortSignal => AbortSignal.timeout(30_000);
const frame = (body: unknown, flags = 0): Buffer => {
  const text = Buffer.from(typeof body === "string" ? body : JSON.stringify(body));
  const head = Buffer.alloc(5);
  head.writeUInt8(flags, 0);
  head.writeUInt32BE(text.length, 1);
  return Buffer.concat([head, text]);
};
const started = frame({ event: { start: { pid: 7 } } });
const echo = { cmd: "echo" };

test("a command is followed to its end, whatever the pieces it arrives in", async (t) => {
  const stream = Buffer.concat([
    started,
    frame({ event: { keepalive: {} }, later: "field" }),
    frame({ event: { data: { stdout: Buffer.from("out").toString("base64") } } }),
    frame({ event: { data: { stderr: Buffer.from("err").toString("base64") } } }),
    frame({ event: { somethingNew: {} } }),
    frame({ event: { end: { exitCode: 3, exited: true, status: "exit status 3", error: "exit status 3" } } }),
    frame({}, 2),
  ]);
  const client = await guest(t, (_, res) => {
    for (const byte of stream) res.write(Buffer.from([byte]));
    res.end();
  });
  const result = await client.exec(echo, signal());
  assert.deepEqual(result, { exitCode: 3, status: "exit status 3", stdout: "out", stderr: "err" });
});

test("answers that are not the protocol end in GUEST_FAILED", async (t) => {
  const bad: Record<string, Buffer> = {
    "no start": Buffer.concat([frame({ event: { keepalive: {} } }), frame({}, 2)]),
    "not json": Buffer.concat([frame("{"), frame({}, 2)]),
    "pid is text": frame({ event: { start: { pid: "7" } } }),
    "huge envelope": Buffer.from([0, 0xff, 0xff, 0xff, 0xff]),
    compressed: frame({ event: { start: { pid: 7 } } }, 1),
    "cut off": Buffer.concat([started, frame({ event: { data: {} } }).subarray(0, 8)]),
    "no end": started,
    "end of stream is junk": Buffer.concat([started, frame("[]", 2)]),
    empty: Buffer.alloc(0),
  };
  for (const [name, body] of Object.entries(bad)) {
    const client = await guest(t, (_, res) => void res.end(body));
    await assert.rejects(client.exec(echo, signal()), { code: "GUEST_FAILED" }, name);
  }
});

test("errors of the guest keep their meaning", async (t) => {
  const cases: [status: number, body: unknown, code: string][] = [
    [404, { code: "not_found", message: "file not found: x" }, "NOT_FOUND"],
    [400, { code: "invalid_argument", message: "no" }, "INVALID_ARGUMENT"],
    [401, { code: 401, message: "unauthorized" }, "UNAUTHENTICATED"],
    [507, { code: 507, message: "full" }, "NO_SPACE"],
    [500, "<html>", "GUEST_FAILED"],
    [200, ["not an object"], "GUEST_FAILED"],
  ];
  for (const [status, body, code] of cases) {
    const client = await guest(t, (_, res) => void res.writeHead(status).end(JSON.stringify(body)));
    await assert.rejects(client.stat("/x", signal()), { code });
  }
  const late = frame({ error: { code: "deadline_exceeded", message: "too late" } }, 2);
  const client = await guest(t, (_, res) => void res.end(Buffer.concat([started, late])));
  await assert.rejects(client.exec(echo, signal()), { code: "DEADLINE" });
});

test("an endless answer is cut off at its bound", async (t) => {
  const client = await guest(t, (_, res) => {
    const chunk = Buffer.alloc(1 << 20, " ");
    const pour = (): void => {
      while (!res.destroyed && res.write(chunk));
    };
    res.on("drain", pour);
    pour();
  });
  await assert.rejects(client.metrics(signal()), /answered more than/);
});

test("more output than the caller allows ends the call", async (t) => {
  const chunk = frame({ event: { data: { stdout: Buffer.alloc(1000).toString("base64") } } });
  const client = await guest(t, (_, res) => void res.write(Buffer.concat([started, chunk, chunk])));
  await assert.rejects(client.exec({ ...echo, maxOutput: 1500 }, signal()), { code: "TOO_LARGE" });
});

test("a guest that never answers is left when the caller gives up", async (t) => {
  const silent = await guest(t, () => {});
  const gone = new AbortController();
  const call = silent.health(gone.signal);
  gone.abort(new DOMException("enough", "TimeoutError"));
  await assert.rejects(call, { code: "DEADLINE" });
  const halfway = await guest(t, (_, res) => void res.write(started));
  const process = await halfway.start(echo, signal());
  assert.equal(process.pid, 7);
  halfway.close();
  await assert.rejects(async () => {
    for await (const _ of process);
  });
});

test("waitReady asks again until the guest is there", async (t) => {
  // A port that is free at first.
  const probe = createTcpServer();
  await new Promise<void>((done) => probe.listen(0, "127.0.0.1", done));
  const { port } = probe.address() as AddressInfo;
  await new Promise((done) => probe.close(done));
  const client = new GuestClient({ host: "127.0.0.1", port });
  const ready = client.waitReady(signal());
  let asked = 0;
  const server = createServer((_, res) => void res.writeHead(++asked < 3 ? 503 : 204).end());
  await new Promise<void>((done) => server.listen(port, "127.0.0.1", done));
  t.after(() => {
    client.close();
    server.close();
  });
  await ready;
  assert.equal(asked, 3);
  const aborted = new GuestClient({ host: "127.0.0.1", port: 1 });
  await assert.rejects(aborted.waitReady(AbortSignal.abort(new Error("stop"))), /stop/);
});

test("the envelope reader gives the same messages for every cut of the bytes, and never more than were sent", () => {
  const bodies = fc.array(fc.uint8Array({ maxLength: 40 }), { maxLength: 6 });
  fc.assert(
    fc.property(bodies, fc.array(fc.integer({ min: 1, max: 9 }), { minLength: 1 }), (messages, cuts) => {
      const bytes = Buffer.concat(messages.map((m) => frame(Buffer.from(m).toString("latin1"))));
      const reader = new EnvelopeReader();
      const seen: string[] = [];
      for (let at = 0, i = 0; at < bytes.length; i++) {
        const next = at + (cuts[i % cuts.length] ?? 1);
        for (const m of reader.push(bytes.subarray(at, next))) seen.push(m.body.toString());
        at = next;
      }
      assert.deepEqual(
        seen,
        messages.map((m) => Buffer.from(m).toString("latin1")),
      );
    }),
  );
});

test("the envelope reader never believes a length beyond its bound", () => {
  fc.assert(
    fc.property(fc.uint8Array({ maxLength: 64 }), (bytes) => {
      const reader = new EnvelopeReader();
      try {
        for (const m of reader.push(Buffer.from(bytes))) assert.ok(m.body.length <= bytes.length);
      } catch (e) {
        assert.match(String(e), /more than/);
      }
    }),
  );
});
