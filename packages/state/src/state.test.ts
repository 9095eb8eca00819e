import assert from "node:assert/strict";
import { copyFile, mkdtemp, readdir, readFile, rm, stat, writeFile } from "node:fs/promises";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { DatabaseSync } from "node:sqlite";
import { after, test } from "node:test";
import {
  AenvError,
  bytes,
  newCheckpointId,
  newLayerId,
  newMemoryId,
  newRunId,
  newSandboxId,
  newSnapshotId,
  newTemplateId,
} from "@aenv/base";
import { DEFAULT_TEAM, type SandboxRecord, type SnapshotRecord, State } from "./index.ts";
import { MIGRATIONS } from "./migrations.ts";
import type { EventQuery } from "./series.ts";

const dir = await mkdtemp(join(tmpdir(), "aenv-state-"));
after(() => rm(dir, { recursive: true }));
let files = 0;
const fresh = (): string => join(dir, `${++files}.db`);

const snapshot = (): SnapshotRecord => ({
  id: newSnapshotId(),
  cause: "pause",
  sandbox: newSandboxId("tst"),
  machine: { vcpus: 1, memoryBytes: bytes(1 << 28), kernel: "/k", initrd: "/i", cmdline: "" },
  devicePath: "/d",
  memory: [
    { id: newMemoryId(), path: "/m/flat", kind: "flat", bytes: 7, createdAt: 1 },
    { id: newMemoryId(), path: "/m/delta", kind: "delta", bytes: 3, createdAt: 2 },
  ],
  diskBytes: bytes(1 << 30),
  layers: [1, 2].map((n) => ({ id: newLayerId(), path: `/l${n}`, bytes: n, createdAt: n })),
  defaults: { user: "user", workdir: "/home/user", envVars: { A: "b" } },
  envdVersion: "0.6.7",
  createdAt: 1,
});

const sandbox = (over: Partial<SandboxRecord> = {}): SandboxRecord => ({
  id: newSandboxId("tst"),
  team: DEFAULT_TEAM,
  template: newTemplateId(),
  snapshot: newSnapshotId(),
  state: "creating",
  startedAt: 1,
  endAt: 2,
  metadata: { k: "v" },
  envVars: {},
  secure: true,
  onTimeout: "kill",
  pauseMemory: true,
  autoResume: false,
  interrupted: false,
  timeoutMs: 60_000,
  allowInternetAccess: null,
  allowPublicTraffic: true,
  ...over,
});

test("an API key is verified by its hash, listed masked, and refused once revoked", () => {
  using state = State.open(fresh());
  const { key, record } = state.keys.create(DEFAULT_TEAM, "first");
  assert.match(key, /^e2b_[0-9a-f]{40}$/);
  assert.equal(state.keys.verify(key)?.id, record.id);
  assert.equal(state.keys.verify(`e2b_${"0".repeat(40)}`), undefined);
  assert.equal(state.keys.verify("' OR 1=1"), undefined);
  assert.ok(!JSON.stringify(state.keys.list(DEFAULT_TEAM)).includes(key));
  assert.equal(state.keys.revoke(DEFAULT_TEAM, record.id), true);
  assert.equal(state.keys.verify(key), undefined);
  assert.equal(state.keys.revoke(DEFAULT_TEAM, record.id), false);
});

test("the database file can be read by its owner only", async () => {
  const path = fresh();
  using _state = State.open(path);
  assert.equal((await stat(path)).mode & 0o777, 0o600);
});

test("a snapshot keeps the order of its layers, and is unused until a template, a run or a sandbox stands on it", () => {
  using state = State.open(fresh());
  const s = snapshot();
  state.snapshots.add(s);
  assert.deepEqual(state.snapshots.get(s.id), s);
  assert.deepEqual(
    state.snapshots.unused().map((u) => u.id),
    [s.id],
  );
  assert.deepEqual(state.layers.unused(), []);
  const box = sandbox({ snapshot: s.id, state: "running" });
  state.sandboxes.insert(box);
  assert.deepEqual(state.snapshots.unused(), []);
  state.sandboxes.end(box.id, 5, "killed");
  assert.equal(state.snapshots.unused().length, 1);
  assert.deepEqual(state.memory.unused(), []);
  state.snapshots.remove(s.id);
  assert.equal(state.layers.unused().length, 2);
  assert.deepEqual(
    state.memory
      .unused()
      .map((m) => m.path)
      .toSorted(),
    ["/m/delta", "/m/flat"],
  );
});

