import assert from "node:assert/strict";
import { existsSync } from "node:fs";
import { join } from "node:path";
import { test } from "node:test";
import { BENCH, benchPackages, TEST } from "./debian-packages.ts";
import { root } from "./node.ts";

test("a benchmark's packages are those of its name, of all for all, and the tests have them too", () => {
  for (const name of Object.keys(BENCH)) assert.ok(existsSync(join(root, `bench/src/${name}.ts`)), name);
  assert.deepEqual(benchPackages(["nbd", "--json"]), ["fio", "libnbd-bin", "qemu-utils"]);
  assert.deepEqual(benchPackages(["--brief", "exec"]), ["podman"]);
  assert.deepEqual(benchPackages(["all"]), [...new Set(Object.values(BENCH).flat())].toSorted());
  assert.deepEqual(benchPackages(["nothing"]), []);
  for (const name of benchPackages(["all"])) assert.ok(TEST.includes(name), name);
});
