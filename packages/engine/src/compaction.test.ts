import assert from "node:assert/strict";
import { existsSync } from "node:fs";
import { mkdir, mkdtemp, readdir, readFile, rm, writeFile } from "node:fs/promises";
import { tmpdir } from "node:os";
import { dirname, join } from "node:path";
import { test } from "node:test";
import {
  bytes,
  mib,
  newMemoryId,
  newSandboxId,
  newSnapshotId,
  newTemplateId,
  silentLogger,
  TaskGroup,
} from "@aenv/base";
import { DeltaWriter, localMemory, MemoryStack, PAGE_BYTES } from "@aenv/memory";
import { DEFAULT_TEAM, type MemoryFileRecord, type SnapshotRecord, State } from "@aenv/state";
import fc from "fast-check";
import { Compactor, planCompaction } from "./compaction.ts";
import { engineConfig } from "./config.ts";
import { Foreground } from "./foreground.ts";
import { Holds } from "./holds.ts";
import { stackOf } from "./memory-stack.ts";
import { Paths } from "./paths.ts";
import type { BlockdPort } from "./ports.ts";
import { MACHINE, ManualClock, until, World } from "./testing.ts";

const PAGES = 32;
const MEMORY_BYTES = bytes(PAGES * PAGE_BYTES);
const FAN = 4;
const OWNER = { uid: process.getuid?.() ?? 0, gid: process.getgid?.() ?? 0 };

/** What each capture of a chain wrote: page numbers with the byte they were filled with; 0 makes a page of zeros. */
type Writes = readonly { page: number; value: number }[];

/** The snapshots of a chain of captures, first one flat, recorded and kept by name; and the memory of each. */
async function chain(
  state: State,
  paths: Paths,
  captures: readonly Writes[],
): Promise<{ snapshots: SnapshotRecord[]; contents: Buffer[] }> {
  const content = Buffer.alloc(MEMORY_BYTES);
  const snapshots: SnapshotRecord[] = [];
  const contents: Buffer[] = [];
  for (const writes of captures) {
    for (const { page, value } of writes) content.fill(value, page * PAGE_BYTES, (page + 1) * PAGE_BYTES);
    const before = snapshots.at(-1);
    const [id, memory, kind] = [newSnapshotId(), newMemoryId(), before ? ("delta" as const) : ("flat" as const)];
    const path = join(paths.memoryDir(memory), kind);
    await mkdir(dirname(path), { recursive: true });
    await mkdir(paths.snapshotDir(id), { recursive: true });
    if (before) {
      const writer = new DeltaWriter(path, MEMORY_BYTES);
      for (const page of [...new Set(writes.map((w) => w.page))].toSorted((a, b) => a - b)) {
        const data = Buffer.from(content.subarray(page * PAGE_BYTES, (page + 1) * PAGE_BYTES));
        writer.add({
          offset: page * PAGE_BYTES,
          length: PAGE_BYTES,
          data: data.some((b) => b !== 0) ? data : undefined,
        });
      }
      await writer.seal(false);
    } else await writeFile(path, content);
    const file: MemoryFileRecord = { id: memory, path, kind, bytes: writes.length * PAGE_BYTES, createdAt: 1 };
    const s: SnapshotRecord = {
      id,
      ...(before ? { parent: before.id } : {}),
      cause: "snapshot",
      machine: { ...MACHINE, memoryBytes: MEMORY_BYTES },
      devicePath: join(paths.snapshotDir(id), "device"),
      memory: [...(before?.memory ?? []), file],
      diskBytes: mib(64),
      layers: [],
      defaults: { user: "user", workdir: "/", envVars: {} },
      envdVersion: "0.6.13",
      createdAt: 1,
    };
    state.tx(() => {
      state.snapshots.add(s);
      const saved = { id: newTemplateId(), snapshot: id, sandbox: newSandboxId("loc"), template: newTemplateId() };
      state.saved.put({ ...saved, team: DEFAULT_TEAM, createdAt: 1, spawnCount: 0, names: [] });
    });
    snapshots.push(s);
    contents.push(Buffer.from(content));
  }
  return { snapshots, contents };
}

