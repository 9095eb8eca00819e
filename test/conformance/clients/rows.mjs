/**
 * The rows for the JavaScript SDK: `node rows.mjs PATH_OF_SDK`. Prints {row: "ok" | "-" | reason} as JSON. The connection comes
 * from E2B_* in the environment.
 */
import assert from "node:assert/strict";
import { pathToFileURL } from "node:url";

const { Sandbox, NotFoundError, CommandExitError, AuthenticationError } = await import(
  pathToFileURL(process.argv[2]).href
);
const open = [];

async function make(opts = {}) {
  const sandbox = await Sandbox.create({ timeoutMs: 120_000, ...opts });
  open.push(sandbox);
  return sandbox;
}

/** What this SDK does not have cannot fail. */
class Absent extends Error {}
function need(...methods) {
  if (methods.some((m) => typeof m !== "function")) throw new Absent();
}

async function eventually(probe) {
  for (const end = Date.now() + 60_000; Date.now() < end; ) {
    const value = await probe();
    if (value) return value;
    await new Promise((resolve) => setTimeout(resolve, 100));
  }
  throw new Error("it did not happen within 60 s");
}

const ROWS = {
  "create, info": async () => {
    const s = await make({ metadata: { "k 1": "v&w" }, envs: { GREETING: "hi" } });
    const info = await s.getInfo();
    assert.equal(info.sandboxId, s.sandboxId);
    assert.deepEqual(info.metadata, { "k 1": "v&w" });
    assert.ok(info.endAt > info.startedAt);
    assert.equal((await s.commands.run("echo $GREETING")).stdout, "hi\n");
  },
  "wrong key": async () => {
    const apiKey = `e2b_${"0".repeat(40)}`;
    await assert.rejects(Sandbox.create({ apiKey }), (e) => !AuthenticationError || e instanceof AuthenticationError);
  },
  "list, filter, pages": async () => {
    const tag = `t${process.pid}`;
    const [a, b] = [await make({ metadata: { tag } }), await make({ metadata: { tag } })];
    const pages = Sandbox.list({ query: { metadata: { tag } }, limit: 1 });
    const seen = [];
    while (pages.hasNext) seen.push(...(await pages.nextItems()).map((s) => s.sandboxId));
    assert.deepEqual(seen, [b.sandboxId, a.sandboxId]);
  },
  kill: async () => {
    const s = await make();
    assert.equal(await s.kill(), true);
    assert.equal(await Sandbox.kill(s.sandboxId), false);
    assert.equal(await s.isRunning(), false);
  },
  "timeout, connect": async () => {
    const s = await make();
    await s.setTimeout(60_000);
    const { endAt } = await s.getInfo();
    const again = await Sandbox.connect(s.sandboxId, { timeoutMs: 1000 });
    assert.equal((await again.getInfo()).endAt.getTime(), endAt.getTime());
    await s.setTimeout(1000);
    await eventually(async () => !(await s.isRunning()));
    await assert.rejects(Sandbox.connect(s.sandboxId), NotFoundError);
  },
  commands: async () => {
    const s = await make();
    const r = await s.commands.run("echo out; echo err >&2; pwd; id -un");
    assert.deepEqual([r.stdout, r.stderr, r.exitCode], ["out\n/home/user\nuser\n", "err\n", 0]);
    await assert.rejects(s.commands.run("exit 3"), (e) => e instanceof CommandExitError && e.exitCode === 3);
    assert.equal((await s.commands.run("id -un; pwd", { user: "root", cwd: "/tmp" })).stdout, "root\n/tmp\n");
  },
  "background, stdin, kill": async () => {
    const s = await make();
    const cat = await s.commands.run("cat", { background: true, stdin: true });
    await s.commands.sendStdin(cat.pid, "typed\n");
    await eventually(() => cat.stdout === "typed\n");
    assert.ok((await s.commands.list()).some((p) => p.pid === cat.pid));
    assert.equal(await s.commands.kill(cat.pid), true);
    await assert.rejects(cat.wait(), CommandExitError);
  },
  files: async () => {
    const s = await make();
    await s.files.write("a/b.txt", "text");
    assert.equal(await s.files.read("a/b.txt"), "text");
    assert.equal(await s.files.exists("a/b.txt"), true);
    assert.deepEqual(
      (await s.files.list("a")).map((e) => e.name),
      ["b.txt"],
    );
    await s.files.rename("a/b.txt", "a/c.txt");
    await s.files.remove("a/c.txt");
    assert.equal(await s.files.exists("a/c.txt"), false);
    await assert.rejects(s.files.read("a/c.txt"), NotFoundError);
  },
  watch: async () => {
    const s = await make();
    await s.files.makeDir("w");
    const seen = [];
    const watcher = await s.files.watchDir("w", (e) => void seen.push(e.name));
    await s.files.write("w/new.txt", "x");
    await eventually(() => seen.includes("new.txt"));
    await watcher.stop();
  },
  pty: async () => {
    const s = await make();
    let text = "";
    const decoder = new TextDecoder();
    const pty = await s.pty.create({ cols: 80, rows: 24, onData: (d) => void (text += decoder.decode(d)) });
    await s.pty.sendInput(pty.pid, new TextEncoder().encode("echo $((6*7)); exit\n"));
    await pty.wait();
    assert.match(text, /42/);
  },
  "signed URLs": async () => {
    const s = await make();
    await s.files.write("s.txt", "signed");
    assert.equal(await (await fetch(await s.downloadUrl("s.txt"))).text(), "signed");
    const old = await s.downloadUrl("s.txt", { useSignatureExpiration: -60 });
    const refused = await fetch(old);
    assert.deepEqual(
      [refused.status, await refused.json()],
      [401, { code: 401, message: "signature is already expired" }],
    );
  },
  metrics: async () => {
    const s = await make();
    const [m] = await eventually(async () => {
      const all = await s.getMetrics();
      return all.length > 0 && all;
    });
    assert.ok(m.memTotal > 0 && m.cpuCount > 0);
  },
  "pause, resume": async () => {
    const s = await make();
    const pause = s.pause ?? s.betaPause;
    need(pause);
    const sleep = await s.commands.run("sleep 1000", { background: true, timeoutMs: 0 });
    await pause.call(s);
    assert.equal(await s.isRunning(), false);
    const back = await Sandbox.connect(s.sandboxId, { timeoutMs: 120_000 });
    assert.ok((await back.commands.list()).some((p) => p.pid === sleep.pid));
  },
  snapshot: async () => {
    const s = await make();
    need(s.createSnapshot);
    await s.files.write("kept.txt", "kept");
    const { snapshotId } = await s.createSnapshot();
    const copy = await Sandbox.create(snapshotId, { timeoutMs: 60_000 });
    open.push(copy);
    assert.equal(await copy.files.read("kept.txt"), "kept");
    await copy.kill();
    assert.equal(await Sandbox.deleteSnapshot(snapshotId), true);
    assert.equal(await Sandbox.deleteSnapshot(snapshotId), false);
  },
  fork: async () => {
    const s = await make();
    need(s.fork);
    await s.files.write("/tmp/state.txt", "before");
    const children = await s.fork({ count: 2 });
    open.push(...children.filter((c) => !(c instanceof Error)));
    assert.equal(children.length, 2);
    for (const c of children) assert.equal(await c.files.read("/tmp/state.txt"), "before");
    assert.equal(await s.isRunning(), true);
  },
  network: async () => {
    const s = await make({ network: { denyOut: ["203.0.113.0/24"] } });
    need(s.updateNetwork);
    await s.updateNetwork({ denyOut: ["198.51.100.0/24"] });
    assert.deepEqual((await s.getInfo()).network?.denyOut, ["198.51.100.0/24"]);
    await s.updateNetwork({});
  },
};

const result = {};
for (const [name, row] of Object.entries(ROWS)) {
  try {
    await row();
    result[name] = "ok";
  } catch (e) {
    result[name] = e instanceof Absent ? "-" : `${e?.name}: ${e?.message}`.split("\n").slice(0, 6).join(" ");
  }
  await Promise.allSettled(open.splice(0).map((s) => s.kill()));
}
console.log(JSON.stringify(result));
process.exit(0);
