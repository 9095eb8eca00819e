import assert from "node:assert/strict";
import { spawn } from "node:child_process";
import { mkdtemp, readFile, rm, writeFile } from "node:fs/promises";
import { createRequire } from "node:module";
import { tmpdir } from "node:os";
import { dirname, join } from "node:path";
import { test } from "node:test";
import { clientEnv, sandboxFor } from "./node.ts";

const LIMIT = { timeout: 120_000 };
const repo = join(import.meta.dirname, "../../..");

interface Ended {
  code: number | null;
  stdout: string;
  stderr: string;
}

function start(cmd: string, args: readonly string[], input = ""): Promise<Ended> {
  return new Promise((resolve, reject) => {
    const child = spawn(cmd, args, { env: { ...clientEnv, HOME: tmpdir(), NO_UPDATE_NOTIFIER: "1", NO_COLOR: "1" } });
    let stdout = "";
    let stderr = "";
    child.stdout.on("data", (d: Buffer) => (stdout += d.toString()));
    child.stderr.on("data", (d: Buffer) => (stderr += d.toString()));
    child.on("error", reject);
    child.on("close", (code) => resolve({ code, stdout, stderr }));
    child.stdin.end(input);
  });
}

const manifest = createRequire(import.meta.url).resolve("@e2b/cli/package.json");
async function e2b(...args: string[]): Promise<Ended> {
  const { bin } = JSON.parse(await readFile(manifest, "utf8")) as { bin: Record<string, string> | string };
  const script = typeof bin === "string" ? bin : (bin["e2b"] ?? "");
  return start(process.execPath, [join(dirname(manifest), script), ...args]);
}
const aenv = (args: readonly string[], input?: string): Promise<Ended> => start(join(repo, "bin/aenv"), args, input);

test("the official CLI lists, describes, runs in and kills a sandbox", LIMIT, async (t) => {
  const sandbox = await sandboxFor(t, { metadata: { suite: "e2b-cli" } });
  const list = await e2b("sandbox", "list", "--format", "json");
  assert.equal(list.code, 0, list.stderr);
  assert.ok(list.stdout.includes(sandbox.sandboxId));
  const info = await e2b("sandbox", "info", sandbox.sandboxId);
  assert.equal(info.code, 0, info.stderr);
  assert.match(info.stdout, /base/);
  const exec = await e2b("sandbox", "exec", sandbox.sandboxId, "--", "sh", "-c", "echo from-the-guest; exit 4");
  assert.match(exec.stdout, /from-the-guest/);
  assert.equal(exec.code, 4, exec.stderr);
  const templates = await e2b("template", "list", "--format", "json");
  assert.equal(templates.code, 0, templates.stderr);
  assert.match(templates.stdout, /base/);
  const kill = await e2b("sandbox", "kill", sandbox.sandboxId);
  assert.equal(kill.code, 0, kill.stderr);
  assert.equal(await sandbox.isRunning(), false);
});

test("the official CLI pauses and resumes, and makes, lists and deletes snapshots", LIMIT, async (t) => {
  const sandbox = await sandboxFor(t);
  const ok = async (...args: string[]): Promise<string> => {
    const ended = await e2b("sandbox", ...args);
    assert.equal(ended.code, 0, `${args.join(" ")}: ${ended.stdout}${ended.stderr}`);
    return ended.stdout;
  };
  await ok("pause", sandbox.sandboxId);
  assert.equal(await sandbox.isRunning(), false);
  assert.ok((await ok("list", "--state", "paused", "--format", "json")).includes(sandbox.sandboxId));
  await ok("resume", sandbox.sandboxId);
  assert.equal((await sandbox.getInfo()).state, "running");
  const id = /[a-z0-9]+:default/.exec(await ok("snapshot", "create", sandbox.sandboxId))?.[0] ?? "";
  assert.ok((await ok("snapshot", "list", sandbox.sandboxId)).includes(id));
  await ok("snapshot", "delete", id);
  assert.ok(!(await ok("snapshot", "list", sandbox.sandboxId)).includes(id));
});

test("aenv starts, runs with input and exit code, copies both ways, lists and deletes", LIMIT, async (t) => {
  const folder = await mkdtemp(join(tmpdir(), "aenv-e2e-"));
  t.after(() => rm(folder, { recursive: true }));
  const started = await aenv(["start", "-d", "--json", "--timeout", "120"]);
  assert.equal(started.code, 0, started.stderr);
  const id = (JSON.parse(started.stdout) as { sandboxID: string }).sandboxID;
  t.after(() => aenv(["delete", id]));
  const exec = await aenv(["exec", id, "--", "sh", "-c", "tr a-z A-Z; exit 9"], "shout");
  assert.deepEqual([exec.code, exec.stdout], [9, "SHOUT"]);
  await writeFile(join(folder, "up.txt"), "carried");
  assert.equal((await aenv(["upload", id, join(folder, "up.txt"), "/home/user/there.txt"])).code, 0);
  const downloaded = await aenv(["download", id, "/home/user/there.txt", join(folder, "down.txt")]);
  assert.equal(downloaded.code, 0, downloaded.stderr);
  assert.equal(await readFile(join(folder, "down.txt"), "utf8"), "carried");
  const list = await aenv(["list", "--json"]);
  assert.ok(list.stdout.includes(id));
  assert.equal((await aenv(["info", id])).code, 0);
  assert.equal((await aenv(["delete", id])).code, 0);
  assert.notEqual((await aenv(["info", id])).code, 0);
});

test("aenv says what to do about a wrong command, a wrong id and a wrong key", LIMIT, async () => {
  const wrong = await aenv(["lisst"]);
  assert.notEqual(wrong.code, 0);
  assert.match(wrong.stderr, /list/);
  const unknown = await aenv(["exec", "iaaabbbbccccddddeee", "--", "true"]);
  assert.notEqual(unknown.code, 0);
  assert.match(unknown.stderr, /iaaabbbbccccddddeee/);
});
