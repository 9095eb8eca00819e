import assert from "node:assert/strict";
import { copyFile, readdir, truncate, writeFile } from "node:fs/promises";
import { describe, test } from "node:test";
import { AenvError, type ErrorCode, sleep } from "@aenv/base";
import type { ExitCause, Vm, VmHandle, VmmDriver, VmSpec } from "./contract.ts";

/** How the guest of a harness ends by itself. */
export type GuestEnd = Extract<ExitCause, "guest-shutdown" | "guest-reset" | "guest-panic">;

/**
 * What the suite needs around a driver. The guest of the harness changes its memory step by step and can prove that the
 * memory is what the steps made of it.
 */
export interface ContractHarness extends AsyncDisposable {
  readonly driver: VmmDriver;
  /** A folder of this harness for memory files and states. */
  readonly dir: string;
  /** A new driver for the VMs of this host, as after a restart of the server. The old one was closed. */
  restart(): Promise<VmmDriver>;
  spec(memory: VmSpec["memory"], vcpus?: number): Promise<VmSpec>;
  /** Waits for the next step of a running guest, checks its memory, and returns the number of the step. */
  step(spec: VmSpec): Promise<number>;
  /** Without a wait: how far the guest is. */
  progress(spec: VmSpec): Promise<number>;
  /** The whole memory of a stopped VM, whatever it maps, as a file that any VM may map. */
  captureMemory(vm: Vm, spec: VmSpec, target: string): Promise<void>;
  /** Kills the VMM from outside. */
  crash(vm: Vm): Promise<void>;
  /** Boots a guest that ends by itself in the given way. */
  bootAndEnd(end: GuestEnd): Promise<Vm>;
  /** VMMs of this harness that are alive. */
  alive(): Promise<number>;
}

const never = new AbortController().signal;

async function rejectsWith(code: ErrorCode, promise: Promise<unknown>, text?: RegExp): Promise<void> {
  await assert.rejects(promise, (e: unknown) => {
    assert.ok(e instanceof AenvError, String(e));
    assert.equal(e.code, code, e.message);
    if (text) assert.match(e.message, text);
    return true;
  });
}

/** A given-up start is cleaned up in the background; the test's own time limit ends an endless wait. */
async function noneAlive(h: ContractHarness): Promise<void> {
  while ((await h.alive()) > 0) await sleep(5);
}

interface Captured {
  memory: string;
  state: string;
  step: number;
}

/** Stops the VM and writes memory and devices below the harness's folder; the VM stays stopped. */
async function capture(h: ContractHarness, vm: Vm, spec: VmSpec, name: string): Promise<Captured> {
  const taken = { memory: `${h.dir}/${name}.memory`, state: `${h.dir}/${name}.state` };
  await vm.stop(never);
  await vm.saveDeviceState(taken.state, never);
  await h.captureMemory(vm, spec, taken.memory);
  return { ...taken, step: await h.progress(spec) };
}

async function launch(h: ContractHarness, from: Captured, vcpus?: number): Promise<{ vm: Vm; spec: VmSpec }> {
  const spec = await h.spec({ file: from.memory, mode: "map" }, vcpus);
  const vm = await h.driver.prepare(spec, never);
  await vm.load(from.state, never);
  return { vm, spec };
}

async function bootOne(h: ContractHarness, vcpus?: number): Promise<{ vm: Vm; spec: VmSpec }> {
  const spec = await h.spec({ file: `${h.dir}/boot-${Math.random()}.memory`, mode: "create" }, vcpus);
  const vm = await h.driver.boot(spec, never);
  await h.step(spec);
  return { vm, spec };
}