test("a memory file is part of several snapshots and unused when the last of them is gone", () => {
  using state = State.open(fresh());
  const one = snapshot();
  const two = { ...snapshot(), memory: one.memory };
  state.snapshots.add(one);
  state.snapshots.add(two);
  state.snapshots.remove(one.id);
  assert.deepEqual(state.memory.unused(), []);
  assert.deepEqual(state.snapshots.get(two.id), two);
  const [flat] = one.memory;
  assert.ok(flat);
  assert.deepEqual(
    state.snapshots.replaceMemory(one.memory, [flat]).map((s) => s.id),
    [two.id],
  );
  assert.deepEqual(
    state.memory.unused().map((m) => m.kind),
    ["delta"],
  );
});

test("the files at the bottom of a memory are replaced in every snapshot that begins with them, and kept while a VMM maps one", () => {
  using state = State.open(fresh());
  const file = (kind: "flat" | "delta") => ({
    id: newMemoryId(),
    path: `/m/${newMemoryId()}`,
    kind,
    bytes: 1,
    createdAt: 1,
  });
  const [flat, d1, d2, d3, other] = [file("flat"), file("delta"), file("delta"), file("delta"), file("delta")] as const;
  const [lower, same, above, aside] = [
    [flat, d1],
    [flat, d1, d2],
    [flat, d1, d2, d3],
    [flat, other, d2],
  ].map((memory) => {
    const s = { ...snapshot(), memory };
    state.snapshots.add(s);
    return s;
  });
  assert.ok(lower && same && above && aside);
  const merged = file("delta");
  const changed = state.snapshots.replaceMemory([flat, d1, d2], [flat, merged]);
  assert.deepEqual(changed.map((s) => s.id).toSorted(), [same.id, above.id].toSorted());
  const memoryOf = (s: { id: typeof same.id }) => state.snapshots.get(s.id)?.memory;
  assert.deepEqual(memoryOf(lower), [flat, d1]);
  assert.deepEqual(memoryOf(same), [flat, merged]);
  assert.deepEqual(memoryOf(above), [flat, merged, d3]);
  assert.deepEqual(memoryOf(aside), [flat, other, d2]);
  const run = newRunId();
  state.runs.insert({ id: run, purpose: "spare", maps: flat.id, createdAt: 1 });
  assert.equal(state.runs.get(run)?.maps, flat.id);
  for (const s of [lower, same, above, aside]) state.snapshots.remove(s.id);
  assert.ok(!state.memory.unused().some((m) => m.id === flat.id));
  state.runs.remove(run);
  assert.ok(state.memory.unused().some((m) => m.id === flat.id));
});

test("a layer of a running disk is in use until the run's next capture or its end", () => {
  using state = State.open(fresh());
  const [id, s, layer] = [newRunId(), snapshot(), newLayerId()];
  state.runs.insert({ id, purpose: "sandbox", createdAt: 1 });
  state.layers.add({ id: layer, path: "/x", bytes: 1, createdAt: 1 });
  state.runs.addLayer(id, layer);
  assert.deepEqual(state.runs.layers(id), [layer]);
  assert.deepEqual(state.layers.unused(), []);
  state.snapshots.add(s);
  state.runs.captured(id, s.id);
  assert.equal(state.runs.get(id)?.snapshot, s.id);
  assert.deepEqual(state.runs.layers(id), []);
  assert.equal(state.layers.unused()[0]?.id, layer);
  state.runs.addLayer(id, layer);
  state.runs.remove(id);
  assert.equal(state.layers.unused()[0]?.id, layer);
});

test("a saved snapshot is found by id and name; its name goes over to the next that takes it", () => {
  using state = State.open(fresh());
  const name = { team: DEFAULT_TEAM, alias: "work", tag: "v1" };
  const save = (at: number) => {
    const s = snapshot();
    state.snapshots.add(s);
    const record = {
      id: newTemplateId(),
      snapshot: s.id,
      sandbox: newSandboxId("tst"),
      template: newTemplateId(),
      team: DEFAULT_TEAM,
      createdAt: at,
      spawnCount: 0,
      names: [name],
    };
    state.saved.put(record);
    return record;
  };
  const first = save(1);
  assert.deepEqual(state.saved.byName(name), first);
  assert.deepEqual(state.saved.bySnapshot(first.snapshot), first);
  assert.deepEqual(state.snapshots.unused(), []);
  const second = save(2);
  assert.equal(state.saved.byName(name)?.id, second.id);
  assert.deepEqual(state.saved.get(first.id)?.names, []);
  assert.deepEqual(
    state.saved.list().map((s) => s.id),
    [second.id, first.id],
  );
  state.saved.countSpawn(second.id, 9);
  assert.equal(state.saved.get(second.id)?.spawnCount, 1);
  assert.equal(state.saved.remove(first.id), true);
  assert.equal(state.saved.remove(first.id), false);
  assert.equal(state.snapshots.unused()[0]?.id, first.snapshot);
});

