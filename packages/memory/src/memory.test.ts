import assert from "node:assert/strict";
import { type ChildProcessWithoutNullStreams, spawn } from "node:child_process";
import { randomBytes } from "node:crypto";
import { mkdtemp, readdir, readFile, rm, stat, writeFile } from "node:fs/promises";
import { tmpdir } from "node:os";
import { dirname, join } from "node:path";
import { createInterface } from "node:readline";
import { type TestContext, test } from "node:test";
import fc from "fast-check";
import {
  type DeltaPiece,
  DeltaWriter,
  type GuestMapping,
  inject,
  localMemory,
  MemoryStack,
  MemoryWorkers,
  narrow,
  PAGE_BYTES,
  type StackFiles,
  Take,
  writtenRuns,
} from "./index.ts";

const PAGES = 256;

/** A process that maps a file privately, as a VMM does, and writes to it on demand. */
const HOLDER = `
import ctypes, mmap, os, sys
fd = os.open(sys.argv[1], os.O_RDONLY)
m = mmap.mmap(fd, ${PAGES * PAGE_BYTES}, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_WRITE)
print(ctypes.addressof(ctypes.c_char.from_buffer(m)), flush=True)
for line in sys.stdin:
    op, page, value = line.split()
    page = int(page) * ${PAGE_BYTES}
    if op == "read": print(m[page], flush=True)
    elif op == "fill": m[page:page + ${PAGE_BYTES}] = bytes([int(value)]) * ${PAGE_BYTES}; print("ok", flush=True)
`;

interface Holder {
  mappings: GuestMapping[];
  file: string;
  content: Buffer;
  ask(line: string): Promise<string>;
}

async function holder(t: TestContext): Promise<Holder> {
  const dir = await mkdtemp(join(tmpdir(), "aenv-memory-"));
  t.after(() => rm(dir, { recursive: true }));
  const file = join(dir, "memory");
  const content = randomBytes(PAGES * PAGE_BYTES);
  await writeFile(file, content);
  const child: ChildProcessWithoutNullStreams = spawn("python3", ["-c", HOLDER, file]);
  t.after(() => child.kill("SIGKILL"));
  const lines = createInterface({ input: child.stdout })[Symbol.asyncIterator]();
  const next = async (): Promise<string> => String((await lines.next()).value);
  const hostAddress = BigInt(await next());
  const half = (PAGES / 2) * PAGE_BYTES;
  // Two mappings, as a guest with memory below and above 4 GiB has.
  const mappings = [
    { pid: child.pid ?? 0, hostAddress, guestOffset: 0, length: half },
    { pid: child.pid ?? 0, hostAddress: hostAddress + BigInt(half), guestOffset: half, length: half },
  ];
  return {
    mappings,
    file,
    content,
    ask: (line) => {
      child.stdin.write(`${line}\n`);
      return next();
    },
  };
}

test("only written pages are found, read pages are not, and neighbours make one run over two mappings", async (t) => {
  const h = await holder(t);
  assert.deepEqual(writtenRuns(h.mappings), []);
  await h.ask("read 5 0");
  for (const page of [3, 4, 127, 128, 255]) await h.ask(`fill ${page} ${page}`);
  const page = (first: number, count: number) => ({ offset: first * PAGE_BYTES, length: count * PAGE_BYTES });
  assert.deepEqual(writtenRuns(h.mappings), [page(3, 2), page(127, 2), page(255, 1)]);
});

const OWNER = { uid: process.getuid?.() ?? 0, gid: process.getgid?.() ?? 0 };
const BYTES = PAGES * PAGE_BYTES;

function contentOf(files: StackFiles): Buffer {
  using stack = new MemoryStack(files);
  return Buffer.concat([...stack.content()].map((p) => p.data));
}

