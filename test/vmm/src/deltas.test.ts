/**
 * Guest memory as a flat file and deltas, on a real VMM: each generation is launched from what the one before left, writes,
 * and is captured again. Its memory must be byte for byte what the files say, and its virtio devices must work on.
 */
import assert from "node:assert/strict";
import { createHash } from "node:crypto";
import { chmod, open } from "node:fs/promises";
import { test } from "node:test";
import { localMemory, MemoryStack, type StackFiles } from "@aenv/memory";
import type { Vm, VmSpec } from "@aenv/vmm";
import { QemuHarness } from "./harness.ts";
import { nbdServer } from "./nbd-server.ts";

const never = new AbortController().signal;
const OWNER = { uid: 0, gid: 0 };
const CHUNK_BYTES = 1 << 20;

async function memoryOf(vm: Vm): Promise<string> {
  const hash = createHash("sha256");
  const file = await open(`/proc/${vm.identity.pid}/mem`, "r");
  try {
    for (const m of await vm.mappings(never))
      for (let at = 0; at < m.length; at += CHUNK_BYTES) {
        const { bytesRead, buffer } = await file.read(
          Buffer.allocUnsafe(CHUNK_BYTES),
          0,
          CHUNK_BYTES,
          m.hostAddress + BigInt(at),
        );
        assert.equal(bytesRead, CHUNK_BYTES);
        hash.update(buffer);
      }
  } finally {
    await file.close();
  }
  return hash.digest("hex");
}

function contentOf(files: StackFiles): string {
  const hash = createHash("sha256");
  using stack = new MemoryStack(files);
  for (const { data } of stack.content()) hash.update(data);
  return hash.digest("hex");
}

for (const vcpus of [1, 2])
  test(`five generations of a guest with ${vcpus} processors, each a delta on the one before`, async (t) => {
    await using h = await QemuHarness.open();
    const disk = await nbdServer(t, h, "disk");
    const recorded = async (): Promise<number> => {
      const file = await open(disk.file, "r");
      try {
        const { buffer } = await file.read(Buffer.alloc(13), 0, 13, 2 << 20);
        return Number(/^tick (\d+)$/.exec(buffer.toString("latin1"))?.[1]);
      } finally {
        await file.close();
      }
    };
    const flat = `${h.dir}/flat`;
    const state = (n: number): string => `${h.dir}/state-${n}`;
    const specOf = async (memory: VmSpec["memory"]): Promise<VmSpec> => ({
      ...(await h.spec(memory, vcpus, "test.record=1")),
      diskSocket: disk.socket,
    });

    const first = await specOf({ file: flat, mode: "create" });
    const parent = await h.driver.boot(first, never);
    await h.step(first);
    await parent.stop(never);
    await parent.saveDeviceState(state(0), never);
    await h.continues(first, flat);
    let last = await h.progress(first);
    await parent.kill();
    await chmod(flat, 0o444);

    const files: StackFiles & { flat: string; deltas: string[] } = {
      memoryBytes: first.machine.memoryBytes,
      flat,
      deltas: [],
    };
    for (let n = 1; n <= 5; n++) {
      const spec = await specOf({ file: flat, mode: "map" });
      const vm = await h.driver.prepare(spec, never);
      const injected = await localMemory.inject(await vm.mappings(never), files);
      // What QEMU itself does to guest memory at its start would show here.
      assert.equal(await memoryOf(vm), contentOf(files), `generation ${n} before the load`);
      await vm.load(state(n - 1), never);
      await vm.resume(never);
      assert.equal(await h.step(spec), last + 1);
      await h.step(spec);
      assert.ok((await recorded()) > last, "the disk is written");
      const delta = `${h.dir}/delta-${n}`;
      await vm.stop(never);
      await vm.saveDeviceState(state(n), never);
      const session = await localMemory.begin({
        memoryBytes: files.memoryBytes,
        source: { mappings: await vm.mappings(never) },
        parent: { ...files, deltas: [...files.deltas] },
        target: delta,
        owner: OWNER,
        bufferBytes: n % 2 === 0 ? 0 : 1 << 30,
      });
      await session.take();
      const stopped = await memoryOf(vm);
      await h.continues(spec, flat);
      last = await h.progress(spec);
      // Odd generations go on first: what they do afterwards is not part of the capture.
      if (n % 2 === 1) {
        await vm.resume(never);
        await h.step(spec);
      }
      const { bytes, dirtyBytes } = await session.finish(true);
      files.deltas.push(delta);
      assert.equal(contentOf(files), stopped, `generation ${n} as captured`);
      t.diagnostic(
        `generation ${n}: injected ${injected >> 10} KiB, looked at ${dirtyBytes >> 10} KiB, stored ${bytes >> 10} KiB`,
      );
      await vm.kill();
    }

    const [merged, whole] = [`${h.dir}/merged`, `${h.dir}/whole`];
    await localMemory.mergeDeltas(files, merged, false);
    await localMemory.flatten(files, whole, OWNER, false);
    await chmod(whole, 0o444);
    for (const same of [
      { ...files, deltas: [merged] },
      { ...files, flat: whole, deltas: [] },
    ]) {
      const spec = await specOf({ file: same.flat, mode: "map" });
      await h.continues(spec, same.flat);
      const vm = await h.driver.prepare(spec, never);
      await localMemory.inject(await vm.mappings(never), same);
      assert.equal(await memoryOf(vm), contentOf(files));
      await vm.kill();
    }
  });
