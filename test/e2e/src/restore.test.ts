/** What is true in a guest after it was launched from a captured state: clock, identity, entropy, connections, hooks. */
import assert from "node:assert/strict";
import { connect, type Socket } from "node:net";
import { test, type TestContext } from "node:test";
import { Sandbox } from "e2b";
import { api, connection, eventually, sandboxFor, url } from "./node.ts";

const LIMIT = { timeout: 180_000 };

async function run(s: Sandbox, script: string, user?: "root"): Promise<string> {
  const opts = user === undefined ? {} : { user };
  return (await s.commands.run(script, { timeoutMs: 120_000, ...opts })).stdout.trim();
}

async function forked(t: TestContext, from: Sandbox, count: number): Promise<Sandbox[]> {
  const made = await from.fork({ count, timeoutMs: 300_000 });
  return made.map((child) => {
    if (child instanceof Error) throw child;
    t.after(() => child.kill());
    return child;
  });
}

async function again(s: Sandbox): Promise<Sandbox> {
  await s.pause();
  return Sandbox.connect(s.sandboxId, connection);
}

test(
  "the clock is right after a resume and in every child of a fork, however long the state was kept",
  LIMIT,
  async (t) => {
    const sandbox = await sandboxFor(t);
    // As if it had been captured years ago.
    await run(sandbox, "date -s '2021-03-04 05:06:07'", "root");
    const resumed = await again(sandbox);
    const off = async (s: Sandbox): Promise<number> => Math.abs(Number(await run(s, "date +%s")) - Date.now() / 1000);
    assert.ok((await off(resumed)) < 30);
    await run(resumed, "date -s '2031-03-04 05:06:07'", "root");
    for (const child of await forked(t, resumed, 2)) assert.ok((await off(child)) < 30);
  },
);

test(
  "every child of a fork is a machine of its own name, id and random numbers, and resumes as the same machine",
  LIMIT,
  async (t) => {
    const sandbox = await sandboxFor(t);
    const all = [sandbox, ...(await forked(t, sandbox, 3))];
    const facts = await Promise.all(
      all.map(async (s) => {
        const [host, id, ...random] = (
          await run(
            s,
            `hostname; cat /etc/machine-id; head -c 16 /dev/urandom | base64
           python3 -c 'import random; print(random.random())'; openssl rand -hex 16; cat /proc/sys/kernel/random/uuid`,
          )
        ).split("\n");
        assert.equal(host, s.sandboxId);
        assert.match(id ?? "", /^[0-9a-f]{32}$/);
        assert.equal(random.length, 4);
        assert.equal(await run(s, "sudo getent hosts $(hostname) | tr -s ' '"), `127.0.1.1 ${s.sandboxId}`);
        await eventually(async () => (await run(s, "cat /etc/hostname")) === s.sandboxId);
        return [id, ...random];
      }),
    );
    assert.equal(new Set(facts.flat()).size, 5 * all.length, "nothing is the same in two of them");
    const same = await again(all[1] as Sandbox);
    assert.equal(await run(same, "cat /etc/machine-id; hostname"), `${facts[1]?.[0]}\n${same.sandboxId}`);
  },
);

// Says what became of the first connection from outside, and keeps one within the machine.
const SERVER = `
import socket, threading
def serve(port, on_conn):
    s = socket.socket(); s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1); s.bind(("0.0.0.0", port)); s.listen()
    def loop():
        while True:
            c, _ = s.accept(); threading.Thread(target=on_conn, args=(c,), daemon=True).start()
    threading.Thread(target=loop, daemon=True).start()
def outer(c):
    head = c.recv(4096)
    if b"Upgrade" not in head: c.close(); return
    c.sendall(b"HTTP/1.1 101 Switching Protocols\\r\\nUpgrade: echo\\r\\nConnection: Upgrade\\r\\n\\r\\n")
    try:
        while True:
            d = c.recv(4096)
            if not d: open("/home/user/outer", "a").write("end\\n"); return
            c.sendall(b"echo " + d)
    except OSError as e: open("/home/user/outer", "a").write(type(e).__name__ + "\\n")
def inner(c):
    while True:
        d = c.recv(4096)
        if not d: return
        c.sendall(d)
serve(8000, outer); serve(8001, inner)
here = socket.create_connection(("127.0.0.1", 8001))
own = socket.create_connection((socket.gethostbyname("eth0.test"), 8001))
open("/home/user/ready", "w").write("yes")
while True:
    threading.Event().wait(0.1)
    for name, c in (("here", here), ("own", own)):
        c.sendall(b"x"); assert c.recv(1) == b"x"
        open("/home/user/" + name, "a").write("x")
`;

/** A tunnel through the edge to port 8000. */
async function tunnel(s: Sandbox): Promise<{ socket: Socket; text: () => string }> {
  const { hostname, port } = new URL(url);
  const socket = connect({ host: hostname, port: Number(port) });
  let text = "";
  socket.on("data", (d: Buffer) => (text += d.toString("latin1"))).on("error", () => {});
  socket.write(`GET / HTTP/1.1\r\nHost: ${s.getHost(8000)}\r\nConnection: Upgrade\r\nUpgrade: echo\r\n\r\n`);
  await eventually(() => Promise.resolve(text.includes("101 Switching")));
  return { socket, text: () => text };
}

