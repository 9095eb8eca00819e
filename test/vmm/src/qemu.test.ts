import assert from "node:assert/strict";
import { createHash } from "node:crypto";
import { existsSync } from "node:fs";
import { readFile, stat } from "node:fs/promises";
import { connect } from "node:net";
import { test } from "node:test";
import { AenvError, silentLogger, sleep } from "@aenv/base";
import { isAlive, run } from "@aenv/host";
import { CONSOLE_LOG_BYTES, JsonLines, jsonLine, type Vm, type VmSpec } from "@aenv/vmm";
import { QemuDriver } from "@aenv/vmm-qemu";
import { testGuest } from "./guest.ts";
import { QemuHarness, startVmd, stopVmd } from "./harness.ts";
import { nbdServer } from "./nbd-server.ts";

const never = new AbortController().signal;
const POLL_MS = 20;

async function until(what: () => Promise<boolean> | boolean): Promise<void> {
  while (!(await what())) await sleep(POLL_MS);
}

/** Boots, waits for a step, and leaves memory and device state behind. */
async function parentOf(
  h: QemuHarness,
  more: Partial<VmSpec> = {},
): Promise<{ memory: string; state: string; step: number }> {
  const spec = { ...(await h.spec({ file: `${h.dir}/parent`, mode: "create" })), ...more };
  const vm = await h.driver.boot(spec, never);
  await h.step(spec);
  await vm.stop(never);
  await vm.saveDeviceState(`${h.dir}/state`, never);
  await h.captureMemory(vm, spec, `${h.dir}/memory`);
  const step = await h.progress(spec);
  await vm.kill();
  return { memory: `${h.dir}/memory`, state: `${h.dir}/state`, step };
}

test("disk, network, randomness and balloon are there, before and after a launch", async (t) => {
  await using h = await QemuHarness.open();
  const netns = h.group;
  await run("ip", ["netns", "add", netns]);
  t.after(() => run("ip", ["netns", "del", netns]));
  const devices = async (spec: VmSpec, disk: string): Promise<VmSpec> => {
    const tap = `t${spec.uid}`;
    const add = ["-n", netns, "tuntap", "add", tap, "mode", "tap", "user", `${spec.uid}`, "group", `${spec.gid}`];
    await run("ip", add);
    await run("ip", ["-n", netns, "link", "set", tap, "up"]);
    return { ...spec, netns, tap, mac: "02:fc:00:00:00:05", diskSocket: disk };
  };
  const disk = await nbdServer(t, h, "disk");
  const content = await readFile(disk.file);
  const spec = await devices(await h.spec({ file: `${h.dir}/parent`, mode: "create" }), disk.socket);
  const vm = await h.driver.boot(spec, never);
  const console = await h.until(spec, /TICK 1/);
  const sum = createHash("sha256")
    .update(content.subarray(0, 1024 * 1024))
    .digest("hex")
    .slice(0, 16);
  assert.match(console, new RegExp(`DISK read=1048576 sum=${sum} err=<nil>`));
  assert.match(console, /LINK eth0 02:fc:00:00:00:05/);
  assert.match(console, /RNG virtio_rng/);
  const written = "written by the guest";
  assert.equal((await readFile(disk.file)).toString("latin1", 1 << 20, (1 << 20) + written.length), written);
  await vm.stop(never);
  await vm.saveDeviceState(`${h.dir}/state`, never);
  await h.captureMemory(vm, spec, `${h.dir}/memory`);
  const step = await h.progress(spec);
  await vm.kill();
  const child = await devices(await h.spec({ file: `${h.dir}/memory`, mode: "map" }), disk.socket);
  const launched = await h.driver.prepare(child, never);
  await launched.load(`${h.dir}/state`, never);
  await launched.resume(never);
  assert.equal(await h.step(child), step + 1);
});

test("a guest that writes to its console for ever fills a bounded log and nothing else", async () => {
  await using h = await QemuHarness.open();
  const spec = await h.spec({ file: `${h.dir}/m`, mode: "create" }, 1, "test.end=flood");
  const vm = await h.driver.boot(spec, never);
  await until(() => existsSync(`${spec.consoleLog}.1`));
  await until(async () => (await stat(spec.consoleLog)).size > 0);
  for (const file of [spec.consoleLog, `${spec.consoleLog}.1`]) assert.ok((await stat(file)).size <= CONSOLE_LOG_BYTES);
  // No server is there to move the log on: the kernel's bound holds, and the VM lives.
  await h.driver.close();
  await until(async () => (await stat(spec.consoleLog)).size === CONSOLE_LOG_BYTES);
  assert.ok(isAlive(vm.identity));
  const adopted = await (await h.restart()).adopt(vm.handle, never);
  assert.equal(await adopted.status(never), "running");
  await adopted.kill();
});

/** Talks QMP past the driver, which must have let go of the VM. */
async function rawQmp(spec: VmSpec, commands: object[]): Promise<unknown[]> {
  const socket = connect(`${spec.runDir}/qmp.sock`);
  const lines = new JsonLines();
  const answers: unknown[] = [];
  for (const c of [{ execute: "qmp_capabilities" }, ...commands]) socket.write(jsonLine(c));
  for await (const chunk of socket) {
    answers.push(...lines.push(chunk as Buffer).filter((m) => "return" in (m as object) || "error" in (m as object)));
    if (answers.length > commands.length) break;
  }
  socket.destroy();
  return answers.slice(1);
}

