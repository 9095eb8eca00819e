import assert from "node:assert/strict";
import { globSync, readFileSync } from "node:fs";
import { test } from "node:test";
import { Sandbox } from "e2b";
import { api, connection, eventually, sandboxFor } from "./node.ts";

const LIMIT = { timeout: 120_000 };

/** The VMM processes whose command line names this sandbox's run. */
async function vmmOf(sandbox: Sandbox): Promise<number> {
  const answer = await api("GET", `/v1/doctor`);
  const report = (await answer.json()) as { resources: { kind: string; name: string; owner: string | null }[] };
  const found = report.resources.find((r) => r.kind === "process" && r.owner?.includes(sandbox.sandboxId));
  assert.ok(found, JSON.stringify(report.resources.filter((r) => r.kind === "process")));
  return Number(found.name);
}

const gone = (sandbox: Sandbox): Promise<true> => eventually(async () => !(await sandbox.isRunning()));

test("kill -9 of pid 1 from inside changes nothing", LIMIT, async (t) => {
  const sandbox = await sandboxFor(t);
  await sandbox.commands.run("kill -9 1; sleep 0.2", { user: "root" });
  assert.equal((await sandbox.commands.run("echo still here")).stdout, "still here\n");
});

test("a kernel panic ends the sandbox, and its streams are reset", LIMIT, async (t) => {
  const sandbox = await sandboxFor(t);
  const handle = await sandbox.commands.run("sleep 600", { background: true, timeoutMs: 0 });
  const ended = assert.rejects(handle.wait());
  await sandbox.commands.run("echo 1 > /proc/sys/kernel/sysrq; echo c > /proc/sysrq-trigger", {
    user: "root",
    background: true,
  });
  await ended;
  await gone(sandbox);
  assert.equal(await sandbox.kill(), false);
});

test("a guest that runs out of memory loses the process, not its agent", LIMIT, async (t) => {
  const sandbox = await sandboxFor(t);
  await assert.rejects(sandbox.commands.run("python3 -c 'x = bytearray(4 << 30)'", { timeoutMs: 90_000 }));
  await assert.rejects(sandbox.commands.run(`python3 -c 'x = b"x" * (700 << 20)'`, { timeoutMs: 100_000 }));
  assert.equal((await sandbox.commands.run("echo alive", { timeoutMs: 60_000 })).stdout, "alive\n");
});

test("a killed VMM ends its sandbox only, with nothing left behind", LIMIT, async (t) => {
  const [victim, neighbour] = await Promise.all([sandboxFor(t), sandboxFor(t)]);
  process.kill(await vmmOf(victim), "SIGKILL");
  await gone(victim);
  assert.equal((await neighbour.commands.run("echo fine")).stdout, "fine\n");
  await eventually(async () => {
    const report = await (await api("GET", "/v1/doctor")).text();
    return !report.includes(victim.sandboxId);
  });
});

test("a guest that powers itself off is gone", LIMIT, async (t) => {
  const sandbox = await sandboxFor(t);
  await sandbox.commands.run("echo 1 > /proc/sys/kernel/sysrq; echo o > /proc/sysrq-trigger", {
    user: "root",
    background: true,
  });
  await gone(sandbox);
});

test("a half-sent upload leaves the sandbox usable", LIMIT, async (t) => {
  const sandbox = await sandboxFor(t);
  const abort = new AbortController();
  const body = new ReadableStream<Uint8Array>({
    start(controller) {
      controller.enqueue(new Uint8Array(1 << 20));
    },
  });
  const upload = sandbox.files.write("half", body, { signal: abort.signal });
  setTimeout(() => abort.abort(), 300);
  await assert.rejects(upload);
  await sandbox.files.write("whole", "ok");
  assert.equal(await sandbox.files.read("whole"), "ok");
});

test("50 sandboxes in a row are created, used and killed, and 20 live at once", { timeout: 600_000 }, async (t) => {
  for (let i = 0; i < 50; i++) {
    const sandbox = await Sandbox.create({ ...connection, timeoutMs: 60_000 });
    assert.equal((await sandbox.commands.run(`echo ${i}`)).stdout, `${i}\n`);
    assert.equal(await sandbox.kill(), true);
  }
  const all = await Promise.all(Array.from({ length: 20 }, () => sandboxFor(t, { timeoutMs: 300_000 })));
  const answers = await Promise.all(all.map((s, i) => s.commands.run(`echo number ${i}`)));
  answers.forEach((a, i) => assert.equal(a.stdout, `number ${i}\n`));
  assert.equal(new Set(all.map((s) => s.sandboxId)).size, 20);
  const server = JSON.parse(
    readFileSync(globSync(`${process.env["AENV_TEST_HOME"]}/server.json`)[0] ?? "", "utf8"),
  ) as { pid: number };
  const rssKb = Number(/VmRSS:\s+(\d+)/.exec(readFileSync(`/proc/${server.pid}/status`, "utf8"))?.[1]);
  t.diagnostic(`server resident with 20 sandboxes: ${(rssKb / 1024).toFixed(0)} MB`);
  assert.ok(rssKb < 250 * 1024, `the server holds ${rssKb} kB`);
});