test(
  "connections out of the machine end at once in what was launched, those within it and those of the source go on",
  LIMIT,
  async (t) => {
    const sandbox = await sandboxFor(t);
    await run(
      sandbox,
      'ip -4 -o addr show eth0 | awk \'{split($4, a, "/"); print a[1], "eth0.test"}\' >> /etc/hosts',
      "root",
    );
    await sandbox.files.write("server.py", SERVER);
    await sandbox.commands.run("python3 server.py", { background: true, timeoutMs: 0 });
    await eventually(() => sandbox.files.exists("ready"));
    const { socket, text } = await tunnel(sandbox);
    t.after(() => socket.destroy());
    const goesOn = async (s: Sandbox): Promise<void> => {
      for (const name of ["here", "own"]) {
        const size = Number(await run(s, `stat -c %s ${name}`));
        await eventually(async () => Number(await run(s, `stat -c %s ${name}`)) > size);
      }
    };

    const [child] = await forked(t, sandbox, 1);
    assert.ok(child);
    // A program that only reads learns of it without having to send.
    const fate = await eventually(async () => (await child.files.exists("outer")) && child.files.read("outer"));
    assert.match(fate, /^Connection\w+Error\n$/);
    await goesOn(child);
    socket.write("still there\n");
    await eventually(() => Promise.resolve(text().includes("echo still there")));
    assert.equal(await sandbox.files.exists("outer"), false, "the source keeps its connections");

    const resumed = await again(sandbox);
    assert.match(
      await eventually(async () => (await resumed.files.exists("outer")) && resumed.files.read("outer")),
      /^Connection\w+Error\n$/,
    );
    await goesOn(resumed);
    const fresh = await tunnel(resumed);
    fresh.socket.write("anew\n");
    await eventually(() => Promise.resolve(fresh.text().includes("echo anew")));
    fresh.socket.destroy();
  },
);

test("open and unlinked files, their positions, pipes and shared memory are what they were", LIMIT, async (t) => {
  const sandbox = await sandboxFor(t);
  const program = `
import mmap, os, sys, time
f = open("/home/user/gone", "w+"); f.write("0123456789"); f.flush(); os.unlink("/home/user/gone"); f.seek(4)
r, w = os.pipe(); os.write(w, b"in the pipe")
m = mmap.mmap(-1, 1 << 20); m[12345:12350] = b"in m."
open("/home/user/ready", "w").close()
while not os.path.exists("/home/user/tell"): time.sleep(0.02)
open("/home/user/told.tmp", "w").write("%s|%s|%s" % (f.read(), os.read(r, 100).decode(), m[12345:12350].decode()))
os.rename("/home/user/told.tmp", "/home/user/told")
`;
  await sandbox.files.write("program.py", program);
  await sandbox.commands.run("python3 program.py", { background: true, timeoutMs: 0 });
  await eventually(() => sandbox.files.exists("ready"));
  const [child] = await forked(t, sandbox, 1);
  assert.ok(child);
  for (const s of [child, await again(sandbox)]) {
    await s.files.write("tell", "");
    const told = await eventually(async () => (await s.files.exists("told")) && s.files.read("told"));
    assert.equal(told, "456789|in the pipe|in m.");
  }
});

test(
  "hooks run before a capture and after a launch, know their place, and a bad one is only logged",
  LIMIT,
  async (t) => {
    const sandbox = await sandboxFor(t, { envs: { GREETING: "hi" } });
    const hook = async (path: string, script: string): Promise<void> => {
      await sandbox.files.write(`/etc/aenv/${path}`, `#!/bin/sh\n${script}\n`, { user: "root" });
      await run(sandbox, `chmod 755 /etc/aenv/${path}`, "root");
    };
    await hook("pre-snapshot.d/10-note", 'echo "before $AENV_CAUSE" >> /hooks');
    await hook("post-resume.d/10-note", 'echo "after $AENV_CAUSE $GREETING ${AENV_FORK_INDEX-none}" >> /hooks');
    await hook(
      "post-fork.d/10-note",
      'echo "child $AENV_FORK_INDEX $AENV_SEED $(hostname)" >> /hooks; echo "$AENV_SEED" > /seed',
    );
    await hook("post-fork.d/20-bad", "echo something is wrong; exit 3");
    const noted = async (s: Sandbox): Promise<string[]> => (await run(s, "cat /hooks")).split("\n");

    const children = await forked(t, sandbox, 3);
    assert.deepEqual(await noted(sandbox), ["before fork"]);
    const seeds = new Set<string>();
    for (const [index, child] of children.entries()) {
      const seed = await run(child, "cat /seed");
      assert.match(seed, /^\d+$/);
      seeds.add(seed);
      assert.deepEqual(await noted(child), ["before fork", `child ${index} ${seed} ${child.sandboxId}`]);
    }
    assert.equal(seeds.size, 3);
    const resumed = await again(sandbox);
    assert.deepEqual(await noted(resumed), ["before fork", "before pause", "after resume hi none"]);
    const path = `/sandboxes/${resumed.sandboxId}`;
    assert.equal((await api("POST", `${path}/checkpoints`, { name: "here" })).status, 201);
    assert.equal((await api("POST", `${path}/rewind`, { checkpoint: "here" })).status, 200);
    assert.deepEqual((await noted(resumed)).slice(3), ["before checkpoint", "after rewind hi none"]);
    const { snapshotId } = await resumed.createSnapshot();
    t.after(() => Sandbox.deleteSnapshot(snapshotId, connection));
    const made = await Sandbox.create(snapshotId, { ...connection, envs: { GREETING: "hello" } });
    t.after(() => made.kill());
    assert.deepEqual((await noted(made)).slice(5), ["before snapshot", "after create hello none"]);

    const { logEntries } = (await (await api("GET", `/sandboxes/${children[0]?.sandboxId}/logs`)).json()) as {
      logEntries: { message: string; level: string; fields: Record<string, string> }[];
    };
    const warning = logEntries.find((e) => e.level === "warn");
    assert.equal(warning?.message, "the hook post-fork.d/20-bad failed");
    assert.match(JSON.stringify(warning.fields), /something is wrong/);
  },
);
