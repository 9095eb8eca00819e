import assert from "node:assert/strict";
import { spawn } from "node:child_process";
import { join } from "node:path";
import { test } from "node:test";
import { startEnvd } from "./envd.ts";

const python = process.env["AENV_TEST_PYTHON"];

test("the Python SDK, synchronous and asynchronous, works with envd", {
  skip: python ? false : "AENV_TEST_PYTHON does not name a Python with the e2b package (npm test sets it)",
}, async () => {
  await using envd = await startEnvd();
  const child = spawn(python ?? "", ["-m", "unittest", "-v", "test_envd"], {
    cwd: join(import.meta.dirname, "../python"),
    env: {
      PATH: process.env["PATH"],
      HOME: "/nonexistent",
      PYTHONDONTWRITEBYTECODE: "1",
      E2B_DEBUG: "true",
      E2B_SANDBOX_URL: envd.url,
    },
  });
  let output = "";
  child.stdout.on("data", (d: Buffer) => (output += d.toString()));
  child.stderr.on("data", (d: Buffer) => (output += d.toString()));
  const code = await new Promise((resolve, reject) => child.on("close", resolve).on("error", reject));
  assert.equal(code, 0, output);
  assert.match(output, /Ran [1-9]\d* tests/);
});
