import assert from "node:assert/strict";
import { copyFile, mkdtemp, rm } from "node:fs/promises";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { test } from "node:test";
import { mib, newRunId } from "@aenv/base";
import type { VmSpec } from "./contract.ts";
import { driverContract } from "./contract-suite.ts";
import { FakeDriver, FakeWorld } from "./fake.ts";

const never = new AbortController().signal;

function fakeSpec(dir: string, memory: VmSpec["memory"], vcpus = 1): VmSpec {
  const machine = { vcpus, memoryBytes: mib(64), kernel: "/none", initrd: "/none", cmdline: "" };
  return { run: newRunId(), machine, runDir: dir, uid: 0, gid: 0, memory, consoleLog: `${dir}/console` };
}

driverContract("fake", async () => {
  const dir = await mkdtemp(join(tmpdir(), "aenv-fake-"));
  const world = new FakeWorld();
  let driver = new FakeDriver(world);
  return {
    get driver() {
      return driver;
    },
    dir,
    restart: async () => (driver = new FakeDriver(world)),
    spec: async (memory, vcpus) => fakeSpec(dir, memory, vcpus),
    step: async (spec) => {
      driver.touch(spec.run);
      return driver.memoryOf(spec.run)?.counter ?? -1;
    },
    progress: async (spec) => driver.memoryOf(spec.run)?.counter ?? -1,
    captureMemory: (_vm, spec, target) => copyFile(spec.memory.file, target),
    crash: (vm) => driver.crash(vm.handle.run),
    bootAndEnd: async (end) => {
      const spec = fakeSpec(dir, { file: `${dir}/end`, mode: "create" });
      const vm = await driver.boot(spec, never);
      await driver.crash(spec.run, end, "the guest ended");
      return vm;
    },
    alive: async () => driver.alive.length,
    [Symbol.asyncDispose]: () => rm(dir, { recursive: true, force: true }),
  };
});

test("faults of the fake are asked for by operation and used up in order", async (t) => {
  const dir = await mkdtemp(join(tmpdir(), "aenv-fake-"));
  t.after(() => rm(dir, { recursive: true, force: true }));
  const driver = new FakeDriver();
  driver.knobs.failures.boot = [new Error("first"), new Error("second")];
  const spec = fakeSpec(dir, { file: `${dir}/memory`, mode: "create" });
  await assert.rejects(driver.boot(spec, never), /first/);
  await assert.rejects(driver.boot(spec, never), /second/);
  const vm = await driver.boot(spec, never);
  const seen: string[] = [];
  driver.knobs.hook = async (op, run) => void seen.push(`${op} ${run}`);
  await vm.stop(never);
  assert.deepEqual(seen, [`stop ${spec.run}`]);
});

test("a guest of the fake follows the VM: it serves only while the VM runs", async (t) => {
  const dir = await mkdtemp(join(tmpdir(), "aenv-fake-"));
  t.after(() => rm(dir, { recursive: true, force: true }));
  const driver = new FakeDriver();
  const calls: string[] = [];
  driver.knobs.guest = () => ({
    resume: async () => void calls.push("resume"),
    stop: async () => void calls.push("stop"),
  });
  const vm = await driver.boot(fakeSpec(dir, { file: `${dir}/memory`, mode: "create" }), never);
  await vm.stop(never);
  await vm.resume(never);
  await vm.kill();
  assert.deepEqual(calls, ["resume", "stop", "resume", "stop"]);
});
