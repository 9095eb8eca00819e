import assert from "node:assert/strict";
import { mkdirSync, mkdtempSync, rmSync, writeFileSync } from "node:fs";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { test } from "node:test";
import { AenvError } from "@aenv/base";
import { checkDisk, ownerKey, reconcile, report, scanHost, templateCheck } from "./doctor.ts";

test("a resource that nobody claims is a leak, and the report says so", () => {
  const found = [
    { kind: "cgroup" as const, name: "aenv-0000/rb" },
    { kind: "cgroup" as const, name: "aenv-0000/ra" },
    { kind: "process" as const, name: "7", owner: "node (blockd)" },
  ];
  const resources = reconcile(found, new Map([[ownerKey("cgroup", "aenv-0000/ra"), "sandbox ia"]]));
  assert.deepEqual(resources, [
    { kind: "cgroup", name: "aenv-0000/ra", owner: "sandbox ia" },
    { kind: "cgroup", name: "aenv-0000/rb", owner: null },
    { kind: "process", name: "7", owner: "node (blockd)" },
  ]);
  const bad = report([], resources);
  assert.equal(bad.ok, false);
  assert.match(bad.checks[0]?.detail ?? "", /1 of 3/);
  assert.equal(
    report(
      [],
      resources.filter((r) => r.owner !== null),
    ).ok,
    true,
  );
});

test("a failed check makes the report not ok", () => {
  assert.equal(report([{ name: "x", ok: false, detail: "y" }], []).ok, false);
});

test("the host is searched for everything that bears the node's name", async () => {
  const home = mkdtempSync(join(tmpdir(), "aenv-doctor-"));
  try {
    const runRoot = join(home, "run");
    for (const dir of ["run/r/rx", "runs/rx", "snapshots/sx", "memory/mx", "layers/lx"])
      mkdirSync(join(home, dir), { recursive: true });
    const found = await scanHost({
      instance: "zzzz",
      home,
      runRoot,
      own: new Map([[process.pid, "server"]]),
      slots: () => [
        { state: "free", netns: "aenv-zzzz-0" },
        { state: "used", netns: "aenv-zzzz-1" },
        { state: "unclaimed", netns: "aenv-zzzz-2" },
      ],
      disks: () => Promise.resolve([{ disk: "rx" }]),
      cgroups: () => Promise.resolve(["aenv-zzzz/rx"]),
    });
    const rows = reconcile(found, new Map()).map((r) => `${r.kind} ${r.name.replace(home, "~")} ${r.owner}`);
    assert.deepEqual(rows, [
      "cgroup aenv-zzzz/rx null",
      "datadir ~/runs/rx null",
      "disk rx null",
      "layer ~/layers/lx null",
      "memory ~/memory/mx null",
      `process ${process.pid} node (server)`,
      "rundir ~/run/r/rx null",
      "slot aenv-zzzz-0 pool (free)",
      "slot aenv-zzzz-1 null",
      "slot aenv-zzzz-2 null",
      "snapshot ~/snapshots/sx null",
    ]);
  } finally {
    rmSync(home, { recursive: true });
  }
});

test("a missing data folder fails the check of its disk", async () => {
  assert.equal((await checkDisk("/no/such/folder")).ok, false);
  assert.match((await checkDisk("/")).detail, /GiB free/);
});

test("a node without any folder yet has no resources", async () => {
  const home = mkdtempSync(join(tmpdir(), "aenv-doctor-"));
  writeFileSync(join(home, "layers"), "not a folder");
  try {
    const nothing = { slots: () => [], disks: () => Promise.resolve([]), cgroups: () => Promise.resolve([]) };
    const host = { instance: "zzzz", home, runRoot: join(home, "run"), own: new Map<number, string>() };
    assert.deepEqual(await scanHost({ ...host, ...nothing }), []);
  } finally {
    rmSync(home, { recursive: true });
  }
});

test("a template that cannot be launched is a finding with the file and what to do", () => {
  const damage = new AenvError("CORRUPT", "/data/snapshots/s1/memory is missing");
  const base = templateCheck("base", damage);
  assert.deepEqual([base.ok, base.detail], [false, "/data/snapshots/s1/memory is missing"]);
  assert.match(base.fix ?? "", /npm run up/);
  assert.match(templateCheck("mine", damage).fix ?? "", /aenv template delete mine/);
  const passing = templateCheck("base", new AenvError("NO_SPACE", "the disk is full"));
  assert.equal(passing.name, "template base has spares");
  assert.match(passing.fix ?? "", /disk/);
});
