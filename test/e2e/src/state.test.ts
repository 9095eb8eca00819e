/** Pause, resume, snapshots, forks, end of time: what the official SDK sees of them. */
import assert from "node:assert/strict";
import { test, type TestContext } from "node:test";
import {
  NotFoundError,
  Sandbox,
  SandboxError,
  type SandboxInfo,
  SandboxNotFoundError,
  type SnapshotInfo,
  TimeoutError,
} from "e2b";
import { api, byPort, connection, eventually, sandboxFor } from "./node.ts";

const LIMIT = { timeout: 180_000 };
const MINUTE = 60_000;

const run = async (s: Sandbox, script: string): Promise<string> => (await s.commands.run(script)).stdout.trim();
const bootId = (s: Sandbox): Promise<string> => run(s, "cat /proc/sys/kernel/random/boot_id");

/** Children of a fork, each killed when the test ends. */
async function forked(t: TestContext, from: Sandbox, count: number, timeoutMs = 2 * MINUTE): Promise<Sandbox[]> {
  const made = await from.fork({ count, timeoutMs });
  return made.map((child) => {
    if (child instanceof Error) throw child;
    t.after(() => child.kill());
    return child;
  });
}

test(
  "a paused sandbox goes on where it was: same id, token, processes, servers, environment, files",
  LIMIT,
  async (t) => {
    const sandbox = await sandboxFor(t, { envs: { GREETING: "hi" }, timeoutMs: 10 * MINUTE });
    await sandbox.files.write("index.html", "served");
    const server = await sandbox.commands.run("python3 -m http.server 8000", { background: true, timeoutMs: 0 });
    await eventually(async () => (await byPort(sandbox, 8000)).status === 200);
    const counter = await sandbox.commands.run("i=0; while :; do i=$((i+1)); echo $i; sleep 0.1; done", {
      background: true,
      timeoutMs: 0,
    });
    const boot = await bootId(sandbox);
    const before = await sandbox.getInfo();

    assert.equal(await sandbox.pause(), true);
    assert.equal(await sandbox.pause(), false);
    assert.equal(await sandbox.isRunning(), false);
    assert.equal((await sandbox.getInfo()).state, "paused");
    for (const port of [49_983, 8000]) {
      const answer = await byPort(sandbox, port, "/health");
      assert.equal(answer.status, 502);
      assert.deepEqual(JSON.parse(answer.body), {
        sandboxId: sandbox.sandboxId,
        message: "The sandbox was not found",
        code: 502,
      });
    }

    const again = await Sandbox.connect(sandbox.sandboxId, { ...connection, timeoutMs: 5 * MINUTE });
    assert.equal(await again.isRunning(), true);
    const after = await again.getInfo();
    assert.equal(after.state, "running");
    assert.equal(after.startedAt.toISOString(), before.startedAt.toISOString());
    assert.ok(after.endAt.getTime() > Date.now() + 4 * MINUTE);
    // The handle from before is as good: the token is the same.
    assert.equal(await run(sandbox, "echo $GREETING"), "hi");
    assert.equal(await bootId(again), boot);
    assert.equal((await byPort(again, 8000)).body, "served");
    const listed = (await again.commands.list()).map((p) => p.pid);
    assert.ok(listed.includes(server.pid) && listed.includes(counter.pid), "processes are listed by the same pid");
    const followed = await again.commands.connect(counter.pid);
    const seen = await eventually(() => Promise.resolve(/\d+\n\d+\n/.test(followed.stdout) && followed.stdout));
    assert.ok(Number(seen.split("\n")[0]) > 1, "the counter did not begin anew");
    assert.equal(await again.commands.kill(server.pid), true);
  },
);

test(
  "a stream that is open at a pause is reset and told as such, not ended; what it showed goes on",
  LIMIT,
  async (t) => {
    const sandbox = await sandboxFor(t);
    const handle = await sandbox.commands.run("while :; do echo tick; sleep 0.1; done", {
      background: true,
      timeoutMs: 0,
    });
    await eventually(() => Promise.resolve(handle.stdout.includes("tick")));
    const ended = assert.rejects(handle.wait(), TimeoutError);
    await sandbox.pause();
    await ended;
    const again = await Sandbox.connect(sandbox.sandboxId, connection);
    const followed = await again.commands.connect(handle.pid);
    await eventually(() => Promise.resolve(followed.stdout.includes("tick")));
  },
);