test("a checkpoint keeps its snapshot until it goes with its sandbox", () => {
  using state = State.open(fresh());
  const s = snapshot();
  state.snapshots.add(s);
  const c = { id: newCheckpointId(), sandbox: newSandboxId("tst"), snapshot: s.id, name: "start", createdAt: 1 };
  state.checkpoints.add(c);
  assert.deepEqual(state.checkpoints.of(c.sandbox), [c]);
  assert.deepEqual(state.checkpoints.get(c.id), c);
  assert.deepEqual(state.snapshots.unused(), []);
  state.checkpoints.removeOf(c.sandbox);
  assert.equal(state.snapshots.unused()[0]?.id, s.id);
});

test("a template is found by id, name, alias and snapshot, and a second build keeps its identity", () => {
  using state = State.open(fresh());
  const [first, second] = [snapshot(), snapshot()];
  state.snapshots.add(first);
  state.snapshots.add(second);
  const t = {
    id: newTemplateId(),
    team: DEFAULT_TEAM,
    name: "base",
    public: true,
    createdAt: 1,
    updatedAt: 1,
    spawnCount: 0,
    buildCount: 1,
  };
  state.templates.put({ ...t, snapshot: first.id });
  state.templates.addAlias("default", t.id);
  state.templates.countSpawn(t.id, 7);
  state.templates.put({ ...t, snapshot: second.id, updatedAt: 9, buildCount: 2 });
  const got = state.templates.byAlias("default");
  assert.equal(got?.snapshot, second.id);
  assert.equal(got.spawnCount, 1);
  assert.equal(state.templates.byAlias("base")?.id, t.id);
  assert.equal(state.templates.bySnapshot(second.id)?.id, t.id);
  assert.throws(() => state.templates.addAlias("default", newTemplateId()), isCode("CONFLICT"));
  assert.equal(state.templates.remove(t.id), true);
  assert.equal(state.templates.byAlias("default"), undefined);
});

test("the first cause of a sandbox's end stands", () => {
  using state = State.open(fresh());
  const box = sandbox();
  state.sandboxes.insert(box);
  assert.deepEqual(state.sandboxes.live(), [box]);
  state.sandboxes.setCause(box.id, "guest-panic");
  state.sandboxes.end(box.id, 5, "killed");
  assert.equal(state.sandboxes.get(box.id)?.cause, "guest-panic");
  assert.deepEqual(state.sandboxes.live(), []);
});

test("how requests reach a sandbox is kept, also when its egress rules change", () => {
  using state = State.open(fresh());
  const box = sandbox({ ingress: { maskRequestHost: "localhost:${PORT}", httpsPorts: [8443] }, network: {} });
  state.sandboxes.insert(box);
  state.sandboxes.setNetwork(box.id, null, { denyOut: ["1.1.1.1"] });
  assert.deepEqual(state.sandboxes.get(box.id)?.ingress, box.ingress);
});

test("the egress rules of a sandbox are kept as they were last set", () => {
  using state = State.open(fresh());
  const [plain, ruled] = [sandbox(), sandbox({ network: { denyOut: ["1.1.1.1"] } })];
  state.sandboxes.insert(plain);
  state.sandboxes.insert(ruled);
  assert.deepEqual(state.sandboxes.get(ruled.id), ruled);
  state.sandboxes.setNetwork(plain.id, false, { allowOut: ["example.com"] });
  state.sandboxes.setNetwork(ruled.id, null, {});
  const of = (id: SandboxRecord["id"]): unknown[] => {
    const { allowInternetAccess, network } = state.sandboxes.get(id) ?? {};
    return [allowInternetAccess, network];
  };
  assert.deepEqual(of(plain.id), [false, { allowOut: ["example.com"] }]);
  assert.deepEqual(of(ruled.id), [null, {}]);
});

