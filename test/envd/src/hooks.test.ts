/** Hooks of a guest as the node calls them. */
import assert from "node:assert/strict";
import { mkdirSync, mkdtempSync, rmSync, writeFileSync } from "node:fs";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { test } from "node:test";
import { initBody, soon, startEnvd } from "./envd.ts";

test("init tells of hooks, and the node's call runs them with index, seed and the sandbox's environment", async (t) => {
  const dir = mkdtempSync(join(tmpdir(), "aenv-hooks-"));
  t.after(() => rmSync(dir, { recursive: true }));
  await using envd = await startEnvd(["--hooks", dir]);
  const { client } = envd;
  const init = { ...initBody, envVars: { GREETING: "hi" } };
  assert.deepEqual(await client.init({ ...init, cause: "fork", lifecycleID: "r1" }, soon()), { hooks: false });

  mkdirSync(join(dir, "post-fork.d"));
  const hook = (name: string, script: string): void =>
    writeFileSync(join(dir, "post-fork.d", name), `#!/bin/sh\n${script}\n`, { mode: 0o755 });
  hook("10-env", 'echo "$AENV_FORK_INDEX $AENV_SEED $GREETING $E2B_SANDBOX_ID"');
  hook("20-bad", "echo no >&2; exit 7");
  assert.deepEqual(await client.init({ ...init, cause: "fork", lifecycleID: "r2" }, soon()), { hooks: true });
  assert.deepEqual(await client.init({ ...init, cause: "resume", lifecycleID: "r3" }, soon()), { hooks: false });
  const request = { phase: "post-fork", cause: "fork", forkIndex: 2, seed: "77" } as const;
  const [good, bad] = await client.hooks(request, { answerMs: 30_000 }, soon());
  assert.deepEqual(good, { name: "10-env", exitCode: 0, output: "2 77 hi itest\n" });
  assert.equal(bad?.exitCode, 7);
  assert.equal(bad.output, "no\n");
  assert.deepEqual(await client.hooks({ phase: "pre-snapshot", cause: "pause" }, { answerMs: 30_000 }, soon()), []);
});

test("hooks want the token of the sandbox", async () => {
  await using envd = await startEnvd();
  await envd.client.init({ ...initBody, accessToken: "secret", lifecycleID: "r1" }, soon());
  const request = { phase: "pre-snapshot", cause: "pause" } as const;
  await assert.rejects(envd.client.hooks(request, { answerMs: 30_000 }, soon()), { code: "UNAUTHENTICATED" });
  assert.deepEqual(await envd.client.hooks(request, { answerMs: 30_000, token: "secret" }, soon()), []);
});