test("a pause without memory keeps files, environment and token, and boots anew", LIMIT, async (t) => {
  const sandbox = await sandboxFor(t, { envs: { GREETING: "hi" } });
  await sandbox.files.write("kept", "on disk");
  await sandbox.commands.run("sleep 1000", { background: true, timeoutMs: 0 });
  const boot = await bootId(sandbox);
  assert.equal(await sandbox.pause({ keepMemory: false }), true);
  const again = await Sandbox.connect(sandbox.sandboxId, connection);
  assert.notEqual(await bootId(again), boot);
  assert.equal(await again.files.read("kept"), "on disk");
  assert.equal(await run(sandbox, "echo $GREETING; cat ~/kept"), "hi\non disk");
  assert.deepEqual(await again.commands.list(), []);
  // The other way round: memory was kept, and the caller wants a fresh boot.
  const second = await bootId(again);
  await again.pause();
  const rebooted = await Sandbox.connect(sandbox.sandboxId, { ...connection, onResume: "reboot" });
  assert.notEqual(await bootId(rebooted), second);
});

test(
  "lists have running and paused sandboxes in one order, filtered by state, paged; a paused one is killed",
  LIMIT,
  async (t) => {
    const metadata = { list: String(Math.random()) };
    const first = await sandboxFor(t, { metadata });
    const second = await sandboxFor(t, { metadata });
    const both = [second.sandboxId, first.sandboxId];
    const list = async (state: ("running" | "paused")[], limit = 10): Promise<SandboxInfo[]> => {
      const pages = Sandbox.list({ ...connection, query: { metadata, state }, limit });
      const out: SandboxInfo[] = [];
      while (pages.hasNext) out.push(...(await pages.nextItems()));
      return out;
    };
    for (const paused of [first, second]) {
      await paused.pause();
      assert.deepEqual(
        (await list(["running", "paused"], 1)).map((s) => s.sandboxId),
        both,
      );
      assert.deepEqual(
        (await list(["paused"])).map((s) => [s.sandboxId, s.state]),
        [[paused.sandboxId, "paused"]],
      );
      assert.deepEqual(
        (await list(["running"])).map((s) => s.sandboxId),
        both.filter((id) => id !== paused.sandboxId),
      );
      await Sandbox.connect(paused.sandboxId, connection);
    }
    await first.pause();
    assert.equal(await first.kill(), true);
    assert.equal(await first.kill(), false);
    await assert.rejects(Sandbox.connect(first.sandboxId, connection), SandboxNotFoundError);
    await assert.rejects(Sandbox.pause(first.sandboxId, connection), NotFoundError);
  },
);

test(
  "snapshots are made, found, used as a template any number of times, replaced by name, and deleted",
  LIMIT,
  async (t) => {
    const name = `prepared-${Math.random().toString(36).slice(2)}`;
    const sandbox = await sandboxFor(t);
    const child = await sandbox.commands.run("sleep 1000", { background: true, timeoutMs: 0 });
    await sandbox.files.write("state", "one");
    const unnamed = await sandbox.createSnapshot();
    assert.match(unnamed.snapshotId, /^[a-z0-9]+:default$/);
    assert.deepEqual(unnamed.names, []);
    const named = await sandbox.createSnapshot({ name });
    assert.deepEqual(named.names, [`default/${name}:default`]);
    assert.equal(named.snapshotId, named.names[0]);
    assert.equal(await run(sandbox, "cat state"), "one", "the source goes on");

    const find = async (opts: { name?: string; limit?: number } = {}): Promise<SnapshotInfo[]> => {
      const pages = sandbox.listSnapshots(opts);
      const out: SnapshotInfo[] = [];
      while (pages.hasNext) out.push(...(await pages.nextItems()));
      return out;
    };
    const ids = (all: SnapshotInfo[]): string[] => all.map((s) => s.snapshotId);
    assert.deepEqual(ids(await find()), [named.snapshotId, unnamed.snapshotId]);
    assert.deepEqual(ids(await find({ limit: 1 })), [named.snapshotId, unnamed.snapshotId]);
    assert.deepEqual(ids(await find({ name })), [named.snapshotId]);
    assert.deepEqual(ids(await find({ name: `${name}:default` })), [named.snapshotId]);
    assert.deepEqual(ids(await find({ name: unnamed.snapshotId })), [unnamed.snapshotId]);
    assert.deepEqual(await find({ name: "no-such-snapshot" }), []);

    await sandbox.files.write("state", "two");
    const replaced = await sandbox.createSnapshot({ name });
    assert.equal(replaced.snapshotId, named.snapshotId);
    for (const [from, wanted] of [
      [unnamed.snapshotId, "one"],
      [name, "two"],
      [named.snapshotId, "two"],
    ] as const) {
      const made = await Sandbox.create(from, { ...connection, timeoutMs: MINUTE });
      t.after(() => made.kill());
      assert.equal(await made.files.read("state"), wanted);
      assert.ok(
        (await made.commands.list()).some((p) => p.pid === child.pid),
        "processes are there, too",
      );
      assert.equal(await run(made, "hostname"), made.sandboxId);
    }
    // A snapshot outlives its sandbox.
    await sandbox.kill();
    const late = await Sandbox.create(unnamed.snapshotId, { ...connection, timeoutMs: MINUTE });
    t.after(() => late.kill());
    assert.equal(await late.files.read("state"), "one");
    for (const id of [unnamed.snapshotId, named.snapshotId]) {
      assert.equal(await Sandbox.deleteSnapshot(id, connection), true);
      assert.equal(await Sandbox.deleteSnapshot(id, connection), false);
      await assert.rejects(Sandbox.create(id, connection), SandboxError);
    }
    assert.equal(await late.files.read("state"), "one", "what was made from it goes on");
  },
);