/** What every driver keeps, the fake included. */
export function driverContract(name: string, open: () => Promise<ContractHarness>): void {
  describe(`driver contract: ${name}`, () => {
    test("a booted VM runs, stops and resumes", async () => {
      await using h = await open();
      const { vm, spec } = await bootOne(h);
      assert.equal(await vm.status(never), "running");
      await vm.stop(never);
      await vm.stop(never);
      assert.equal(await vm.status(never), "stopped");
      const before = await h.progress(spec);
      await vm.resume(never);
      await vm.resume(never);
      assert.equal(await vm.status(never), "running");
      assert.ok((await h.step(spec)) > before);
    });

    test("children go on where the parent was captured, two generations deep, and the parent goes on too", async () => {
      await using h = await open();
      const parent = await bootOne(h);
      const first = await capture(h, parent.vm, parent.spec, "first");
      await parent.vm.resume(never);
      const child = await launch(h, first);
      const sibling = await launch(h, first);
      assert.equal(await child.vm.status(never), "stopped");
      await child.vm.resume(never);
      assert.equal(await h.step(child.spec), first.step + 1);
      await h.step(child.spec);
      const second = await capture(h, child.vm, child.spec, "second");
      const grandchild = await launch(h, second);
      await grandchild.vm.resume(never);
      assert.equal(await h.step(grandchild.spec), second.step + 1);
      await sibling.vm.resume(never);
      assert.equal(await h.step(sibling.spec), first.step + 1);
      await child.vm.resume(never);
      assert.equal(await h.step(child.spec), second.step + 1);
      assert.ok((await h.step(parent.spec)) > first.step);
    });

    test("a VM with two processors is captured and launched", async () => {
      await using h = await open();
      const parent = await bootOne(h, 2);
      const taken = await capture(h, parent.vm, parent.spec, "smp");
      await parent.vm.kill();
      const child = await launch(h, taken, 2);
      await child.vm.resume(never);
      assert.equal(await h.step(child.spec), taken.step + 1);
    });

    test("what does not fit the state of the VM is refused and changes nothing", async () => {
      await using h = await open();
      const { vm, spec } = await bootOne(h);
      await rejectsWith("CONFLICT", vm.saveDeviceState(`${h.dir}/early`, never));
      const taken = await capture(h, vm, spec, "taken");
      await rejectsWith("CONFLICT", vm.load(taken.state, never));
      await rejectsWith("CONFLICT", h.driver.boot(spec, never), /exists/);
      await vm.resume(never);
      await h.step(spec);
      const missing = await h.spec({ file: `${h.dir}/missing`, mode: "map" });
      await rejectsWith("NOT_FOUND", h.driver.prepare(missing, never), /missing/);
      await rejectsWith("INVALID_ARGUMENT", h.driver.boot(missing, never));
      assert.ok(!(await readdir(h.dir)).some((f) => f.startsWith("early")));
    });

    test("a damaged device state is refused by name, and the VM does not run on with it", async () => {
      await using h = await open();
      const { vm, spec } = await bootOne(h);
      const taken = await capture(h, vm, spec, "whole");
      const foreign = `${h.dir}/foreign.state`;
      await writeFile(foreign, "something else");
      const first = await h.driver.prepare(await h.spec({ file: taken.memory, mode: "map" }), never);
      await rejectsWith("CORRUPT", first.load(foreign, never), /foreign\.state/);
      const short = `${h.dir}/short.state`;
      await copyFile(taken.state, short);
      await truncate(short, 40);
      const second = await h.driver.prepare(await h.spec({ file: taken.memory, mode: "map" }), never);
      await rejectsWith("CORRUPT", second.load(short, never), /short\.state/);
    });

    test("a memory file of another size is refused", async () => {
      await using h = await open();
      const spec = await h.spec({ file: `${h.dir}/small`, mode: "map" });
      await writeFile(spec.memory.file, Buffer.alloc(4096));
      await rejectsWith("CORRUPT", h.driver.prepare(spec, never), /small/);
      assert.equal(await h.alive(), 0);
    });

    test("kill is idempotent, and afterwards every operation says that the VM is gone", async () => {
      await using h = await open();
      const { vm } = await bootOne(h);
      await Promise.all([vm.kill(), vm.kill()]);
      await vm.kill();
      assert.equal((await vm.exited).cause, "killed");
      assert.equal(await h.alive(), 0);
      await rejectsWith("VMM_FAILED", vm.status(never));
      await rejectsWith("VMM_FAILED", vm.resume(never));
      await rejectsWith("VMM_FAILED", vm.saveDeviceState(`${h.dir}/late`, never));
      await rejectsWith("VMM_FAILED", vm.stats());
    });

    test("a VMM killed from outside is reported as a crash, running or prepared", async () => {
      await using h = await open();
      const { vm, spec } = await bootOne(h);
      const taken = await capture(h, vm, spec, "crash");
      await vm.resume(never);
      const prepared = await h.driver.prepare(await h.spec({ file: taken.memory, mode: "map" }), never);
      for (const victim of [vm, prepared]) {
        await h.crash(victim);
        const exit = await victim.exited;
        assert.equal(exit.cause, "vmm-crash");
        assert.match(exit.detail, /SIGKILL/);
      }
    });

    for (const end of ["guest-shutdown", "guest-reset", "guest-panic"] as const) {
      test(`a guest that ends by itself is reported: ${end}`, async () => {
        await using h = await open();
        const vm = await h.bootAndEnd(end);
        assert.equal((await vm.exited).cause, end);
      });
    }

    test("a restarted server adopts a running VM and a stopped one by their handles", async () => {
      await using h = await open();
      const a = await bootOne(h);
      const b = await bootOne(h);
      await b.vm.stop(never);
      const handles = [a, b].map(({ vm }) => JSON.parse(JSON.stringify(vm.handle)) as VmHandle);
      await h.driver.close();
      const driver = await h.restart();
      const [running, stopped] = await Promise.all(handles.map((handle) => driver.adopt(handle, never)));
      assert.ok(running && stopped);
      assert.equal(await running.status(never), "running");
      assert.equal(await stopped.status(never), "stopped");
      assert.deepEqual(running.identity, a.vm.identity);
      await h.step(a.spec);
      const taken = await capture(h, running, a.spec, "adopted");
      await running.kill();
      assert.equal((await running.exited).cause, "killed");
      const spec = await h.spec({ file: taken.memory, mode: "map" });
      const child = await driver.prepare(spec, never);
      await child.load(taken.state, never);
      await child.resume(never);
      assert.equal(await h.step(spec), taken.step + 1);
      await stopped.resume(never);
      await h.step(b.spec);
    });

    test("adopting a VM that ended while no server was there says so and how", async () => {
      await using h = await open();
      const { vm } = await bootOne(h);
      const handle = vm.handle;
      await h.driver.close();
      await h.crash(vm);
      const driver = await h.restart();
      await assert.rejects(driver.adopt(handle, never), (e: unknown) => {
        assert.ok(e instanceof AenvError && e.code === "NOT_FOUND");
        assert.equal((e.data["exit"] as { cause: string }).cause, "vmm-crash");
        return true;
      });
      await rejectsWith("INVALID_ARGUMENT", driver.adopt({ ...handle, driver: "another" }, never));
    });

    test("a caller that gives up leaves no VM behind", async () => {
      await using h = await open();
      const { vm, spec } = await bootOne(h);
      const taken = await capture(h, vm, spec, "given-up");
      await vm.kill();
      const mapped = await h.spec({ file: taken.memory, mode: "map" });
      await assert.rejects(h.driver.prepare(mapped, AbortSignal.abort()));
      const soon = new AbortController();
      const pending = h.driver.prepare(mapped, soon.signal);
      setImmediate(() => soon.abort());
      await pending.then(
        (late) => late.kill(),
        () => {},
      );
      await noneAlive(h);
    });

    test("mappings cover guest memory in order", async () => {
      await using h = await open();
      const { vm, spec } = await bootOne(h);
      const mappings = await vm.mappings(never);
      if (!h.driver.capabilities.mappings) return assert.deepEqual(mappings, []);
      let next = 0;
      for (const m of mappings) {
        assert.equal(m.pid, vm.identity.pid);
        assert.equal(m.guestOffset, next);
        next += m.length;
      }
      assert.equal(next, spec.machine.memoryBytes);
    });

    test("a machine that cannot be is refused before anything is made", async () => {
      await using h = await open();
      const spec = await h.spec({ file: `${h.dir}/none`, mode: "create" });
      const machine = { ...spec.machine, vcpus: 0 };
      await rejectsWith("INVALID_ARGUMENT", h.driver.boot({ ...spec, machine }, never));
      assert.deepEqual(await readdir(h.dir), []);
      assert.equal(await h.alive(), 0);
    });
  });
}
