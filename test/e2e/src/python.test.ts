import assert from "node:assert/strict";
import { spawn } from "node:child_process";
import { join } from "node:path";
import { test } from "node:test";
import { clientEnv } from "./node.ts";

const python = process.env["AENV_TEST_PYTHON"] ?? "python3";

async function passes(suite: string): Promise<void> {
  const child = spawn(python, ["-m", "unittest", "-v", suite], {
    cwd: join(import.meta.dirname, "../python"),
    env: { ...clientEnv, PYTHONDONTWRITEBYTECODE: "1" },
  });
  let output = "";
  child.stdout.on("data", (d: Buffer) => (output += d.toString()));
  child.stderr.on("data", (d: Buffer) => (output += d.toString()));
  const code = await new Promise((resolve, reject) => child.on("close", resolve).on("error", reject));
  assert.equal(code, 0, output);
  assert.match(output, /Ran [1-9]\d* tests/);
}

for (const [what, suite] of [
  ["commands, files and life", "test_sdk"],
  ["states", "test_state"],
] as const)
  test(`the Python SDK's suite of ${what} passes, synchronous and asynchronous`, { timeout: 240_000 }, () =>
    passes(suite),
  );
