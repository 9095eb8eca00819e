import assert from "node:assert/strict";
import { chmodSync, mkdtempSync, readFileSync, rmSync, writeFileSync } from "node:fs";
import { connect } from "node:net";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { test, type TestContext } from "node:test";
import { type Logger, silentLogger, sleep } from "@aenv/base";
import { isAlive, type ProcIdentity, signalExact } from "@aenv/host";
import { Daemon, type DaemonSpec, superviseDaemons } from "./daemons.ts";

const LIMIT = { timeout: 30_000 };

/** A daemon that serves its socket, in a folder of its own; all its processes end with the test. */
function fixture(
  t: TestContext,
  source?: string,
): { spec: DaemonSpec; signal: AbortSignal; started: () => ProcIdentity[] } {
  const dir = mkdtempSync(join(tmpdir(), "aenv-daemon-"));
  const main = join(dir, "main.mjs");
  const pids = join(dir, "pids");
  writeFileSync(
    main,
    source ??
      `import { appendFileSync, readFileSync, rmSync } from "node:fs";
       import { createServer } from "node:net";
       const socket = process.argv[process.argv.indexOf("--socket") + 1];
       const stat = readFileSync("/proc/self/stat", "latin1");
       const startTicks = Number(stat.slice(stat.lastIndexOf(")") + 2).split(" ")[19]);
       appendFileSync(${JSON.stringify(pids)}, JSON.stringify({ pid: process.pid, startTicks }) + "\\n");
       rmSync(socket, { force: true });
       createServer((s) => s.on("error", () => {}).end(String(process.pid))).listen(socket);`,
  );
  chmodSync(dir, 0o700);
  const started = (): ProcIdentity[] => {
    try {
      return readFileSync(pids, "utf8")
        .trim()
        .split("\n")
        .map((line) => JSON.parse(line) as ProcIdentity);
    } catch {
      return [];
    }
  };
  const stop = new AbortController();
  t.after(async () => {
    stop.abort();
    for (const id of started()) {
      signalExact(id, "SIGKILL");
      while (isAlive(id)) await sleep(5);
    }
    rmSync(dir, { recursive: true, force: true });
  });
  const spec = { name: "toy", main, socket: join(dir, "s"), args: ["--more"], log: join(dir, "log"), env: {} };
  return { spec, signal: stop.signal, started };
}

/** What the daemon behind the socket says: its pid. */
function ask(path: string): Promise<number> {
  return new Promise((resolve, reject) => {
    let text = "";
    const socket = connect(path);
    socket.on("data", (d: Buffer) => (text += d.toString()));
    socket.on("error", reject);
    socket.on("end", () => resolve(Number(text)));
  });
}

test("a daemon is started when it does not run, and is found by the next server when it does", LIMIT, async (t) => {
  const { spec, signal, started } = fixture(t);
  const first = new Daemon(spec, silentLogger);
  await first.ensure(signal);
  assert.equal(await ask(spec.socket), first.identity?.pid);
  const second = new Daemon(spec, silentLogger);
  await second.ensure(signal);
  assert.deepEqual(second.identity, first.identity);
  assert.equal(started().length, 1);
});

test("a daemon that is killed is started again, and leaving it does not end it", LIMIT, async (t) => {
  const { spec, signal } = fixture(t);
  const again = Promise.withResolvers<void>();
  const logger: Logger = { ...silentLogger, info: (_, message) => message.includes("again") && again.resolve() };
  const daemon = new Daemon(spec, logger);
  const supervision = await superviseDaemons([daemon], logger, signal);
  const was = daemon.identity;
  assert.ok(was);
  assert.ok(signalExact(was, "SIGKILL"));
  await again.promise;
  assert.notEqual(daemon.identity?.pid, was.pid);
  assert.equal(daemon.restarts, 1);
  await supervision[Symbol.asyncDispose]();
  assert.equal(await ask(spec.socket), daemon.identity?.pid);
});

test("a daemon whose socket is deleted is ended and started again while the server runs", LIMIT, async (t) => {
  const { spec, signal, started } = fixture(t);
  const again = Promise.withResolvers<void>();
  const logger: Logger = { ...silentLogger, info: (_, message) => message.includes("again") && again.resolve() };
  const daemon = new Daemon(spec, logger);
  await using _supervision = await superviseDaemons([daemon], logger, signal);
  const was = daemon.identity;
  assert.ok(was);
  rmSync(spec.socket);
  await again.promise;
  assert.equal(isAlive(was), false);
  assert.equal(await ask(spec.socket), daemon.identity?.pid);
  assert.equal(started().length, 2);
});

test("a daemon that serves no socket does not keep the next server from starting", LIMIT, async (t) => {
  const { spec, signal } = fixture(t);
  const first = new Daemon(spec, silentLogger);
  await first.ensure(signal);
  const deaf = first.identity;
  assert.ok(deaf);
  rmSync(spec.socket);
  // It cannot follow SIGTERM.
  assert.ok(signalExact(deaf, "SIGSTOP"));
  const second = new Daemon({ ...spec, startMs: 1000 }, silentLogger);
  await second.ensure(signal);
  assert.equal(isAlive(deaf), false);
  assert.equal(await ask(spec.socket), second.identity?.pid);
});

test("a daemon that ends at once is reported with where to read why", LIMIT, async (t) => {
  const { spec, signal } = fixture(t, "console.error('no good reason'); process.exit(7);");
  await assert.rejects(
    new Daemon(spec, silentLogger).ensure(signal),
    (e: { code?: string; message: string; hint: string }) => {
      assert.equal(e.code, "UNAVAILABLE");
      assert.match(e.message, /toy did not start: exit code 7/);
      assert.ok(e.hint.includes(spec.log));
      return true;
    },
  );
  assert.match(readFileSync(spec.log, "utf8"), /no good reason/);
});
