import assert from "node:assert/strict";
import { spawn } from "node:child_process";
import { randomBytes } from "node:crypto";
import { once } from "node:events";
import { mkdir, mkdtemp, readFile, rm, writeFile } from "node:fs/promises";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { test } from "node:test";
import { Cgroups, parseCgroupMounts } from "./cgroups.ts";

test("hybrid hosts count as version 1, pure ones as version 2", () => {
  const v1 =
    "cgroup /sys/fs/cgroup/memory cgroup rw,memory 0 0\ncgroup /sys/fs/cgroup/cpu,cpuacct cgroup rw,cpu,cpuacct 0 0\n";
  const v2 = "cgroup2 /sys/fs/cgroup/unified cgroup2 rw 0 0\n";
  assert.deepEqual(parseCgroupMounts(v2 + v1), {
    version: 1,
    roots: {
      memory: "/sys/fs/cgroup/memory",
      cpu: "/sys/fs/cgroup/cpu,cpuacct",
      cpuacct: "/sys/fs/cgroup/cpu,cpuacct",
    },
  });
  assert.deepEqual(parseCgroupMounts(v2), { version: 2, root: "/sys/fs/cgroup/unified" });
  assert.equal(parseCgroupMounts("proc /proc proc rw 0 0\n"), undefined);
  assert.deepEqual(new Cgroups(parseCgroupMounts(v1)).missing, ["pids"]);
});

test("a group holds, counts, bounds and ends a process", async (t) => {
  const cgroups = new Cgroups();
  const top = `aenv-t${randomBytes(4).toString("hex")}`;
  const name = `${top}/one`;
  t.after(() => cgroups.remove(top));
  await cgroups.create(name, { memoryBytes: 64 * 1024 * 1024, cpuWeight: 50, pids: 8 });
  await cgroups.create(name, { memoryBytes: 64 * 1024 * 1024 });
  const script = 'for f in "$@"; do echo $$ > "$f"; done; echo in; exec sleep 1000';
  const child = spawn("/bin/sh", ["-c", script, "sh", ...cgroups.procsFiles(name)], {
    stdio: ["ignore", "pipe", "inherit"],
  });
  t.after(() => child.kill("SIGKILL"));
  await once(child.stdout, "data");
  assert.deepEqual(await cgroups.pids(name), [child.pid]);
  assert.ok((await cgroups.stats(name)).memoryBytes < 64 * 1024 * 1024);
  assert.deepEqual(await cgroups.list(top), [name]);
  assert.deepEqual(await cgroups.list(`${top.slice(0, -1)}*`), [top]);
  const exited = once(child, "exit");
  await cgroups.kill(name);
  assert.deepEqual(await exited, [null, "SIGKILL"]);
  await cgroups.remove(name);
  assert.deepEqual(await cgroups.list(top), []);
});

test("a process over its memory limit is killed and counted", async (t) => {
  const cgroups = new Cgroups();
  const name = `aenv-t${randomBytes(4).toString("hex")}`;
  t.after(() => cgroups.remove(name));
  await cgroups.create(name, { memoryBytes: 32 * 1024 * 1024 });
  const script = 'for f in "$@"; do echo $$ > "$f"; done; x=$(head -c 200000000 /dev/zero | tr "\\0" a); echo ${#x}';
  const child = spawn("/bin/sh", ["-c", script, "sh", ...cgroups.procsFiles(name)], { stdio: "ignore" });
  await once(child, "exit");
  assert.ok((await cgroups.stats(name)).oomKills > 0);
});

test("unknown groups: kill, remove and list find nothing to do; bad names are refused", async () => {
  const cgroups = new Cgroups();
  const name = `aenv-t${randomBytes(4).toString("hex")}/none`;
  await cgroups.kill(name);
  await cgroups.remove(name);
  assert.deepEqual(await cgroups.list(name), []);
  assert.deepEqual(await cgroups.stats(name), { memoryBytes: 0, cpuUsec: 0, oomKills: 0 });
  for (const bad of ["", "/", "../x", "a//b", "a/../b", "A b"]) await assert.rejects(cgroups.create(bad), /group name/);
});

test("on version 2 controllers are passed down and limits written to the group", async (t) => {
  const root = await mkdtemp(join(tmpdir(), "aenv-cg-"));
  t.after(() => rm(root, { recursive: true }));
  const cgroups = new Cgroups({ version: 2, root });
  const dir = join(root, "aenv-x/r1");
  await mkdir(dir, { recursive: true });
  for (const f of ["memory.max", "memory.oom.group", "cpu.weight", "pids.max"]) await writeFile(join(dir, f), "");
  await writeFile(join(dir, "memory.current"), "4096\n");
  await writeFile(join(dir, "cpu.stat"), "usage_usec 1234\nuser_usec 1\n");
  await writeFile(join(dir, "memory.events"), "low 0\noom 2\noom_kill 1\n");
  await cgroups.create("aenv-x/r1", { memoryBytes: 1048576, cpuWeight: 200, pids: 9 });
  assert.equal(await readFile(join(dir, "memory.max"), "utf8"), "1048576");
  assert.equal(await readFile(join(dir, "cpu.weight"), "utf8"), "200");
  assert.equal(await readFile(join(dir, "pids.max"), "utf8"), "9");
  assert.equal(await readFile(join(root, "aenv-x/cgroup.subtree_control"), "utf8"), "+pids");
  assert.deepEqual(await cgroups.stats("aenv-x/r1"), { memoryBytes: 4096, cpuUsec: 1234, oomKills: 1 });
  assert.deepEqual(cgroups.procsFiles("aenv-x/r1"), [`${dir}/cgroup.procs`]);
});