test("children of a fork have the memory and files of their source and a life of their own", LIMIT, async (t) => {
  const sandbox = await sandboxFor(t, { envs: { GREETING: "hi" }, metadata: { of: "source" } });
  await sandbox.files.write("file", "source");
  const child = await sandbox.commands.run("sleep 1000", { background: true, timeoutMs: 0 });
  const end = (await sandbox.getInfo()).endAt.toISOString();
  const children = await forked(t, sandbox, 2, 5 * MINUTE);
  const all = [sandbox, ...children];
  assert.equal(new Set(all.map((s) => s.sandboxId)).size, 3);
  for (const c of children) {
    assert.equal(await run(c, "echo $GREETING; cat file"), "hi\nsource");
    assert.ok((await c.commands.list()).some((p) => p.pid === child.pid));
    const info = await c.getInfo();
    assert.deepEqual(info.metadata, { of: "source" });
    assert.ok(Math.abs(info.endAt.getTime() - info.startedAt.getTime() - 5 * MINUTE) < 1000);
    await c.files.write("file", c.sandboxId);
  }
  for (const s of children) assert.equal(await s.files.read("file"), s.sandboxId);
  assert.equal(await sandbox.files.read("file"), "source");
  assert.equal((await sandbox.getInfo()).endAt.toISOString(), end);
  // Tokens are a sandbox's own.
  const [one, other] = children as [Sandbox, Sandbox];
  const stolen = await api("GET", "/envs", undefined, {
    "E2b-Sandbox-Id": one.sandboxId,
    "X-Access-Token": (await tokenOf(other)) ?? "",
  });
  assert.equal(stolen.status, 401);
  await assert.rejects(sandbox.fork({ count: 17 }), /at most 16/);

  // Of a paused one: the state that it waits in.
  await one.pause();
  const [grandchild] = await forked(t, one, 1);
  assert.equal(await grandchild?.files.read("file"), one.sandboxId);
  assert.equal((await one.getInfo()).state, "paused");

  await sandbox.kill();
  await assert.rejects(sandbox.fork(), SandboxNotFoundError);
  assert.equal(await other.files.read("file"), other.sandboxId, "children outlive their source");
});

async function tokenOf(s: Sandbox): Promise<string | undefined> {
  const detail = (await (await api("GET", `/sandboxes/${s.sandboxId}`)).json()) as { envdAccessToken?: string };
  return detail.envdAccessToken;
}

test("a sandbox goes back to a checkpoint in place, from any later state, as often as wanted", LIMIT, async (t) => {
  const sandbox = await sandboxFor(t, { envs: { GREETING: "hi" } });
  const path = `/sandboxes/${sandbox.sandboxId}`;
  const ask = async <T>(method: string, sub: string, body?: unknown): Promise<T> => {
    const res = await api(method, path + sub, body);
    assert.ok(res.ok, `${sub}: ${res.status} ${await res.clone().text()}`);
    return (await res.json()) as T;
  };
  await sandbox.files.write("state", "one");
  const child = await sandbox.commands.run("sleep 1000", { background: true, timeoutMs: 0 });
  const { checkpointID } = await ask<{ checkpointID: string }>("POST", "/checkpoints", { name: "first" });
  const found = await ask<{ checkpointID: string; name: string }[]>("GET", "/checkpoints");
  assert.deepEqual(
    found.map((c) => [c.checkpointID, c.name]),
    [[checkpointID, "first"]],
  );
  for (const to of ["first", checkpointID]) {
    await sandbox.files.write("state", "two");
    await sandbox.commands.kill(child.pid);
    await ask("POST", "/rewind", { checkpoint: to });
    assert.equal(await run(sandbox, "echo $GREETING; cat state; echo; hostname"), `hi\none\n${sandbox.sandboxId}`);
    assert.ok(
      (await sandbox.commands.list()).some((p) => p.pid === child.pid),
      "what ended since runs again",
    );
  }
  await sandbox.pause();
  await ask("POST", "/rewind", { checkpoint: "first" });
  assert.equal(await sandbox.files.read("state"), "one");
  const tree = await ask<{ nodes: { cause: string; names: string[] }[] }>("GET", "/lineage");
  assert.ok(
    tree.nodes.some((n) => n.cause === "checkpoint" && n.names.includes("first")),
    JSON.stringify(tree),
  );
  assert.equal((await api("POST", `${path}/rewind`, { checkpoint: "none" })).status, 404);
});