function contentOf(state: State, id: SnapshotRecord["id"]): Buffer {
  const s = state.snapshots.get(id);
  assert.ok(s);
  using stack = new MemoryStack(stackOf(s));
  return Buffer.concat([...stack.content()].map((p) => p.data));
}

const depth = (state: State, s: SnapshotRecord): number => state.snapshots.get(s.id)?.memory.length ?? 0;

class Bench implements AsyncDisposable {
  readonly state: State;
  readonly paths: Paths;
  readonly clock = new ManualClock();
  readonly holds = new Holds();
  readonly compactor: Compactor;
  readonly #dir: string;
  readonly #tasks = new TaskGroup(() => {});

  private constructor(dir: string) {
    this.#dir = dir;
    this.state = State.open(join(dir, "state.db"), this.clock);
    this.paths = new Paths(dir, "abcd", dir);
    const config = engineConfig({
      home: dir,
      instance: "abcd",
      memoryGid: OWNER.gid,
      compaction: { fan: FAN },
      diskReserveBytes: bytes(0),
    });
    const memory = {
      ...localMemory,
      flatten: (...[files, target, , durable]: Parameters<typeof localMemory.flatten>) =>
        localMemory.flatten(files, target, OWNER, durable),
    };
    this.compactor = new Compactor(
      {
        state: this.state,
        paths: this.paths,
        clock: this.clock,
        memory,
        holds: this.holds,
        runs: new Map(),
        blockd: {} as BlockdPort,
        logger: silentLogger,
        config,
        foreground: new Foreground(),
        tasks: this.#tasks,
        step: () => {},
        freeBytes: () => mib(1000),
      },
      () => this.collect(),
    );
  }

  static async make(): Promise<Bench> {
    return new Bench(await mkdtemp(join(tmpdir(), "aenv-compaction-")));
  }

  async collect(): Promise<void> {
    for (const m of this.state.memory.unused()) {
      if (this.holds.spares(m.id)) continue;
      this.state.memory.remove(m.id);
      await rm(dirname(m.path), { recursive: true });
    }
  }

  async settled(): Promise<void> {
    await until(() => this.compactor.idle, "compaction is done");
  }

