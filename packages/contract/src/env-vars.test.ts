import assert from "node:assert/strict";
import { spawnSync } from "node:child_process";
import { test } from "node:test";
import { NewSandbox } from "./schemas/sandboxes.ts";

const accepts = (envVars: Record<string, string>): boolean =>
  NewSandbox.safeParse({ templateID: "base", envVars }).success;

test("an environment is accepted exactly where the kernel starts programs with it", () => {
  const starts = (envVars: Record<string, string>): boolean => spawnSync("/bin/true", { env: envVars }).status === 0;
  for (const length of [1000, 131_068, 131_069, 131_070, 131_071, 300_000]) {
    const envVars = { A: "x".repeat(length) };
    assert.equal(accepts(envVars), starts(envVars), `${length}`);
  }
  assert.equal(accepts({ A: "ж".repeat(65_534) }), true, "bytes count, not characters");
  assert.equal(accepts({ A: "ж".repeat(65_536) }), false);
});

test("names and values that no program could be given are refused", () => {
  for (const envVars of [{ "": "x" }, { "A=B": "x" }, { A: "x\0y" }, { "A\0": "x" }])
    assert.equal(accepts(envVars as Record<string, string>), false, JSON.stringify(envVars));
  assert.equal(accepts({ A: "", "B-c.d": "=", ключ: "значение" }), true);
});
