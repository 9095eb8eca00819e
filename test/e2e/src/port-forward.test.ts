import assert from "node:assert/strict";
import { spawn } from "node:child_process";
import { once } from "node:events";
import { connect } from "node:net";
import { join } from "node:path";
import { createInterface } from "node:readline";
import { test } from "node:test";
import { byPort, eventually, home, plain, sandboxFor } from "./node.ts";

const LIMIT = { timeout: 120_000 };
const aenv = join(import.meta.dirname, "../../../bin/aenv");

/** Speaks first, then gives back what it gets; on loopback only. */
const ECHO = `
import socketserver
class H(socketserver.StreamRequestHandler):
    def handle(self):
        self.wfile.write(b"ready\\n")
        while chunk := self.request.recv(65536): self.request.sendall(chunk)
class S(socketserver.ThreadingTCPServer):
    allow_reuse_address = True
S(("127.0.0.1", 7000), H).serve_forever()
`;

test("aenv port-forward carries any protocol to a port of a sandbox, and says what is not there", LIMIT, async (t) => {
  const sandbox = await sandboxFor(t);
  await sandbox.files.write("echo.py", ECHO);
  await sandbox.commands.run("python3 echo.py", { background: true, timeoutMs: 0 });
  // Its first words are no HTTP: the edge says that something listens, and not what.
  await eventually(async () => (await byPort(sandbox, 7000)).body.includes("malformed"));

  const env = { PATH: process.env["PATH"] ?? "", HOME: "/nonexistent", AENV_HOME: home };
  const child = spawn(aenv, ["port-forward", sandbox.sandboxId, ":7000", ":7001"], { env });
  t.after(() => child.kill("SIGKILL"));
  let notes = "";
  child.stderr.setEncoding("utf8").on("data", (d: string) => (notes += d));
  const lines = createInterface({ input: child.stdout })[Symbol.asyncIterator]();
  const ports: number[] = [];
  for (const remote of [7000, 7001]) {
    const said = /^127\.0\.0\.1:(\d+) is port (\d+) of /.exec(String((await lines.next()).value));
    assert.equal(said?.[2], String(remote));
    ports.push(Number(said[1]));
  }
  const socket = connect(ports[0] as number, "127.0.0.1");
  let text = "";
  socket.setEncoding("utf8").on("data", (d: string) => (text += d));
  socket.end("x".repeat(300_000));
  await once(socket, "close");
  assert.equal(text, `ready\n${"x".repeat(300_000)}`);

  const nobody = connect(ports[1] as number, "127.0.0.1").on("error", () => {});
  await new Promise((resolve) => nobody.once("close", resolve));
  await eventually(() => Promise.resolve(notes.includes("port 7001: The sandbox is running but port is not open")));
  const ended = once(child, "exit");
  child.kill("SIGINT");
  assert.equal((await ended)[0], 130);

  const headers = { Connection: "Upgrade", Upgrade: "aenv-tcp" };
  const anybody = { "E2b-Sandbox-Id": sandbox.sandboxId, "E2b-Sandbox-Port": "7000", ...headers };
  assert.equal((await plain("/", anybody)).status, 403);
});