for (const bufferBytes of [0, 6 * PAGE_BYTES, BYTES])
  test(`a capture with ${bufferBytes} bytes of buffer and the state it differs from are the process's memory`, async (t) => {
    const h = await holder(t);
    const files: StackFiles = { memoryBytes: BYTES, flat: h.file, deltas: [] };
    for (const page of [1, 2, 3, 100, 101, 200]) await h.ask(`fill ${page} ${page}`);
    await h.ask("fill 50 0");
    const target = `${h.file}.delta`;
    using take = new Take({
      memoryBytes: BYTES,
      source: { mappings: h.mappings },
      parent: files,
      target,
      owner: OWNER,
      bufferBytes,
    });
    take.take();
    const { bytes, dirtyBytes } = await take.finish(false);
    assert.deepEqual([bytes, dirtyBytes], [6 * PAGE_BYTES, 7 * PAGE_BYTES]);
    const expected = Buffer.from(h.content);
    for (const page of [1, 2, 3, 100, 101, 200]) expected.fill(page, page * PAGE_BYTES, (page + 1) * PAGE_BYTES);
    expected.fill(0, 50 * PAGE_BYTES, 51 * PAGE_BYTES);
    assert.equal(Buffer.compare(contentOf({ ...files, deltas: [target] }), expected), 0);
  });

test("two takes that share a process are together what it has written, and each has some of it", async (t) => {
  const h = await holder(t);
  const files: StackFiles = { memoryBytes: BYTES, flat: h.file, deltas: [] };
  const pages = Array.from({ length: 120 }, (_, i) => 2 * i);
  for (const page of pages) await h.ask(`fill ${page} ${page}`);
  const workers = new MemoryWorkers(2);
  t.after(() => workers.close());
  const targets = [`${h.file}.delta`, `${h.file}.delta-2`];
  const plan = {
    memoryBytes: BYTES,
    source: { mappings: h.mappings },
    parent: files,
    owner: OWNER,
    bufferBytes: BYTES,
  };
  const sessions = await Promise.all(targets.map((target) => workers.begin({ ...plan, target })));
  assert.equal(await sessions[0]?.estimate(), pages.length * PAGE_BYTES);
  await Promise.all(sessions.map((s, index) => s.take({ index, of: 2 })));
  const results = await Promise.all(sessions.map((s) => s.finish(true)));
  assert.equal(
    results.reduce((n, r) => n + r.dirtyBytes, 0),
    pages.length * PAGE_BYTES,
  );
  assert.ok(results.every((r) => r.bytes > 0));
  const expected = Buffer.from(h.content);
  for (const page of pages) expected.fill(page, page * PAGE_BYTES, (page + 1) * PAGE_BYTES);
  assert.equal(Buffer.compare(contentOf({ ...files, deltas: targets }), expected), 0);
});

test("a capture that is given up leaves no file", async (t) => {
  const h = await holder(t);
  const plan = { memoryBytes: BYTES, parent: undefined, target: `${h.file}.flat`, owner: OWNER, bufferBytes: BYTES };
  const session = await localMemory.begin({ ...plan, source: { mappings: h.mappings } });
  await session.take();
  await session.discard();
  assert.deepEqual(await readdir(dirname(h.file)), ["memory"]);
  await assert.rejects(localMemory.begin({ ...plan, source: { mappings: [] }, target: h.file }), { code: "EEXIST" });
});

test("what is injected is what the process sees, and the file stays as it was", async (t) => {
  const h = await holder(t);
  const delta = `${h.file}.delta`;
  const writer = new DeltaWriter(delta, BYTES);
  writer.add({ offset: 127 * PAGE_BYTES, length: 3 * PAGE_BYTES, data: Buffer.alloc(3 * PAGE_BYTES, 77) });
  writer.add({ offset: 10 * PAGE_BYTES, length: PAGE_BYTES, data: undefined });
  await writer.seal(false);
  const workers = new MemoryWorkers(1);
  t.after(() => workers.close());
  assert.equal(await workers.inject(h.mappings, { memoryBytes: BYTES, flat: h.file, deltas: [delta] }), 4 * PAGE_BYTES);
  assert.deepEqual([await h.ask("read 127 0"), await h.ask("read 129 0"), await h.ask("read 10 0")], ["77", "77", "0"]);
  assert.equal(Buffer.compare(await readFile(h.file), h.content), 0);
});

