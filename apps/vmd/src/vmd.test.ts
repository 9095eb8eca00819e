import assert from "node:assert/strict";
import { type ChildProcess, spawn } from "node:child_process";
import { randomBytes } from "node:crypto";
import { once } from "node:events";
import { chmod, chown, mkdtemp, readdir, readFile, readlink, rm, stat, writeFile } from "node:fs/promises";
import { connect } from "node:net";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { type TestContext, test } from "node:test";
import { AenvError, newRunId, sleep } from "@aenv/base";
import { Cgroups, isAlive, type ProcIdentity, run, signalExact } from "@aenv/host";
import { type ProcExit, type SpawnSpec, VmdClient } from "@aenv/vmm";

const never = new AbortController().signal;
const UID = 251_000;
const POLL_MS = 5;

interface Rig {
  dir: string;
  socket: string;
  vmd: ChildProcess;
  client(): VmdClient;
  restartVmd(): Promise<void>;
  spec(argv: string[], more?: Partial<SpawnSpec>): SpawnSpec;
  spawn(argv: string[], more?: Partial<SpawnSpec>): Promise<ProcIdentity>;
}

async function startVmd(socket: string, log: string): Promise<ChildProcess> {
  const args = [join(import.meta.dirname, "main.ts"), "--socket", socket, "--log", log];
  const child = spawn(process.execPath, args, { stdio: ["ignore", "inherit", "ignore"] });
  const client = new VmdClient(socket);
  try {
    for (;;) {
      const up = await client.ping(never).catch(() => undefined);
      if (up?.identity.pid === child.pid) return child;
      assert.equal(child.exitCode, null);
      await sleep(POLL_MS);
    }
  } finally {
    client.close();
  }
}

async function rig(t: TestContext): Promise<Rig> {
  const dir = await mkdtemp(join(tmpdir(), "aenv-vmd-"));
  await chmod(dir, 0o711);
  const socket = join(dir, "vmd.sock");
  const clients: VmdClient[] = [];
  const started: ProcIdentity[] = [];
  const it: Rig = {
    dir,
    socket,
    vmd: await startVmd(socket, join(dir, "vmd.log")),
    client: () => {
      const client = new VmdClient(socket);
      clients.push(client);
      return client;
    },
    restartVmd: async () => {
      it.vmd = await startVmd(socket, join(dir, "vmd.log"));
    },
    spec: (argv, more = {}) => ({
      run: newRunId(),
      argv,
      env: { ONLY: "this" },
      cwd: dir,
      uid: UID,
      gid: UID,
      logPath: join(dir, "log"),
      maxFileBytes: 4096,
      ...more,
    }),
    spawn: async (argv, more) => {
      const identity = await it.client().spawn(it.spec(argv, more), never);
      started.push(identity);
      return identity;
    },
  };
  t.after(async () => {
    for (const id of started) signalExact(id, "SIGKILL");
    for (const c of clients) c.close();
    if (it.vmd.exitCode === null && it.vmd.signalCode === null) {
      const ended = once(it.vmd, "exit");
      it.vmd.kill("SIGTERM");
      await ended;
    }
    await rm(dir, { recursive: true, force: true });
  });
  return it;
}

/** Resolves once the exec chain has become the command. */
async function becomes(id: ProcIdentity, name: string): Promise<void> {
  while ((await readFile(`/proc/${id.pid}/comm`, "utf8")).trim() !== name) await sleep(POLL_MS);
}

function nextExit(client: VmdClient, id?: ProcIdentity): Promise<ProcExit> {
  return new Promise((resolve) => {
    const off = client.onExit((e) => {
      if (id && e.identity.pid !== id.pid) return;
      queueMicrotask(() => off());
      resolve(e);
    });
  });
}

test("a spawned process has its pid, user, group, namespace, limits, and nothing of ours", async (t) => {
  const r = await rig(t);
  const cgroups = new Cgroups();
  const group = `aenv-t${randomBytes(4).toString("hex")}`;
  const netns = group;
  await cgroups.create(group, { pids: 8 });
  await run("ip", ["netns", "add", netns]);
  t.after(async () => {
    await cgroups.kill(group);
    await cgroups.remove(group);
    await run("ip", ["netns", "del", netns]);
  });
  const id = await r.spawn(["/bin/sleep", "1000"], { cgroup: group, netns, groups: [4242, 4243] });
  await becomes(id, "sleep");
  assert.ok(isAlive(id));
  const status = await readFile(`/proc/${id.pid}/status`, "utf8");
  const field = (name: string): string => new RegExp(`^${name}:\\s*(.*)$`, "m").exec(status)?.[1]?.trim() ?? "";
  assert.match(field("Uid"), new RegExp(`^${UID}\\s+${UID}\\s+${UID}\\s+${UID}$`));
  assert.match(field("Gid"), new RegExp(`^${UID}\\s`));
  assert.equal(field("Groups"), "4242 4243");
  for (const set of ["CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb"]) assert.match(field(set), /^0+$/, set);
  assert.equal(field("NoNewPrivs"), "1");
  assert.deepEqual((await readdir(`/proc/${id.pid}/fd`)).toSorted(), ["0", "1", "2"]);
  assert.equal(await readlink(`/proc/${id.pid}/fd/0`), "/dev/null");
  const environ = (await readFile(`/proc/${id.pid}/environ`, "utf8")).split("\0");
  assert.deepEqual(
    environ.filter((e) => !/^(PATH|PWD|OLDPWD|_)=|^$/.test(e)),
    ["ONLY=this"],
  );
  assert.ok(Number(await readFile(`/proc/${id.pid}/oom_score_adj`, "utf8")) > 0);
  assert.deepEqual(await cgroups.pids(group), [id.pid]);
  assert.equal((await stat(`/proc/${id.pid}/ns/net`)).ino, (await stat(`/run/netns/${netns}`)).ino);
});

