import assert from "node:assert/strict";
import { readFileSync, rmSync } from "node:fs";
import { join } from "node:path";
import { test } from "node:test";
import type { Sandbox } from "e2b";
import { api, eventually, home, ownedPid, sandboxFor, serverPid, startServer } from "./node.ts";

const LIMIT = { timeout: 300_000 };

/** Of the server before; resolves when it is gone. */
async function endServer(signal: NodeJS.Signals): Promise<number> {
  const pid = serverPid();
  process.kill(pid, signal);
  await eventually(async () => {
    try {
      process.kill(pid, 0);
      return false;
    } catch {
      return true;
    }
  });
  return pid;
}

test(
  "kill -9 of the server with 10 running and 5 paused ends none: the next server goes on with each",
  LIMIT,
  async (t) => {
    const paused: Sandbox[] = [];
    const sums: string[] = [];
    for (let n = 0; n < 5; n++) {
      const s = await sandboxFor(t, { timeoutMs: 600_000 });
      sums.push((await s.commands.run("head -c 2000000 /dev/urandom > /dev/shm/d; sha256sum /dev/shm/d")).stdout);
      await s.pause();
      paused.push(s);
    }
    const all: Sandbox[] = [];
    for (let n = 0; n < 10; n++) all.push(await sandboxFor(t, { timeoutMs: 600_000, metadata: { n: String(n) } }));
    const started = await Promise.all(
      all.map((s, i) =>
        s.commands.run(`while :; do echo ${i} >> ticks; sleep 0.2; done`, { background: true, timeoutMs: 0 }),
      ),
    );
    for (const s of all) await s.files.write("kept.txt", s.sandboxId);
    const boots = await Promise.all(
      all.map(async (s) => (await s.commands.run("cat /proc/sys/kernel/random/boot_id")).stdout),
    );
    const before = await Promise.all(all.map(async (s) => (await s.getInfo()).endAt.toISOString()));

    await startServer(await endServer("SIGKILL"));

    for (const [i, s] of all.entries()) {
      assert.equal(await s.files.read("kept.txt"), s.sandboxId);
      assert.equal((await s.commands.run("cat /proc/sys/kernel/random/boot_id")).stdout, boots[i]);
      assert.ok((await s.commands.list()).some((p) => p.pid === started[i]?.pid));
      const info = await s.getInfo();
      assert.equal(info.endAt.toISOString(), before[i]);
      assert.deepEqual(info.metadata, { n: String(i) });
      const count = async (): Promise<number> => (await s.files.read("ticks")).split("\n").length;
      const first = await count();
      await eventually(async () => (await count()) > first);
    }
    for (const [i, s] of paused.entries()) {
      assert.equal((await s.getInfo()).state, "paused");
      const again = await s.connect();
      assert.equal((await again.commands.run("sha256sum /dev/shm/d")).stdout, sums[i]);
    }
    const fresh = await sandboxFor(t);
    assert.equal((await fresh.commands.run("echo new")).stdout, "new\n");
  },
);

test(
  "SIGTERM pauses what runs within a deadline that it prints; traffic wakes it after the next start",
  LIMIT,
  async (t) => {
    const all = await Promise.all(Array.from({ length: 3 }, () => sandboxFor(t, { timeoutMs: 600_000 })));
    const ended = await sandboxFor(t, { timeoutMs: 600_000 });
    await ended.kill();
    const counting = await Promise.all(
      all.map((s) =>
        s.commands.run("n=0; while :; do echo $((n++)) >> /dev/shm/n; sleep 0.2; done", {
          background: true,
          timeoutMs: 0,
        }),
      ),
    );
    const ends = await Promise.all(all.map(async (s) => (await s.getInfo()).endAt.getTime()));
    const log = join(home, "log/server.log");
    const before = readFileSync(log, "utf8").length;
    const former = await endServer("SIGTERM");
    const said = readFileSync(log, "utf8").slice(before);
    assert.match(said, /"deadlineMs":\d+.*within the deadline/);
    assert.match(said, /"paused":[3-9].*all sandboxes are paused/);
    await startServer(former);
    for (const [i, s] of all.entries()) {
      assert.equal((await s.getInfo()).state, "paused");
      // Nothing but the request itself wakes it.
      const count = async (): Promise<number> => Number((await s.commands.run("tail -n 1 /dev/shm/n")).stdout);
      const first = await count();
      await eventually(async () => (await count()) > first);
      assert.ok((await s.commands.list()).some((p) => p.pid === counting[i]?.pid));
      const info = await s.getInfo();
      assert.equal(info.state, "running");
      assert.equal(info.endAt.getTime(), ends[i]);
    }
    await assert.rejects(ended.getInfo());
  },
);