test("a spare is assigned to one sandbox only", () => {
  using state = State.open(fresh());
  const id = newRunId();
  state.runs.insert({ id, purpose: "spare", createdAt: 1 });
  const box = newSandboxId("tst");
  state.runs.assign(id, box);
  assert.equal(state.runs.get(id)?.sandbox, box);
  assert.throws(() => state.runs.assign(id, newSandboxId("tst")), isCode("INTERNAL"));
});

test("a transaction that throws leaves nothing", () => {
  using state = State.open(fresh());
  const box = sandbox();
  assert.throws(() =>
    state.tx(() => {
      state.sandboxes.insert(box);
      throw new Error("stop");
    }),
  );
  assert.equal(state.sandboxes.get(box.id), undefined);
});

test("what one connection wrote another one reads, and a reopened file holds all of it", () => {
  const path = fresh();
  using state = State.open(path);
  const id = newRunId();
  state.runs.insert({ id, purpose: "build", handle: { v: 1, pid: 5 }, createdAt: 1 });
  state.resources.intent(id, "disk", "d");
  using other = State.open(path);
  assert.deepEqual(other.runs.list(), [{ id, purpose: "build", handle: { v: 1, pid: 5 }, createdAt: 1 }]);
  assert.equal(other.resources.of(id)[0]?.phase, "intent");
  other.resources.held(id, "disk", "d");
  assert.equal(state.resources.of(id)[0]?.phase, "held");
  state.resources.released(id, "disk");
  assert.deepEqual(other.resources.list(), []);
});

test("samples are bounded by age and by number", () => {
  using state = State.open(fresh());
  const box = newSandboxId("tst");
  const zero = { cpuCount: 1, cpuUsedPct: 0, memUsed: 0, memTotal: 0, memCache: 0, diskUsed: 0, diskTotal: 0 };
  for (let at = 0; at < 20; at++) state.samples.add(box, { timestamp: at, ...zero });
  assert.equal(state.samples.range(box, 5, 9, 100).length, 5);
  assert.equal(state.samples.prune(4, 10, 100), 10);
  assert.deepEqual(
    state.samples.range(box, 0, 99, 100).map((s) => s.timestamp),
    [10, 11, 12, 13, 14, 15, 16, 17, 18, 19],
  );
});

const FIXTURES = join(import.meta.dirname, "../test/fixtures");

for (const version of [1, 2, 3, 4, 5, 6, 7, 8])
  test(`a database of schema ${version} opens, keeps all it had, and takes what is new`, async () => {
    const path = fresh();
    await copyFile(join(FIXTURES, `v${version}.db`), path);
    using state = State.open(path);
    const key = state.keys.verify(`e2b_${"ab".repeat(20)}`);
    assert.equal(key?.name, "first");
    const template = state.templates.byAlias("python");
    assert.equal(template?.name, "base");
    assert.equal(template.spawnCount, 4);
    const old = state.snapshots.get(template.snapshot);
    assert.equal(old?.cause, "build");
    assert.equal(old.sandbox, undefined);
    assert.deepEqual(
      old.layers.map((l) => l.bytes),
      [123, 45],
    );
    assert.equal(old.memory.length, 1);
    assert.equal(old.memory[0]?.kind, "flat");
    assert.ok(old.memory[0].path.startsWith("/"));
    const [box] = state.sandboxes.live();
    assert.equal(box?.pauseMemory, true);
    assert.equal(box.timeoutMs, 0);
    assert.deepEqual(box?.metadata, { a: "b" });
    assert.equal(state.runs.get(box.run as never)?.sandbox, box.id);
    assert.ok(
      state.runs
        .list()
        .every((r) => r.snapshot === undefined || r.maps === state.snapshots.get(r.snapshot)?.memory[0]?.id),
    );
    assert.equal(state.resources.list()[0]?.name, "3");
    assert.equal(state.events.list(box.id, 0, 10).length, 1);
    const added = snapshot();
    state.snapshots.add(added);
    assert.deepEqual(state.snapshots.get(added.id), added);
  });

test("there is a recorded database of every released schema but the newest", async () => {
  const recorded = (await readdir(FIXTURES)).toSorted();
  assert.deepEqual(
    recorded,
    MIGRATIONS.slice(1).map((_, n) => `v${n + 1}.db`),
  );
});