test("a file of the process is bounded: the write fails, the process lives", async (t) => {
  const r = await rig(t);
  const out = join(r.dir, "out");
  const script = "i=0; while [ $i -lt 2000 ]; do echo 0123456789abcdef; i=$((i+1)); done 2>/dev/null; exec sleep 1000";
  const id = await r.spawn(["/bin/sh", "-c", script], { stdoutPath: out });
  await becomes(id, "sleep");
  assert.equal((await stat(out)).size, 4096);
  assert.equal((await stat(out)).uid, 0);
});

test("exits are told with code or signal, repeated to a later client, and forgotten once acknowledged", async (t) => {
  const r = await rig(t);
  const first = r.client();
  const code = await r.spawn(["/bin/sh", "-c", "exit 7"]);
  const seen = await nextExit(first, code);
  assert.deepEqual([seen.code, seen.signal], [7, null]);
  const killed = await r.spawn(["/bin/sleep", "1000"]);
  signalExact(killed, "SIGKILL");
  assert.equal((await nextExit(first, killed)).signal, "SIGKILL");
  const second = r.client();
  assert.deepEqual((await nextExit(second, code)).identity, code);
  second.acknowledge(seen);
  await second.ping(never);
  const third = r.client();
  assert.deepEqual((await nextExit(third)).identity, killed);
});

test("a command that cannot start is an exit, and its log says why", async (t) => {
  const r = await rig(t);
  const client = r.client();
  const id = await r.spawn(["/nonexistent/qemu"]);
  assert.notEqual((await nextExit(client, id)).code, 0);
  assert.match(await readFile(join(r.dir, "log"), "utf8"), /nonexistent/);
});

test("children outlive vmd, and a client finds the next vmd", async (t) => {
  const r = await rig(t);
  const client = r.client();
  const off = client.onExit(() => {});
  const child = await r.spawn(["/bin/sleep", "1000"]);
  const before = await client.ping(never);
  const ended = once(r.vmd, "exit");
  r.vmd.kill("SIGKILL");
  await ended;
  assert.ok(isAlive(child));
  await r.restartVmd();
  const after = await client.ping(never);
  assert.notEqual(after.epoch, before.epoch);
  assert.deepEqual(await client.list(never), []);
  const next = await r.spawn(["/bin/sh", "-c", "exit 3"]);
  assert.equal((await nextExit(client, next)).code, 3);
  off();
});

test("without vmd a caller is told at once what is missing", async (t) => {
  const client = new VmdClient(join(tmpdir(), `aenv-none-${randomBytes(4).toString("hex")}`));
  t.after(() => client.close());
  await assert.rejects(client.ping(never), (e: unknown) => e instanceof AenvError && e.code === "UNAVAILABLE");
});

test("a second vmd leaves the first alone", async (t) => {
  const r = await rig(t);
  const args = [join(import.meta.dirname, "main.ts"), "--socket", r.socket, "--log", join(r.dir, "second.log")];
  const second = spawn(process.execPath, args, { stdio: "ignore" });
  const [code] = (await once(second, "exit")) as [number];
  assert.equal(code, 3);
  assert.equal((await r.client().ping(never)).identity.pid, r.vmd.pid);
});

test("a process whose caller gave up is killed", async (t) => {
  const r = await rig(t);
  const client = r.client();
  await client.ping(never);
  const abort = new AbortController();
  const pending = client.spawn(r.spec(["/bin/sleep", "1000"]), abort.signal);
  abort.abort();
  await assert.rejects(pending);
  assert.equal((await nextExit(client)).signal, "SIGKILL");
});

test("a link in place of a log is not written through", async (t) => {
  const r = await rig(t);
  const target = join(r.dir, "target");
  await writeFile(target, "kept");
  await run("ln", ["-s", target, join(r.dir, "log")]);
  await chown(r.dir, UID, UID);
  await assert.rejects(r.client().spawn(r.spec(["/bin/echo", "x"]), never));
  assert.equal(await readFile(target, "utf8"), "kept");
});

test("nonsense on the socket ends that connection only", async (t) => {
  const r = await rig(t);
  for (const text of [
    "not json\n",
    '{"id":1,"op":"unheard"}\n',
    "[1,2\n",
    `${"x".repeat(2 * 1024 * 1024)}\n`,
    "null\n",
  ]) {
    const socket = connect(r.socket);
    socket.on("error", () => {});
    socket.end(text);
    socket.resume();
    await new Promise((resolve) => socket.once("close", resolve));
  }
  await r.client().ping(never);
});