test("a process that has ended and an address outside the machine are told, not guessed", async (t) => {
  const h = await holder(t);
  const gone = h.mappings.map((m) => ({ ...m, pid: 2 ** 22 + 1 }));
  assert.throws(() => writtenRuns(gone), { code: "VMM_FAILED" });
  const delta = `${h.file}.delta`;
  const writer = new DeltaWriter(delta, BYTES);
  writer.add({ offset: BYTES, length: PAGE_BYTES, data: undefined });
  await writer.seal(false);
  const files = { memoryBytes: BYTES, flat: h.file, deltas: [delta] };
  assert.throws(() => inject(h.mappings, files), { code: "CORRUPT", message: new RegExp(delta) });
  const workers = new MemoryWorkers(1);
  t.after(() => workers.close());
  await assert.rejects(workers.inject(h.mappings, files), { code: "CORRUPT", message: new RegExp(delta) });
});

test("parent plus what narrow keeps is the child, for any mix of equal, zero and new pages", () => {
  const page = fc.constantFrom<"same" | "zero" | "new">("same", "zero", "new");
  fc.assert(
    fc.property(fc.array(page, { minLength: 1, maxLength: 40 }), fc.nat(1000), (kinds, first) => {
      const parent = randomBytes(kinds.length * PAGE_BYTES);
      const child = Buffer.from(parent);
      kinds.forEach((k, i) => {
        if (k === "zero") child.fill(0, i * PAGE_BYTES, (i + 1) * PAGE_BYTES);
        if (k === "new") randomBytes(PAGE_BYTES).copy(child, i * PAGE_BYTES);
      });
      const base = first * PAGE_BYTES;
      const kept = narrow({ offset: base, length: child.length, data: child }, (offset, into) => {
        parent.copy(into, 0, offset - base);
      });
      const rebuilt = Buffer.from(parent);
      for (const k of kept) {
        if (k.data) k.data.copy(rebuilt, k.offset - base);
        else rebuilt.fill(0, k.offset - base, k.offset - base + k.length);
      }
      assert.equal(Buffer.compare(rebuilt, child), 0);
      const bytes = (pieces: readonly DeltaPiece[]): number => pieces.reduce((n, p) => n + p.length, 0);
      assert.equal(bytes(kept), kinds.filter((k) => k !== "same").length * PAGE_BYTES);
    }),
    { numRuns: 100 },
  );
});

test("a chain of captures is each state, merged deltas and the flat file of any of them too", async (t) => {
  const dir = await mkdtemp(join(tmpdir(), "aenv-chain-"));
  t.after(() => rm(dir, { recursive: true }));
  let files = 0;
  const pages = 64;
  const memoryBytes = pages * PAGE_BYTES;
  const change = fc.record({ page: fc.nat(pages - 1), count: fc.integer({ min: 1, max: 9 }), value: fc.nat(3) });
  await fc.assert(
    fc.asyncProperty(fc.array(fc.array(change, { maxLength: 6 }), { minLength: 1, maxLength: 6 }), async (steps) => {
      const memory = Buffer.alloc(memoryBytes);
      let stack: StackFiles | undefined;
      for (const changes of steps) {
        for (const { page, count, value } of changes)
          memory.fill(value, page * PAGE_BYTES, Math.min(pages, page + count) * PAGE_BYTES);
        const [now, target] = [join(dir, `now-${++files}`), join(dir, `file-${files}`)];
        await writeFile(now, memory);
        const session = await localMemory.begin({
          memoryBytes,
          source: { file: now },
          parent: stack,
          target,
          owner: OWNER,
          bufferBytes: 5 * PAGE_BYTES,
        });
        await session.take();
        await session.finish(false);
        stack = stack ? { ...stack, deltas: [...stack.deltas, target] } : { memoryBytes, flat: target, deltas: [] };
        assert.equal(Buffer.compare(contentOf(stack), memory), 0);
      }
      assert.ok(stack);
      const [merged, flat] = [join(dir, `merged-${files}`), join(dir, `flat-${files}`)];
      await localMemory.mergeDeltas(stack, merged, false);
      assert.equal(Buffer.compare(contentOf({ ...stack, deltas: [merged] }), memory), 0);
      await localMemory.flatten(stack, flat, OWNER, false);
      assert.equal(Buffer.compare(await readFile(flat), memory), 0);
      assert.equal((await stat(flat)).mode & 0o777, 0o440);
    }),
    { numRuns: 30 },
  );
});
