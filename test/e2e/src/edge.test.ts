import assert from "node:assert/strict";
import { createHash, randomBytes } from "node:crypto";
import { connect } from "node:net";
import { test } from "node:test";
import type { Sandbox } from "e2b";
import { type Answer, byPort, eventually, plain, sandboxFor, url } from "./node.ts";

const LIMIT = { timeout: 120_000 };
const { hostname, port } = new URL(url);

const byHost = (s: Sandbox, guestPort: number, path = "/"): Promise<Answer> =>
  plain(path, { Host: s.getHost(guestPort) });

const SERVER = `
import http.server, sys
class H(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200); self.end_headers(); self.wfile.write(("%s via %s" % (self.path, self.headers.get("host"))).encode())
    def log_message(self, *a): pass
http.server.HTTPServer((sys.argv[1], int(sys.argv[2])), H).serve_forever()
`;

test("a server in the guest is reached by host and by headers, on all addresses and on loopback", LIMIT, async (t) => {
  const sandbox = await sandboxFor(t);
  await sandbox.files.write("server.py", SERVER);
  await sandbox.commands.run("python3 server.py 0.0.0.0 8000", { background: true, timeoutMs: 0 });
  await sandbox.commands.run("python3 server.py 127.0.0.1 9000", { background: true, timeoutMs: 0 });
  for (const guestPort of [8000, 9000]) {
    const answer = await eventually(async () => {
      const a = await byPort(sandbox, guestPort, "/x?y=1");
      return a.status === 200 && a;
    });
    assert.match(answer.body, /^\/x\?y=1 via /);
    assert.equal((await byHost(sandbox, guestPort, "/h")).status, 200);
  }
});

test("a closed port, an unknown sandbox and a killed one get the bodies that clients compare", LIMIT, async (t) => {
  const sandbox = await sandboxFor(t);
  const closed = await byPort(sandbox, 4321);
  assert.equal(closed.status, 502);
  assert.deepEqual(JSON.parse(closed.body), {
    sandboxId: sandbox.sandboxId,
    message: "The sandbox is running but port is not open",
    port: 4321,
    code: 502,
  });
  await sandbox.kill();
  for (const answer of [await byPort(sandbox, 49_983, "/health"), await byHost(sandbox, 8000)]) {
    assert.equal(answer.status, 502);
    assert.deepEqual(JSON.parse(answer.body), {
      sandboxId: sandbox.sandboxId,
      message: "The sandbox was not found",
      code: 502,
    });
  }
  const bad = await plain("/", { "E2b-Sandbox-Id": "../etc", "E2b-Sandbox-Port": "80" });
  assert.equal(bad.status, 400);
});

test("the routes of envd that only the node may call are hidden", LIMIT, async (t) => {
  const sandbox = await sandboxFor(t);
  assert.equal((await byPort(sandbox, 49_983, "/init")).status, 404);
});

test("envd refuses a caller without the token", LIMIT, async (t) => {
  const sandbox = await sandboxFor(t);
  assert.equal((await byPort(sandbox, 49_983, "/envs")).status, 401);
  assert.equal((await byPort(sandbox, 49_983, "/files?path=/etc/passwd")).status, 401);
});

test("a WebSocket goes through as raw bytes", LIMIT, async (t) => {
  const sandbox = await sandboxFor(t);
  const echo = `
import base64, hashlib, socket
s = socket.socket(); s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1); s.bind(("0.0.0.0", 7000)); s.listen()
while True:
    c, _ = s.accept(); head = b""
    while b"\\r\\n\\r\\n" not in head:
        d = c.recv(4096)
        if not d: break
        head += d
    key = [l.split(b": ")[1] for l in head.split(b"\\r\\n") if l.lower().startswith(b"sec-websocket-key")]
    if not key: c.close(); continue
    a = base64.b64encode(hashlib.sha1(key[0] + b"258EAFA5-E914-47DA-95CA-C5AB0DC85B11").digest())
    c.sendall(b"HTTP/1.1 101 Switching Protocols\\r\\nUpgrade: websocket\\r\\nConnection: Upgrade\\r\\nSec-WebSocket-Accept: " + a + b"\\r\\n\\r\\n")
    while True:
        d = c.recv(65536)
        if not d: break
        c.sendall(d)
`;
  await sandbox.files.write("ws.py", echo);
  await sandbox.commands.run("python3 ws.py", { background: true, timeoutMs: 0 });
  await eventually(async () => (await sandbox.commands.run("ss -Htln sport = :7000")).stdout.includes("7000"));
  const payload = randomBytes(300_000);
  const got = await new Promise<Buffer>((resolve, reject) => {
    const socket = connect({ host: hostname, port: Number(port) });
    const parts: Buffer[] = [];
    let open = false;
    let size = 0;
    socket.on("error", reject);
    socket.on("data", (d: Buffer) => {
      if (!open) {
        assert.match(d.toString("latin1"), /^HTTP\/1\.1 101 /);
        open = true;
        socket.write(payload);
        return;
      }
      parts.push(d);
      if ((size += d.length) >= payload.length) {
        socket.destroy();
        resolve(Buffer.concat(parts));
      }
    });
    socket.write(
      `GET / HTTP/1.1\r\nHost: ${sandbox.getHost(7000)}\r\nConnection: Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Version: 13\r\nSec-WebSocket-Key: ${randomBytes(16).toString("base64")}\r\n\r\n`,
    );
  });
  const sum = (b: Buffer): string => createHash("sha256").update(b).digest("hex");
  assert.equal(sum(got), sum(payload));
});
