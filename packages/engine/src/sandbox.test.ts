import assert from "node:assert/strict";
import { test } from "node:test";
import { AenvError, newRunId, newSandboxId, newSnapshotId, newTemplateId, silentLogger, TaskGroup } from "@aenv/base";
import { DEFAULT_TEAM, type SandboxRecord, SANDBOX_STATES, State } from "@aenv/state";
import type { VmExit } from "@aenv/vmm";
import type { Context } from "./context.ts";
import type { VmRun } from "./run.ts";
import { MOVES, Sandbox } from "./sandbox.ts";
import { ManualClock } from "./testing.ts";

const clock = new ManualClock();

function setUp() {
  const state = State.open(":memory:", clock);
  const tasks = new TaskGroup(() => {});
  const ctx = { state, clock, logger: silentLogger, tasks } as unknown as Context;
  const template = newTemplateId();
  const snapshot = newSnapshotId();
  const record: SandboxRecord = {
    id: newSandboxId("tst"),
    team: DEFAULT_TEAM,
    template,
    snapshot,
    state: "creating",
    startedAt: 0,
    endAt: 0,
    metadata: {},
    envVars: {},
    secure: true,
    onTimeout: "kill",
    pauseMemory: true,
    autoResume: false,
    interrupted: false,
    timeoutMs: 60_000,
    allowInternetAccess: null,
    allowPublicTraffic: true,
  };
  const ended: string[] = [];
  const source = { record, template: { id: template, name: "t" }, snapshot: { id: snapshot } };
  const flight = { abort: new AbortController(), done: Promise.resolve() };
  const sandbox = Sandbox.creating(ctx, source as never, flight, {
    runEnded: (run) => ended.push(run.id),
    gone: () => {},
  });
  return { state, sandbox, ended };
}

function fakeRun() {
  const exit = Promise.withResolvers<VmExit>();
  const killed = Promise.withResolvers<void>();
  const calls: string[] = [];
  const run = {
    id: newRunId(),
    vm: { exited: exit.promise },
    consoleTail: async () => "",
    killVm: async () => {
      calls.push("kill");
      await killed.promise;
    },
    release: async () => void calls.push("release"),
  } as unknown as VmRun;
  return { run, exit, killed, calls };
}

const isInternal = (e: unknown): boolean => e instanceof AenvError && e.code === "INTERNAL";

test("the table has a row for every state, names only states, and gone is the end of all", () => {
  assert.deepEqual(Object.keys(MOVES).toSorted(), SANDBOX_STATES.toSorted());
  for (const [from, to] of Object.entries(MOVES)) {
    assert.ok(!to.some((s) => s === from), `${from} does not lead to itself`);
    assert.equal(new Set(to).size, to.length);
  }
  const reach = (from: (typeof SANDBOX_STATES)[number], seen: Set<string>): Set<string> => {
    for (const s of MOVES[from])
      if (!seen.has(s)) {
        seen.add(s);
        reach(s, seen);
      }
    return seen;
  };
  assert.deepEqual(MOVES.gone, []);
  for (const s of SANDBOX_STATES) if (s !== "gone") assert.ok(reach(s, new Set()).has("gone"), `${s} can end`);
  assert.equal(reach("creating", new Set()).size, SANDBOX_STATES.length - 1, "every other state is reached");
});

test("an illegal move throws and changes nothing, in memory or in the database", () => {
  const { state, sandbox } = setUp();
  const { run } = fakeRun();
  sandbox.failed(new Error("no"));
  assert.throws(() => sandbox.launched(run, 1, 2), isInternal);
  assert.throws(() => sandbox.failed(new Error("again")), isInternal);
  assert.equal(sandbox.state, "gone");
  assert.equal(state.sandboxes.get(sandbox.id)?.state, "gone");
  assert.equal(state.sandboxes.get(sandbox.id)?.cause, "create-failed: no");
});

test("what fails inside a move leaves the state before", () => {
  const { state, sandbox } = setUp();
  assert.throws(() =>
    sandbox.launched(fakeRun().run, 1, 2, () => {
      throw new Error("the disk is full");
    }),
  );
  assert.equal(sandbox.state, "creating");
  assert.equal(state.sandboxes.get(sandbox.id)?.state, "creating");
  assert.deepEqual(state.events.list(sandbox.id, 0, 10), []);
});

test("of many kills at once one kills, and the others wait until it is done", async () => {
  const { sandbox, ended } = setUp();
  const { run, killed, calls } = fakeRun();
  sandbox.launched(run, 1, 2);
  const kills = [sandbox.kill("killed"), sandbox.kill("expired"), sandbox.kill("killed")];
  assert.equal(sandbox.state, "killing");
  assert.equal(sandbox.run, undefined);
  killed.resolve();
  assert.deepEqual(await Promise.all(kills), [true, false, false]);
  assert.deepEqual(calls, ["kill", "release"]);
  assert.deepEqual(ended, [run.id]);
});

test("the exit of a VM that is being killed is not a second end", async () => {
  const { state, sandbox, ended } = setUp();
  const { run, exit, killed } = fakeRun();
  sandbox.launched(run, 1, 2);
  const kill = sandbox.kill("killed");
  exit.resolve({ cause: "vmm-crash", detail: "" });
  await exit.promise;
  killed.resolve();
  assert.equal(await kill, true);
  assert.equal(state.sandboxes.get(sandbox.id)?.cause, "killed");
  assert.equal(ended.length, 1);
});

test("a VM that exits by itself ends its sandbox once", async () => {
  const { state, sandbox, ended } = setUp();
  const { run, exit, calls } = fakeRun();
  sandbox.launched(run, 1, 2);
  exit.resolve({ cause: "guest-shutdown", detail: "poweroff" });
  await exit.promise;
  assert.equal(sandbox.state, "gone");
  assert.equal(await sandbox.kill("killed"), false);
  assert.equal(state.sandboxes.get(sandbox.id)?.cause, "guest-shutdown");
  assert.deepEqual(ended, [run.id]);
  assert.ok(!calls.includes("kill"));
});