test(
  "at the end of its time a sandbox that is to be paused is paused, again and again, and loses nothing",
  LIMIT,
  async (t) => {
    const sandbox = await sandboxFor(t, { lifecycle: { onTimeout: "pause" } });
    const paused = async (): Promise<void> => {
      await sandbox.setTimeout(500);
      await eventually(async () => (await sandbox.getInfo()).state === "paused");
    };
    await sandbox.files.write("log", "0\n");
    await paused();
    for (let round = 1; round <= 2; round++) {
      const again = await Sandbox.connect(sandbox.sandboxId, connection);
      await again.commands.run(`echo ${round} >> log`);
      await paused();
    }
    const last = await Sandbox.connect(sandbox.sandboxId, connection);
    assert.equal(await last.files.read("log"), "0\n1\n2\n");
    assert.deepEqual((await last.getInfo()).lifecycle, { onTimeout: "pause", autoResume: false });
  },
);

test("at the end of its time only the disk is kept where that was asked for", LIMIT, async (t) => {
  const lifecycle = { onTimeout: { action: "pause", keepMemory: false } } as const;
  const sandbox = await sandboxFor(t, { lifecycle });
  const boot = await bootId(sandbox);
  await sandbox.files.write("kept", "on disk");
  await sandbox.setTimeout(1000);
  await eventually(async () => (await sandbox.getInfo()).state === "paused");
  const again = await Sandbox.connect(sandbox.sandboxId, connection);
  assert.notEqual(await bootId(again), boot);
  assert.equal(await again.files.read("kept"), "on disk");
});

test("refusals of the API for states have their status and say why", LIMIT, async (t) => {
  const sandbox = await sandboxFor(t);
  const id = sandbox.sandboxId;
  const ask = async (method: string, path: string, body?: unknown): Promise<[number, string]> => {
    const res = await api(method, path, body);
    const text = await res.text();
    const { code, message } =
      text === "" ? { code: 0, message: "" } : (JSON.parse(text) as { code: number; message: string });
    if (res.status >= 400) assert.equal(code, res.status);
    return [res.status, message];
  };
  const status = async (...args: Parameters<typeof ask>): Promise<number> => (await ask(...args))[0];
  assert.equal(await status("POST", `/sandboxes/${id}/resume`, {}), 409, "it runs");
  assert.equal(await status("POST", `/sandboxes/${id}/connect`, { timeout: 60 }), 200);
  assert.equal(await status("POST", `/sandboxes/${id}/pause`, {}), 204);
  assert.equal(await status("POST", `/sandboxes/${id}/pause`, {}), 409, "it is paused");
  assert.equal(await status("POST", `/sandboxes/${id}/timeout`, { timeout: 60 }), 409, "a paused one has no end");
  assert.equal(await status("POST", `/v2/sandboxes/${id}/connect`), 201);
  assert.equal(await status("POST", `/sandboxes/${id}/fork`, { count: 0 }), 400);
  assert.equal(await status("POST", `/sandboxes/${id}/fork`, { count: 101 }), 400);
  assert.equal(await status("POST", `/sandboxes/${id}/snapshots`, { name: "Not A Name" }), 400);
  assert.equal(await status("POST", `/sandboxes/${id}/snapshots`, { name: "base" }), 409, "a template has that name");
  assert.equal(await status("DELETE", `/templates/${encodeURIComponent("no-such:default")}`), 404);
  for (const path of ["pause", "resume", "fork", "snapshots", "connect"])
    assert.equal(await status("POST", `/sandboxes/inosuchsandbox/${path}`, { timeout: 60 }), 404, path);
});
