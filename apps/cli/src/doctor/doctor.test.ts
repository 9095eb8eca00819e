import assert from "node:assert/strict";
import { mkdirSync, mkdtempSync, rmSync, writeFileSync } from "node:fs";
import { tmpdir } from "node:os";
import { dirname, join } from "node:path";
import test from "node:test";
import type { DoctorReport } from "@aenv/client";
import { judge } from "./judge.ts";
import { type HostThing, scanHost } from "./scan.ts";

const RUN = "rabcdefgh0123";
const OTHER = "rzzzzzzzz9999";

/** A host as a tree of files. */
function host(files: Record<string, string>): { root: string } & Disposable {
  const root = mkdtempSync(join(tmpdir(), "aenv-scan-"));
  for (const [path, text] of Object.entries(files)) {
    mkdirSync(join(root, dirname(path)), { recursive: true });
    writeFileSync(join(root, path), text);
  }
  return { root, [Symbol.dispose]: () => rmSync(root, { recursive: true, force: true }) };
}
const argv = (...words: string[]): string => words.map((w) => `${w}\0`).join("");

const FILES = {
  "proc/10/cmdline": argv("node", "/x/apps/server/src/main.ts", "--home", "/data"),
  "proc/11/cmdline": argv("node", "/x/apps/blockd/src/main.ts", "--socket", "/run/aenv-ab12/blockd.sock"),
  "proc/12/cmdline": argv("qemu-system-x86_64", "-qmp", `unix:/run/aenv-ab12/r/${RUN}/qmp.sock`),
  "proc/13/cmdline": argv("qemu-system-x86_64", "-qmp", `unix:/run/aenv-ab12/r/${OTHER}/qmp.sock`),
  "proc/14/cmdline": argv("vim", `/run/aenv-ab12/r/${OTHER}/note`),
  "proc/self/mountinfo":
    "36 35 98:0 / /data rw - ext4 a rw\n37 35 98:0 / /data/runs/left rw - ext4 a rw\n38 35 0:4 net:[1] /run/netns/aenv-ab12-0 rw - nsfs a rw\n",
  "run/netns/aenv-ab12-0": "",
  "run/netns/aenv-ab12-1": "",
  "run/netns/aenv-cd34-0": "",
  "run/netns/other": "",
  "sys/class/net/avab12-0": "",
  "sys/class/net/avab12-1": "",
  "sys/class/net/eth0": "",
  [`sys/fs/cgroup/aenv-ab12/${RUN}/procs`]: "",
  [`sys/fs/cgroup/memory/aenv-ab12/${OTHER}/procs`]: "",
  [`run/aenv-ab12/r/${RUN}/qmp.sock`]: "",
  "run/aenv-ab12/blockd.sock": "",
  // Working folders of tests and benchmarks, which belong to no node.
  "tmp/aenv-bench-1/file": "",
  "var/tmp/aenv-test/file": "",
};

const REPORT: DoctorReport = {
  ok: true,
  checks: [],
  resources: [
    { kind: "process", name: "12", owner: "sandbox iabc", detail: RUN },
    { kind: "slot", name: "aenv-ab12-0", owner: "sandbox iabc" },
    { kind: "cgroup", name: `aenv-ab12/${RUN}`, owner: "sandbox iabc" },
    { kind: "rundir", name: `/run/aenv-ab12/r/${RUN}`, owner: "sandbox iabc" },
  ],
};

const loose = (things: readonly HostThing[], report: DoctorReport | undefined): string[] =>
  judge(things, { home: "/data", instance: "ab12", report })
    .filter((j) => j.owner === null)
    .map((j) => `${j.kind} ${j.name}`)
    .toSorted();

test("everything with a name of ours is seen, once, and nothing else", async () => {
  using h = host(FILES);
  const { things } = await scanHost({ home: "/data", instance: "ab12", root: h.root });
  assert.deepEqual(
    things.map((t) => `${t.kind} ${t.name}`).toSorted(),
    [
      "cgroup aenv-ab12",
      `cgroup aenv-ab12/${RUN}`,
      `cgroup aenv-ab12/${OTHER}`,
      "interface avab12-0",
      "interface avab12-1",
      "mount /data/runs/left",
      "netns aenv-ab12-0",
      "netns aenv-ab12-1",
      "netns aenv-cd34-0",
      "process 10",
      "process 11",
      "process 12",
      "process 13",
      "run folder /run/aenv-ab12",
      `run folder /run/aenv-ab12/r/${RUN}`,
    ].toSorted(),
  );
  assert.equal(things.find((t) => t.name === "10")?.daemon, "server");
  assert.equal(things.find((t) => t.name === "10")?.instance, "ab12");
});

test("what the server does not know has no owner; what belongs to a known run has", async () => {
  using h = host(FILES);
  const { things } = await scanHost({ home: "/data", instance: "ab12", root: h.root });
  assert.deepEqual(
    loose(things, REPORT),
    [
      `cgroup aenv-ab12/${OTHER}`,
      "interface avab12-1",
      "mount /data/runs/left",
      "netns aenv-ab12-1",
      "netns aenv-cd34-0",
      "process 13",
    ].toSorted(),
  );
});

test("while the server is down only the leftovers of others are without an owner", async () => {
  using h = host(FILES);
  const { things } = await scanHost({ home: "/data", instance: "ab12", root: h.root });
  assert.deepEqual(loose(things, undefined), ["netns aenv-cd34-0"]);
});

test("another node's things belong to it while one of its processes lives", async () => {
  using h = host({
    ...FILES,
    "proc/20/cmdline": argv("node", "/y/apps/vmd/src/main.ts", "--socket", "/run/aenv-cd34/vmd.sock"),
  });
  const { things } = await scanHost({ home: "/data", instance: "ab12", root: h.root });
  assert.ok(!loose(things, REPORT).includes("netns aenv-cd34-0"));
});

test("a resource that the server itself finds without an owner is a finding", () => {
  const report = { ...REPORT, resources: [{ kind: "disk", name: OTHER, owner: null }] };
  assert.deepEqual(loose([], report), [`disk ${OTHER}`]);
});

test("data files are judged only where the server accounts for their kind", () => {
  const layer: HostThing = {
    kind: "file",
    name: "/data/layers/labcdefgh01234567",
    instance: "ab12",
    run: undefined,
    detail: "",
  };
  assert.deepEqual(loose([layer], REPORT), []);
  const known = { kind: "layer", name: "/data/layers/lzzzzzzzz01234567", owner: "template base" };
  assert.deepEqual(loose([layer], { ...REPORT, resources: [known] }), [`file ${layer.name}`]);
});

test("every finding says what to do", async () => {
  using h = host(FILES);
  const { things } = await scanHost({ home: "/data", instance: "ab12", root: h.root });
  for (const j of judge(things, { home: "/data", instance: "ab12", report: REPORT }))
    if (j.owner === null) assert.ok((j.fix ?? "").length > 10, `${j.kind} ${j.name}`);
});
