import assert from "node:assert/strict";
import { mkdtempSync, readFileSync, rmSync, statSync, writeFileSync } from "node:fs";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { test } from "node:test";
import { newRunId } from "@aenv/base";
import { run } from "@aenv/host";
import { State } from "@aenv/state";
import { readConfig } from "./config.ts";
import { ensureFirstKey } from "./first-key.ts";
import { onlyServer } from "./only-one.ts";
import { Timings } from "./timings.ts";

const main = join(import.meta.dirname, "main.ts");

async function inFolder(fn: (home: string) => Promise<void>): Promise<void> {
  const home = mkdtempSync(join(tmpdir(), "aenv-start-"));
  try {
    await fn(home);
  } finally {
    rmSync(home, { recursive: true, force: true });
  }
}

test("only one server runs per instance, and the next may when it has ended", async () => {
  const name = newRunId();
  const first = await onlyServer(name);
  await assert.rejects(onlyServer(name), { code: "CONFLICT" });
  first[Symbol.dispose]();
  const second = await onlyServer(name);
  second[Symbol.dispose]();
});

test("the command line wins over the stored config, which stays", async () => {
  await inFolder(async (home) => {
    const made = await readConfig(["--home", home], {});
    assert.equal(made.port, 8000);
    assert.equal(made.domain, "localhost:8000");
    assert.match(made.runRoot, new RegExp(`aenv-${made.instance}$`));
    const other = await readConfig(["--home", home, "--port", "0", "--domain", "sb.test"], { AENV_ACCEL: "tcg" });
    assert.deepEqual([other.port, other.domain, other.accel], [0, "sb.test", "tcg"]);
    assert.equal(other.instance, made.instance);
    assert.equal((await readConfig([], { AENV_HOME: home })).port, 8000);
  });
});

test("values that are out of range are refused by name", async () => {
  await inFolder(async (home) => {
    for (const port of ["-1", "70000", "x", "1.5"])
      await assert.rejects(readConfig(["--home", home, `--port=${port}`], {}), /--port/);
    await assert.rejects(readConfig(["--home", home], { AENV_SLOTS: "0" }), /AENV_SLOTS/);
    const env = { AENV_EGRESS_OPEN: "10.1.0.0/16, 10.2.0.0/16", AENV_EGRESS_DENY: "" };
    assert.deepEqual((await readConfig(["--home", home], env)).egress, {
      open: ["10.1.0.0/16", "10.2.0.0/16"],
      deny: [],
    });
    await assert.rejects(readConfig(["--home", home], { AENV_ACCEL: "xen" }), /auto, kvm, tcg/);
    assert.equal((await readConfig(["--home", home], {})).forkLimit, 16);
    assert.equal((await readConfig(["--home", home], { AENV_FORK_LIMIT: "100" })).forkLimit, 100);
    await assert.rejects(readConfig(["--home", home], { AENV_FORK_LIMIT: "101" }), /AENV_FORK_LIMIT/);
    assert.equal((await readConfig(["--home", home], {})).poolMB, undefined);
    assert.equal((await readConfig(["--home", home], { AENV_POOL_MB: "0" })).poolMB, 0);
    await assert.rejects(readConfig(["--home", home], { AENV_POOL_MB: "-1" }), /AENV_POOL_MB/);
    await assert.rejects(readConfig(["--nonsense"], {}));
  });
});

test("the first key is made once, readable by the owner alone, and made again when it no longer works", async () => {
  await inFolder(async (home) => {
    using state = State.open(join(home, "state.db"));
    const path = join(home, "auth.json");
    const stored = (): string => (JSON.parse(readFileSync(path, "utf8")) as { apiKey: string }).apiKey;
    assert.equal(await ensureFirstKey(home, state), "made");
    assert.equal(statSync(path).mode & 0o777, 0o600);
    const key = stored();
    assert.ok(state.keys.verify(key));
    assert.equal(await ensureFirstKey(home, state), "kept");
    assert.equal(stored(), key);
    writeFileSync(path, "damaged");
    assert.equal(await ensureFirstKey(home, state), "made");
    assert.ok(state.keys.verify(stored()));
  });
});

test("timings keep the recent past by phase", () => {
  const t = new Timings();
  const one = { op: "create", sandboxId: "i1", source: "hot", startedAt: 0, marks: {}, counts: {} } as const;
  for (let i = 1; i <= 1000; i++) t.addOperation({ ...one, totalMs: i, phases: { init: i / 2 } });
  const rows = new Map(t.list().map((r) => [r.metric, r]));
  assert.deepEqual([...rows.keys()], ["create", "create.hot", "create.hot.init"]);
  assert.deepEqual(rows.get("create"), { metric: "create", unit: "ms", n: 1000, p50: 745, p95: 975, p99: 995 });
  const latest = t.operations(998);
  assert.deepEqual(
    latest.map((o) => [o.seq, o.totalMs]),
    [
      [999, 999],
      [1000, 1000],
    ],
  );
  assert.equal(t.operations(0).length, 256);
});

test("the server explains its options, and refuses others with a reason", { timeout: 60_000 }, async () => {
  const { stdout } = await run(process.execPath, [main, "--help"]);
  assert.match(stdout, /--port/);
  await inFolder(async (home) => {
    await assert.rejects(run(process.execPath, [main, "--home", home, "--port", "x"]), /--port must be a whole number/);
  });
});