test("a balloon that fills does not touch the memory file that siblings share", async () => {
  await using h = await QemuHarness.open();
  const parent = await parentOf(h);
  const digest = async (): Promise<string> =>
    createHash("sha256")
      .update(await readFile(parent.memory))
      .digest("hex");
  const blocks = async (): Promise<number> => (await stat(parent.memory)).blocks;
  const before = [await digest(), await blocks()];
  const spec = await h.spec({ file: parent.memory, mode: "map" });
  const vm = await h.driver.prepare(spec, never);
  await vm.load(parent.state, never);
  await vm.resume(never);
  await h.step(spec);
  await h.driver.close();
  await rawQmp(spec, [{ execute: "balloon", arguments: { value: 112 * 1024 * 1024 } }]);
  const log = `${h.base}/vmm.log`;
  // QEMU was asked to discard and refused.
  await until(async () => /read-?only/i.test(await readFile(log, "utf8").catch(() => "")));
  await h.progress(spec);
  await h.step(spec);
  assert.deepEqual([await digest(), await blocks()], before);
  assert.ok((await stat(log)).size <= CONSOLE_LOG_BYTES);
});

test("twenty VMs wait at once, and each launches on its own", async (t) => {
  await using h = await QemuHarness.open();
  const parent = await parentOf(h);
  const started = performance.now();
  const waiting = await Promise.all(
    Array.from({ length: 20 }, async () => {
      const spec = await h.spec({ file: parent.memory, mode: "map" });
      return { spec, vm: await h.driver.prepare(spec, never) };
    }),
  );
  t.diagnostic(`20 prepared in ${(performance.now() - started).toFixed(0)} ms`);
  assert.equal(await h.alive(), 20);
  const times: number[] = [];
  const usage: number[] = [];
  for (const { spec, vm } of waiting) {
    const from = performance.now();
    await vm.load(parent.state, never);
    await vm.resume(never);
    times.push(performance.now() - from);
    assert.equal(await h.step(spec), parent.step + 1);
    usage.push((await h.cgroups.stats(spec.cgroup ?? "")).memoryBytes);
    await vm.stop(never);
  }
  const median = (all: number[]): number => all.toSorted((a, b) => a - b)[Math.floor(all.length / 2)] ?? 0;
  t.diagnostic(
    `load + resume: median ${median(times).toFixed(1)} ms; memory after a step: ${(median(usage) / 2 ** 20).toFixed(1)} MiB`,
  );
  await Promise.all(waiting.map(({ vm }) => vm.kill()));
  assert.equal(await h.alive(), 0);
});

test("VMs and their driver live through the death of vmd", async () => {
  await using h = await QemuHarness.open();
  const spec = await h.spec({ file: `${h.dir}/m`, mode: "create" });
  const vm = await h.driver.boot(spec, never);
  await h.step(spec);
  await stopVmd(h.vmd, "SIGKILL");
  await h.step(spec);
  h.vmd = await startVmd(h.base);
  await h.crash(vm);
  // Nobody is the parent any more, so nobody has the signal.
  assert.equal((await vm.exited).cause, "unknown");
  const next = await h.spec({ file: `${h.dir}/next`, mode: "create" });
  await h.driver.boot(next, never);
  await h.step(next);
});

test("a VMM over the limit of its group ends as out of memory", async () => {
  await using h = await QemuHarness.open();
  const spec = await h.spec({ file: `${h.dir}/m`, mode: "create" });
  const vm = await h.driver.boot(spec, never);
  await h.step(spec);
  await vm.stop(never);
  await vm.saveDeviceState(`${h.dir}/state`, never);
  await h.captureMemory(vm, spec, `${h.dir}/memory`);
  const small = await h.spec({ file: `${h.dir}/memory`, mode: "map" });
  await h.cgroups.create(small.cgroup ?? "", { memoryBytes: 18 * 1024 * 1024 });
  let child: Vm;
  try {
    child = await h.driver.prepare(small, never);
    await child.load(`${h.dir}/state`, never);
    await child.resume(never);
  } catch (e) {
    assert.ok(e instanceof AenvError);
    return;
  }
  assert.equal((await child.exited).cause, "out-of-memory");
});

test("a start that fails says in QEMU's words why, and leaves no file and no process", async () => {
  await using h = await QemuHarness.open();
  const good = await h.spec({ file: `${h.dir}/m`, mode: "create" });
  const spec = { ...good, machine: { ...good.machine, kernel: "/nonexistent/kernel" } };
  await assert.rejects(h.driver.boot(spec, never), (e: unknown) => {
    assert.ok(e instanceof AenvError && e.code === "VMM_FAILED");
    assert.match(e.message, /nonexistent\/kernel/);
    return true;
  });
  assert.equal(existsSync(spec.memory.file), false);
  assert.equal(await h.alive(), 0);
  await assert.rejects(h.driver.boot({ ...good, netns: "aenv-no-such" }, never), /aenv-no-such/);
});

test("auto finds an acceleration that boots, and says which and why once", async () => {
  await using h = await QemuHarness.open();
  const warnings: string[] = [];
  const options = {
    spawner: h.client,
    probeGuest: await testGuest(),
    probeCache: `${h.base}/verdict`,
    logger: { ...silentLogger, warn: (_f: object, m: string) => void warnings.push(m) },
  };
  const first = await QemuDriver.open(options, never);
  const probe = await first.probe(never);
  await first.close();
  assert.deepEqual(warnings, probe.accel === "tcg" ? [probe.reason] : []);
  assert.equal(await h.alive(), 0);
  const second = await QemuDriver.open(options, never);
  assert.deepEqual(await second.probe(never), probe);
  await second.close();
});