test("a damaged database is refused with its name and what to do, wherever the damage is", async () => {
  const good = fresh();
  {
    using state = State.open(good);
    for (let i = 0; i < 200; i++) state.sandboxes.insert(sandbox());
  }
  const whole = await readFile(good);
  const pages = whole.length / 4096;
  const damage: Record<string, (b: Buffer) => Buffer> = {
    "no database": (b) => b.fill("not a database", 0, 4096),
    "a page in the middle": (b) => b.fill(0xa5, Math.floor(pages / 2) * 4096, (Math.floor(pages / 2) + 1) * 4096),
    "its second half is missing": (b) => b.subarray(0, Math.ceil(pages / 2) * 4096),
  };
  for (const [what, hurt] of Object.entries(damage)) {
    const path = fresh();
    await writeFile(path, hurt(Buffer.from(whole)));
    assert.throws(
      () => State.open(path),
      (e) => e instanceof AenvError && e.code === "CORRUPT" && e.message.includes(path) && e.hint.includes("--purge"),
      what,
    );
  }
});

test("a database of a newer version is refused and left as it is", () => {
  const path = fresh();
  State.open(path).close();
  const raw = new DatabaseSync(path);
  raw.exec("PRAGMA user_version = 999");
  raw.close();
  assert.throws(() => State.open(path), isCode("UNAVAILABLE"));
  const again = new DatabaseSync(path);
  assert.equal(again.prepare("PRAGMA user_version").get()?.["user_version"], 999);
  again.close();
});

function isCode(code: string) {
  return (e: unknown): boolean => e instanceof AenvError && e.code === code;
}

test("events are paged in both directions, by time, number, level and a part of their message", () => {
  using state = State.open(fresh());
  const [box, other] = [newSandboxId("tst"), newSandboxId("tst")];
  const add = (at: number, level: "debug" | "info" | "error", message: string): void =>
    state.tx(() => state.events.add(box, { timestamp: at, level, message, fields: { at } }));
  add(10, "info", "one");
  add(20, "debug", "two 100%_");
  add(20, "error", "Three");
  state.tx(() => state.events.add(other, { timestamp: 20, level: "info", message: "not ours", fields: {} }));
  add(30, "info", "four");
  const of = (q: Partial<EventQuery>): string[] =>
    state.events.page(box, { limit: 10, ...q }).map((e) => e.message.split(" ")[0] as string);
  assert.deepEqual(of({}), ["one", "two", "Three", "four"]);
  assert.deepEqual(of({ backward: true }), ["four", "Three", "two", "one"]);
  assert.deepEqual(of({ cursor: 20 }), ["two", "Three", "four"]);
  assert.deepEqual(of({ cursor: 20, backward: true }), ["Three", "two", "one"]);
  assert.deepEqual(of({ levels: ["info", "error"] }), ["one", "Three", "four"]);
  assert.deepEqual(of({ search: "o" }), ["one", "two", "four"]);
  assert.deepEqual(of({ search: "%_" }), ["two"]);
  assert.deepEqual(of({ search: "three" }), []);
  for (const backward of [false, true]) {
    const seen: string[] = [];
    for (let after: number | undefined; ; ) {
      const page = state.events.page(box, { limit: 1, backward, ...(after === undefined ? {} : { after }) });
      if (page.length === 0) break;
      seen.push(...page.map((e) => e.message));
      after = page.at(-1)?.id;
    }
    assert.deepEqual(seen, backward ? ["four", "Three", "two 100%_", "one"] : ["one", "two 100%_", "Three", "four"]);
  }
});

test("a team's sandboxes are counted in each step of time, and those that started", () => {
  using state = State.open(fresh());
  const made = [5_000, 6_000, 21_000].map((startedAt) => sandbox({ startedAt }));
  const foreign = sandbox({ startedAt: 5_000, team: "another" });
  for (const s of [...made, foreign]) state.sandboxes.insert(s);
  const sample = { cpuCount: 1, cpuUsedPct: 0, memUsed: 0, memTotal: 0, memCache: 0, diskUsed: 0, diskTotal: 0 };
  for (const at of [7_000, 9_000, 11_000])
    for (const s of [made[0], foreign]) if (s) state.tx(() => state.samples.add(s.id, { timestamp: at, ...sample }));
  assert.deepEqual(state.samples.perTeam(DEFAULT_TEAM, 0, 100_000, 10_000), [
    { at: 0, running: 2, started: 2 },
    { at: 10_000, running: 1, started: 0 },
    { at: 20_000, running: 1, started: 1 },
  ]);
  assert.deepEqual(state.samples.perTeam(DEFAULT_TEAM, 8_000, 9_000, 10_000), [{ at: 0, running: 1, started: 0 }]);
});
