/** What the state does when its disk takes no more: on a file system that is really full, and with an injected failure. */
import assert from "node:assert/strict";
import { mkdtempSync, rmSync, writeFileSync } from "node:fs";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { after, test } from "node:test";
import { AenvError, type Clock, newRunId, newSandboxId, newSnapshotId, newTemplateId, systemClock } from "@aenv/base";
import { FullableDisk } from "@aenv/host/testing";
import { DEFAULT_TEAM, type SandboxRecord, State } from "./index.ts";

const dir = mkdtempSync(join(tmpdir(), "aenv-full-"));
after(() => rmSync(dir, { recursive: true }));

const sandbox = (): SandboxRecord => ({
  id: newSandboxId("tst"),
  team: DEFAULT_TEAM,
  template: newTemplateId(),
  snapshot: newSnapshotId(),
  state: "creating",
  startedAt: 1,
  endAt: 2,
  timeoutMs: 1,
  metadata: {},
  envVars: {},
  secure: true,
  onTimeout: "kill",
  pauseMemory: true,
  autoResume: false,
  interrupted: false,
  allowInternetAccess: null,
  allowPublicTraffic: true,
});

const isNoSpace = (e: unknown): boolean => e instanceof AenvError && e.code === "NO_SPACE" && e.status === 507;

function timers(): { clock: Clock; fire: () => void } {
  let due: (() => void)[] = [];
  const after: Clock["after"] = (_ms, fn) => {
    due.push(fn);
    return () => (due = due.filter((d) => d !== fn));
  };
  return { clock: { ...systemClock, after }, fire: () => due.splice(0).forEach((fn) => fn()) };
}

/** A state whose disk is full while `full` is set. */
function failing(): { state: State; disk: { full: number }; fire: () => void } {
  const disk = { full: 0 };
  const { clock, fire } = timers();
  const beforeWrite = (): void => {
    if (disk.full > 0) throw Object.assign(new Error("database or disk is full"), { errcode: disk.full });
  };
  return { state: State.open(":memory:", clock, { beforeWrite }), disk, fire };
}

test("a write that the disk does not take says so, whatever sqlite calls it", () => {
  const { state, disk } = failing();
  const record = sandbox();
  for (const [code, status] of [
    [13, 507],
    [13 | (1 << 8), 507],
    [10 | (3 << 8), 503],
    [8, 503],
    [5, 503],
  ] as const) {
    disk.full = code;
    const is = (e: unknown): boolean => e instanceof AenvError && e.status === status && e.hint !== "";
    assert.throws(() => state.sandboxes.insert(record), is, String(code));
    assert.throws(() => state.tx(() => state.sandboxes.insert(record)), is, String(code));
    assert.throws(() => state.durable(() => state.sandboxes.insert(record)), is, String(code));
  }
  disk.full = 0;
  state.sandboxes.insert(record);
  assert.deepEqual(state.sandboxes.get(record.id)?.id, record.id);
});

test("what must hold is written later, in its order, before anything that came after it", () => {
  const { state, disk, fire } = failing();
  const [one, two] = [sandbox(), sandbox()];
  state.sandboxes.insert(one);
  disk.full = 13;
  let settled = 0;
  state.onSettled(() => settled++);
  state.surely(() => state.sandboxes.setState(one.id, "killing", undefined));
  state.surely(() => state.sandboxes.end(one.id, 7, "first"));
  fire();
  assert.deepEqual([state.late, settled], [2, 0]);
  assert.throws(() => state.sandboxes.insert(two), isNoSpace);
  disk.full = 0;
  state.sandboxes.insert(two);
  assert.equal(state.late, 0);
  assert.deepEqual([state.sandboxes.get(one.id)?.state, state.sandboxes.get(one.id)?.cause], ["gone", "first"]);
  fire();
  assert.equal(settled, 1);
});

test("what waits is tried again by itself, and once more when the state is closed", () => {
  const { state, disk, fire } = failing();
  const one = sandbox();
  state.sandboxes.insert(one);
  disk.full = 13;
  let settled = 0;
  state.onSettled(() => settled++);
  state.surely(() => state.sandboxes.end(one.id, 7, "later"));
  fire();
  disk.full = 0;
  fire();
  assert.deepEqual([state.late, settled, state.sandboxes.get(one.id)?.cause], [0, 1, "later"]);

  const path = join(dir, "closed.db");
  const file = { full: 0 };
  const beforeWrite = (): void => {
    if (file.full) throw Object.assign(new Error("full"), { errcode: 13 });
  };
  {
    using opened = State.open(path, timers().clock, { beforeWrite });
    opened.sandboxes.insert(one);
    file.full = 1;
    opened.surely(() => opened.sandboxes.end(one.id, 8, "at the close"));
    file.full = 0;
  }
  using again = State.open(path);
  assert.equal(again.sandboxes.get(one.id)?.cause, "at the close");
});

test("a change that is wrong in itself is not kept waiting and stands in nobody's way", () => {
  const { state, disk } = failing();
  assert.throws(
    () =>
      state.surely(() => {
        throw new Error("wrong");
      }),
    /wrong/,
  );
  disk.full = 13;
  state.surely(() => {
    throw new Error("wrong, later");
  });
  disk.full = 0;
  const one = sandbox();
  state.sandboxes.insert(one);
  assert.ok(state.sandboxes.get(one.id));
  assert.equal(state.late, 0);
});

test("a key is good though its use cannot be noted", () => {
  const { state, disk } = failing();
  const { key, record } = state.keys.create(DEFAULT_TEAM, "k");
  disk.full = 13;
  assert.equal(state.keys.verify(key)?.id, record.id);
});

test("on a full disk a node opens its state, and hundreds of sandboxes end and are recorded", async () => {
  await using disk = await FullableDisk.make(48);
  const path = join(disk.path, "state.db");
  const records = Array.from({ length: 300 }, sandbox);
  const runs = records.map(() => newRunId());
  const opened = State.open(path, systemClock, { room: true });
  for (const [i, r] of records.entries()) {
    opened.sandboxes.insert(r);
    opened.runs.insert({ id: runs[i] ?? newRunId(), purpose: "spare", createdAt: 1 });
  }
  const end = (state: State, from: number, to: number): void => {
    for (const [i, r] of records.slice(from, to).entries()) {
      state.surely(() => {
        state.sandboxes.end(r.id, 9, "expired");
        state.events.add(r.id, { timestamp: 1, level: "info", message: "sandbox ended", fields: { cause: "expired" } });
      });
      state.runs.remove(runs[from + i] ?? newRunId());
    }
  };
  disk.fill();
  end(opened, 0, 150);
  assert.equal(opened.late, 0);
  opened.close();
  // Whoever else writes on it takes what the close gave back.
  disk.fill();
  assert.throws(() => writeFileSync(join(disk.path, "x"), Buffer.alloc(65_536)), { code: "ENOSPC" });
  rmSync(join(disk.path, "x"), { force: true });
  using again = State.open(path, systemClock, { room: true });
  end(again, 150, 300);
  assert.equal(again.late, 0);
  assert.deepEqual(again.sandboxes.live(), []);
  assert.equal(again.sandboxes.get(records[299]?.id ?? newSandboxId("tst"))?.cause, "expired");
});
