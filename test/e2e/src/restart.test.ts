import assert from "node:assert/strict";
import { spawn } from "node:child_process";
import { openSync, readFileSync, rmSync } from "node:fs";
import { join } from "node:path";
import { test } from "node:test";
import { api, eventually, home, sandboxFor, url } from "./node.ts";

const LIMIT = { timeout: 180_000 };
const repo = join(import.meta.dirname, "../../..");

const serverPid = (): number => (JSON.parse(readFileSync(join(home, "server.json"), "utf8")) as { pid: number }).pid;

async function ownedPid(owner: string): Promise<number> {
  const report = (await (await api("GET", "/v1/doctor")).json()) as {
    resources: { kind: string; name: string; owner: string | null }[];
  };
  const found = report.resources.find((r) => r.kind === "process" && r.owner === owner);
  assert.ok(found, `no process of ${owner}`);
  return Number(found.name);
}

/** Resolves when a server other than `former` has described itself and answers. */
async function startServer(former: number): Promise<void> {
  const log = openSync(join(home, "log/server.log"), "a");
  spawn(process.execPath, [join(repo, "apps/server/src/main.ts"), "--home", home], {
    detached: true,
    cwd: "/",
    stdio: ["ignore", log, log],
  }).unref();
  await eventually(async () => {
    const ok = await fetch(`${url}/health`).then(
      (r) => r.ok,
      () => false,
    );
    return ok && serverPid() !== former;
  });
}

test("kill -9 of the server ends no sandbox: the next server goes on with each", LIMIT, async (t) => {
  const all = await Promise.all(Array.from({ length: 4 }, (_, i) => sandboxFor(t, { metadata: { n: String(i) } })));
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

  const killed = serverPid();
  process.kill(killed, "SIGKILL");
  await eventually(
    async () =>
      !(await fetch(`${url}/health`)
        .then((r) => r.ok)
        .catch(() => false)),
  );
  await startServer(killed);

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
  const fresh = await sandboxFor(t);
  assert.equal((await fresh.commands.run("echo new")).stdout, "new\n");
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