  async [Symbol.asyncDispose](): Promise<void> {
    await this.#tasks[Symbol.asyncDispose]();
    this.state.close();
    await rm(this.#dir, { recursive: true });
  }
}

const writes = fc.array(fc.record({ page: fc.nat(PAGES - 1), value: fc.nat(3) }), { maxLength: 8 });

test("after compaction every snapshot of a chain is the same memory, page by page, in few files that all are there", async () => {
  await fc.assert(
    fc.asyncProperty(fc.array(writes, { minLength: 1, maxLength: 20 }), async (captures) => {
      await using b = await Bench.make();
      const { snapshots, contents } = await chain(b.state, b.paths, captures);
      for (const s of snapshots) {
        b.compactor.captured(s);
        await b.settled();
      }
      for (const [i, s] of snapshots.entries()) {
        assert.equal(Buffer.compare(contentOf(b.state, s.id), contents[i] ?? Buffer.alloc(0)), 0);
        assert.ok(depth(b.state, s) <= FAN, `${depth(b.state, s)} files`);
      }
      const recorded = b.state.memory.list().map((m) => m.path);
      assert.ok(recorded.every((p) => existsSync(p)));
      assert.equal((await readdir(b.paths.memory)).length, recorded.length);
    }),
    { numRuns: 25 },
  );
});

test("what a launch or capture holds stays while its snapshot gets other files, and goes when it lets go", async () => {
  await using b = await Bench.make();
  const { snapshots } = await chain(
    b.state,
    b.paths,
    Array.from({ length: FAN + 1 }, (_, page) => [{ page, value: 1 }]),
  );
  const top = snapshots.at(-1);
  assert.ok(top);
  // Nothing but the top is kept, so that all but what it stands on could go.
  for (const s of b.state.saved.list()) if (s.snapshot !== top.id) b.state.saved.remove(s.id);
  for (const s of snapshots) if (s.id !== top.id) b.state.snapshots.remove(s.id);
  const held = b.holds.hold(...top.memory.map((m) => m.id));
  b.compactor.captured(top);
  await b.settled();
  assert.equal(depth(b.state, top), 2);
  assert.ok(top.memory.every((m) => existsSync(m.path)));
  held[Symbol.dispose]();
  await b.collect();
  assert.deepEqual(
    top.memory.map((m) => existsSync(m.path)),
    [true, ...Array.from({ length: FAN }, () => false)],
  );
});

test("a state that is launched again and again gets a flat file of its own, those above it too; one use of many launches does not count twice", async () => {
  await using b = await Bench.make();
  const { snapshots, contents } = await chain(b.state, b.paths, [[], [{ page: 1, value: 7 }], [{ page: 2, value: 8 }]]);
  const [, middle, top] = snapshots;
  assert.ok(middle && top);
  b.compactor.launched(middle, PAGE_BYTES);
  b.compactor.launched(middle, PAGE_BYTES);
  await b.settled();
  assert.equal(depth(b.state, middle), 2);
  b.clock.advance(5000);
  b.compactor.launched(middle, PAGE_BYTES);
  await b.settled();
  assert.deepEqual(
    [middle, top].map((s) => b.state.snapshots.get(s.id)?.memory.map((m) => m.kind)),
    [["flat"], ["flat", "delta"]],
  );
  assert.deepEqual(
    snapshots.map((s) => Buffer.compare(contentOf(b.state, s.id), contents[snapshots.indexOf(s)] ?? Buffer.alloc(0))),
    [0, 0, 0],
  );
  const manifest = JSON.parse(await readFile(b.paths.manifest(middle.id), "utf8")) as SnapshotRecord;
  assert.deepEqual(manifest.memory, b.state.snapshots.get(middle.id)?.memory);
});

test("no flat file is made beyond their bound, nor deltas of very different sizes merged again and again", () => {
  const file = (kind: "flat" | "delta", size: number): MemoryFileRecord => ({
    id: newMemoryId(),
    path: "/m",
    kind,
    bytes: size,
    createdAt: 1,
  });
  const limits = { injected: 0, flatBytes: 0, fan: 4, maxFlatBytes: bytes(mib(1000)) };
  const of = (...sizes: number[]): MemoryFileRecord[] => [
    file("flat", mib(100)),
    ...sizes.map((n) => file("delta", mib(n))),
  ];
  assert.equal(planCompaction(of(1, 1, 1), limits), undefined);
  assert.deepEqual(planCompaction(of(1, 1, 1, 1), limits), { from: 1, kind: "delta" });
  assert.deepEqual(planCompaction(of(100, 1, 1, 1, 1), limits), { from: 2, kind: "delta" });
  assert.equal(planCompaction(of(100, 1, 1, 1), limits), undefined);
  assert.equal(planCompaction(of(5, 5, 5, 1), limits), undefined);
  assert.deepEqual(planCompaction(of(20, 5, 1, 5, 5, 5), limits), { from: 2, kind: "delta" });
  assert.deepEqual(planCompaction(of(30), { ...limits, injected: mib(131) }), { from: 0, kind: "flat" });
  assert.equal(planCompaction(of(30), { ...limits, injected: mib(129) }), undefined);
  assert.equal(planCompaction(of(30), { ...limits, injected: mib(131), flatBytes: mib(871) }), undefined);
  // n captures of one size leave in the order of log n files, and each byte is written as often.
  let memory = of();
  let written = 0;
  for (let n = 0; n < 256; n++) {
    memory = [...memory, file("delta", mib(1))];
    for (let plan = planCompaction(memory, limits); plan; plan = planCompaction(memory, limits)) {
      const size = memory.slice(plan.from).reduce((sum, m) => sum + m.bytes, 0);
      memory = [...memory.slice(0, plan.from), file("delta", size / 2 ** 20)];
      memory[plan.from] = file("delta", 0);
      (memory[plan.from] as MemoryFileRecord).bytes = size;
      written += size;
    }
    assert.ok(memory.length <= 1 + 4 * 4, `${memory.length} files after ${n + 1}`);
  }
  assert.ok(written <= 4 * mib(256), `${written / 2 ** 20} MiB written`);
});

for (const step of ["compact:before", "compact-commit:before", "compact-commit:after"])
  for (const how of ["fails", "the server dies"] as const)
    test(`compaction: ${how} at ${step}: every snapshot is as before or compacted, and nothing is left over`, async () => {
      await using world = await World.make();
      const paths = new Paths(world.home, "abcd", world.runRoot);
      const first = await world.start();
      const captures = Array.from({ length: FAN + 2 }, (_, page) => [{ page, value: page + 1 }]);
      const { snapshots, contents } = await chain(first.state, paths, captures);
      await first.end();
      const config = { compaction: { fan: FAN } };
      let reached = false;
      const life = await world.start({
        config,
        onStep: async (name) => {
          if (name !== step || reached) return;
          reached = true;
          if (how === "fails") throw new Error("no");
          await life.crash();
          await new Promise(() => {});
        },
      });
      await until(() => reached, "the step is reached");
      await life.end();
      const next = await world.start({ config });
      await until(() => snapshots.every((s) => depth(next.state, s) <= FAN), "it is done after all");
      for (const [i, s] of snapshots.entries())
        assert.equal(Buffer.compare(contentOf(next.state, s.id), contents[i] ?? Buffer.alloc(0)), 0);
      await until(
        async () => (await readdir(paths.memory)).length === next.state.memory.list().length,
        "no folder without a record",
      );
    });

test("layers of a sandbox that is captured again and again are merged beneath its running disk; a disk that cannot go over keeps its own", async () => {
  await using world = await World.make();
  const signal = new AbortController().signal;
  const config = { compaction: { fan: FAN } };
  const life = await world.start({ config });
  await world.addTemplate(life, "base");
  const { sandboxId } = await life.engine.create({ template: "base", timeoutMs: 600_000 }, signal);
  const run = life.engine.route(sandboxId)?.run ?? "";
  const disk = () => world.disks.get(run)?.layers ?? [];
  /** The fake joins what it merges with a plus. */
  const sealed = async (layers: readonly { path: string }[]): Promise<number> =>
    (await Promise.all(layers.map((l) => readFile(l.path, "utf8")))).join("+").split("+").length;
  const captures = 3 * FAN;
  for (let n = 1; n <= captures; n++) {
    if (n === FAN) world.restackFails = 1;
    await life.engine.snapshot(sandboxId, {}, signal);
    const newest = life.state.snapshots.list().find((s) => s.layers.at(-1)?.id === disk().at(-1)?.id);
    assert.ok(newest);
    await until(() => (life.state.snapshots.get(newest.id)?.layers.length ?? 99) <= FAN + 1, "its layers are merged");
    assert.equal(await sealed(disk()), 2 + n);
  }
  assert.equal(world.restackFails, 0);
  await until(() => disk().length <= FAN + 1, "the disk stands on the merged ones");
  await life.crash();
  const next = await world.start({ config });
  assert.equal(next.engine.get(sandboxId).state, "running");
  for (const s of next.state.snapshots.list()) assert.ok(s.layers.every((l) => existsSync(l.path)));
  assert.equal(await sealed(disk()), 2 + captures);
});
