/** Paused sandboxes that traffic wakes, through the edge of a real node. */
import assert from "node:assert/strict";
import { createHash, randomBytes } from "node:crypto";
import { connect } from "node:net";
import { test, type TestContext } from "node:test";
import { Sandbox, type SandboxOpts } from "e2b";
import { type Answer, api, byPort, connection, eventually, plain, sandboxFor, url } from "./node.ts";

const LIMIT = { timeout: 180_000 };
const MINUTE = 60_000;
const WAKES = { lifecycle: { onTimeout: "pause", autoResume: true } } as const;
const NOT_FOUND = "The sandbox was not found";

const SERVER = `
import base64, hashlib, http.server
class H(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        if self.headers.get("upgrade"): return self.tunnel()
        self.send_response(200); self.end_headers(); self.wfile.write(b"awake")
    def do_POST(self):
        body = self.rfile.read(int(self.headers["content-length"]))
        self.send_response(200); self.end_headers(); self.wfile.write(hashlib.sha256(body).hexdigest().encode())
    def tunnel(self):
        self.wfile.write(b"HTTP/1.1 101 Switching Protocols\\r\\nUpgrade: echo\\r\\nConnection: Upgrade\\r\\n\\r\\n")
        while True:
            data = self.rfile.readline()
            if not data: break
            self.wfile.write(b"echo " + data)
        self.close_connection = True
    def log_message(self, *a): pass
http.server.ThreadingHTTPServer(("0.0.0.0", 8000), H).serve_forever()
`;

async function withServer(t: TestContext, opts: SandboxOpts): Promise<Sandbox> {
  const sandbox = await sandboxFor(t, opts);
  await sandbox.files.write("server.py", SERVER);
  await sandbox.commands.run("python3 server.py", { background: true, timeoutMs: 0 });
  await eventually(async () => (await sandbox.commands.run("ss -Htln sport = :8000")).stdout.includes("8000"));
  return sandbox;
}

const stateOf = async (s: Sandbox): Promise<string> => (await s.getInfo()).state;

async function resumes(s: Sandbox): Promise<number> {
  const { logEntries } = (await (await api("GET", `/sandboxes/${s.sandboxId}/logs`)).json()) as {
    logEntries: { message: string }[];
  };
  return logEntries.filter((e) => e.message === "sandbox resumed").length;
}

test(
  "a plain request, a large body, a WebSocket and the SDK wake a sandbox, once for all who come together",
  LIMIT,
  async (t) => {
    const sandbox = await withServer(t, WAKES);
    await sandbox.pause();
    const answers = await Promise.all([1, 2, 3, 4].map(() => byPort(sandbox, 8000)));
    assert.deepEqual(
      answers.map((a) => [a.status, a.body]),
      answers.map(() => [200, "awake"]),
    );
    assert.equal(await resumes(sandbox), 1);
    const { endAt } = await sandbox.getInfo();
    assert.ok(endAt.getTime() > Date.now() + 4.5 * MINUTE, "it has at least 5 minutes again");

    await sandbox.pause();
    const body = randomBytes(3_000_000).toString("base64");
    const posted = await plain(
      "/",
      { Host: sandbox.getHost(8000), "Content-Length": String(body.length) },
      "POST",
      body,
    );
    assert.equal(posted.body, createHash("sha256").update(body).digest("hex"));

    await sandbox.pause();
    assert.match(await tunnel(sandbox, "hello\n"), /^HTTP\/1\.1 101 [^]*\r\n\r\necho hello\n$/);

    await sandbox.pause();
    assert.equal((await sandbox.commands.run("echo by a command")).stdout, "by a command\n");
    await sandbox.pause();
    assert.equal(await sandbox.files.read("server.py"), SERVER);
    assert.equal(await resumes(sandbox), 5);
  },
);

/** What comes back through an upgrade whose client sends at once, without waiting for the 101. */
function tunnel(s: Sandbox, line: string): Promise<string> {
  const { hostname, port } = new URL(url);
  return new Promise((resolve, reject) => {
    const socket = connect({ host: hostname, port: Number(port) });
    let got = "";
    socket.on("error", reject);
    socket.on("data", (d: Buffer) => {
      got += d.toString("latin1");
      if (!got.includes(`echo ${line}`)) return;
      socket.destroy();
      resolve(got);
    });
    socket.write(`GET / HTTP/1.1\r\nHost: ${s.getHost(8000)}\r\nConnection: Upgrade\r\nUpgrade: echo\r\n\r\n${line}`);
  });
}

test(
  "asking whether it runs does not wake it, nor does a request without the token that its port needs",
  LIMIT,
  async (t) => {
    const sandbox = await withServer(t, { ...WAKES, network: { allowPublicTraffic: false } });
    await sandbox.files.write("file.txt", "signed");
    await sandbox.pause();
    assert.equal(await sandbox.isRunning(), false);
    const refused = async (a: Answer): Promise<void> => {
      assert.equal(a.status, 403, a.body);
      assert.equal((JSON.parse(a.body) as { code: number }).code, 403);
      assert.equal(await stateOf(sandbox), "paused");
    };
    await refused(await byPort(sandbox, 49_983, "/envs"));
    await refused(await byPort(sandbox, 49_983, "/envs", { "X-Access-Token": "0".repeat(64) }));
    await refused(await byPort(sandbox, 49_983, "/files?path=file.txt&signature=v1_x"));
    await refused(await byPort(sandbox, 8000));
    await refused(await byPort(sandbox, 8000, "/", { "E2b-Traffic-Access-Token": "wrong" }));
    const token = sandbox.trafficAccessToken ?? "";
    assert.equal((await byPort(sandbox, 8000, "/", { "E2b-Traffic-Access-Token": token })).body, "awake");
    await sandbox.pause();
    // The URL that the SDK signs carries its own permission.
    const signed = new URL(await sandbox.downloadUrl("file.txt"));
    const file = await byPort(sandbox, 49_983, `${signed.pathname}${signed.search}`);
    assert.deepEqual([file.status, file.body], [200, "signed"]);
  },
);

test(
  "who did not ask to be woken, or was paused without memory, stays paused: 502 until somebody connects",
  LIMIT,
  async (t) => {
    const plainOne = await sandboxFor(t, { lifecycle: { onTimeout: "pause" } });
    await plainOne.pause();
    const diskOnly = await sandboxFor(t, WAKES);
    await diskOnly.pause({ keepMemory: false });
    for (const sandbox of [plainOne, diskOnly]) {
      for (const port of [8000, 49_983]) {
        const answer = await byPort(sandbox, port, "/", { "X-Access-Token": "any" });
        assert.equal(answer.status, 502);
        assert.deepEqual(JSON.parse(answer.body), { sandboxId: sandbox.sandboxId, message: NOT_FOUND, code: 502 });
      }
      assert.equal(await stateOf(sandbox), "paused");
      const again = await Sandbox.connect(sandbox.sandboxId, connection);
      assert.equal((await again.commands.run("echo back")).stdout, "back\n");
    }
  },
);

test("paused at its end, woken by a request, and the same again", LIMIT, async (t) => {
  const sandbox = await withServer(t, WAKES);
  for (let round = 0; round < 2; round++) {
    await sandbox.setTimeout(500);
    await eventually(async () => (await stateOf(sandbox)) === "paused");
    assert.equal((await byPort(sandbox, 8000)).body, "awake");
    assert.deepEqual((await sandbox.getInfo()).lifecycle, { onTimeout: "pause", autoResume: true });
  }
});