test("SIGUSR2 leaves what runs to the next server", LIMIT, async (t) => {
  const s = await sandboxFor(t);
  const boot = (await s.commands.run("cat /proc/sys/kernel/random/boot_id; echo $PPID")).stdout;
  const vmm = await ownedPid(`sandbox ${s.sandboxId}`);
  await startServer(await endServer("SIGUSR2"));
  assert.equal((await s.commands.run("cat /proc/sys/kernel/random/boot_id; echo $PPID")).stdout, boot);
  assert.equal(await ownedPid(`sandbox ${s.sandboxId}`), vmm);
});

test("kill -9 of blockd: a guest waits for its disk, then goes on with equal data", LIMIT, async (t) => {
  const sandbox = await sandboxFor(t);
  await sandbox.commands.run("head -c 20000000 /dev/urandom > data; sha256sum data > sum; sync");
  process.kill(await ownedPid("node (blockd)"), "SIGKILL");
  const check = await sandbox.commands.run("echo 3 | sudo tee /proc/sys/vm/drop_caches >/dev/null; sha256sum -c sum", {
    timeoutMs: 120_000,
  });
  assert.equal(check.stdout, "data: OK\n");
  await sandbox.commands.run("echo more > after; sync");
  const fresh = await eventually(() => sandboxFor(t).catch(() => undefined));
  assert.equal((await fresh.commands.run("echo new")).stdout, "new\n");
});

test("kill -9 of vmd: what runs goes on, and new sandboxes can be made", LIMIT, async (t) => {
  const sandbox = await sandboxFor(t);
  process.kill(await ownedPid("node (vmd)"), "SIGKILL");
  assert.equal((await sandbox.commands.run("echo on")).stdout, "on\n");
  const fresh = await eventually(() => sandboxFor(t).catch(() => undefined));
  assert.equal((await fresh.commands.run("echo new")).stdout, "new\n");
  assert.equal(await sandbox.kill(), true);
});

test("kill -9 of the server in the middle of a template build leaves nothing of it, and the next server builds it", {
  timeout: 300_000,
}, async (t) => {
  const owned = await sandboxFor(t);
  await owned.files.write("kept.txt", "still here");
  type Base = { state: string; step?: string };
  const base = async (): Promise<Base | undefined> => {
    const answer = await api("GET", "/v1/node").catch(() => undefined);
    return answer?.ok ? ((await answer.json()) as { base: Base }).base : undefined;
  };
  // Without it the next server builds the template again.
  rmSync(join(home, "images/base-built.json"));
  let server = serverPid();
  process.kill(server, "SIGKILL");
  for (const at of [/import/, /boot/]) {
    await startServer(server);
    server = serverPid();
    await eventually(async () => {
      const now = await base();
      assert.notEqual(now?.state, "ready", "it is still being built");
      return at.test(now?.step ?? "");
    });
    process.kill(server, "SIGKILL");
  }
  await startServer(server);
  await eventually(async () => (await base())?.state === "ready");
  const report = (await (await api("GET", "/v1/doctor")).json()) as { resources: { owner: string | null }[] };
  assert.deepEqual(
    report.resources.filter((r) => r.owner === null),
    [],
  );
  assert.equal(await owned.files.read("kept.txt"), "still here");
  const fresh = await sandboxFor(t);
  assert.equal((await fresh.commands.run("echo new")).stdout, "new\n");
});
