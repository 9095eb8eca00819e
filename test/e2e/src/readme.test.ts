/** What README.md and docs/states.md show is run as it is written there. */
import assert from "node:assert/strict";
import { spawn } from "node:child_process";
import { mkdtemp, readFile, rm, symlink, writeFile } from "node:fs/promises";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { test } from "node:test";
import { Sandbox } from "e2b";
import { apiKey, clientEnv, connection, home, sandboxFor } from "./node.ts";

const LIMIT = { timeout: 240_000 };
const root = join(import.meta.dirname, "../../..");
const python = process.env["AENV_TEST_PYTHON"] ?? "python3";

const blocksOf = async (document: string): Promise<string[]> =>
  [...(await readFile(join(root, document), "utf8")).matchAll(/^```\w*\n([^]*?)^```$/gm)].map((m) => m[1] ?? "");
const readme = await blocksOf("README.md");
const states = await blocksOf("docs/states.md");

function start(
  cmd: string,
  args: readonly string[],
  cwd: string,
): Promise<{ code: number; text: string; stdout: string }> {
  const env = {
    ...clientEnv,
    PATH: `${join(root, "bin")}:${clientEnv["PATH"]}`,
    AENV_HOME: home,
    AENV_API_KEY: apiKey,
  };
  const child = spawn(cmd, args, { cwd, env, stdio: ["ignore", "pipe", "pipe"] });
  let text = "";
  let stdout = "";
  child.stdout.on("data", (d: Buffer) => ((text += d.toString()), (stdout += d.toString())));
  child.stderr.on("data", (d: Buffer) => (text += d.toString()));
  return new Promise((resolve, reject) => {
    child.on("error", reject).on("close", (code) => resolve({ code: code ?? -1, text, stdout }));
  });
}

for (const [file, expected] of [
  ["demo.py", /^42\n\nhi\n$/],
  ["demo.mjs", /^Linux /],
  ["states.py", /^0 prepared\n1 prepared\n2 prepared\n3 prepared\nprepared\n$/],
  ["states.mjs", /^prepared\n\n(i[a-z0-9]+ prepared\n\n){2}$/],
] as const)
  test(`${file} of the README runs`, LIMIT, async (t) => {
    const program = readme.find((b) => b.startsWith(`# ${file}:`) || b.startsWith(`// ${file}:`));
    assert.ok(program !== undefined, `the README has ${file}`);
    const dir = await mkdtemp(join(tmpdir(), "aenv-readme-"));
    t.after(() => rm(dir, { recursive: true }));
    await symlink(join(root, "node_modules"), join(dir, "node_modules"));
    await writeFile(join(dir, file), program);
    const run = await start(file.endsWith(".py") ? python : process.execPath, [file], dir);
    assert.equal(run.code, 0, run.text);
    assert.match(run.stdout, expected);
  });

test("the commands of the README for states do what they say", LIMIT, async (t) => {
  const block = readme.find((b) => b.includes("aenv pause ID"));
  assert.ok(block !== undefined);
  const sandbox = await sandboxFor(t);
  const made: string[] = [];
  t.after(() => Promise.all(made.map((id) => Sandbox.kill(id, connection))));
  t.after(() => Sandbox.deleteSnapshot("prepared", connection));
  for (const line of block.trimEnd().split("\n")) {
    assert.match(line, /^\$ aenv /);
    const run = await start("sh", ["-c", line.slice(2).replaceAll(/\bID\b/g, sandbox.sandboxId)], tmpdir());
    assert.equal(run.code, 0, `${line}\n${run.text}`);
    for (const [id] of run.stdout.matchAll(/\bi[a-z0-9]{19}\b/g)) if (id !== sandbox.sandboxId) made.push(id);
    if (line.includes("fork")) assert.equal(made.length, 4, run.stdout);
    if (line.includes("lineage")) assert.match(run.stdout, /prepared/);
  }
});

test("the hook of docs/states.md is set up as shown and runs in each child of a fork", LIMIT, async (t) => {
  const block = states.find((b) => b.includes("post-fork.d/10-seed"));
  assert.ok(block !== undefined);
  const sandbox = await sandboxFor(t);
  const run = await start("sh", ["-c", block.replace(/^\$ /, "").replaceAll(/\bID\b/g, sandbox.sandboxId)], tmpdir());
  assert.equal(run.code, 0, run.text);
  const seeds = await Promise.all(
    (await sandbox.fork({ count: 2 })).map(async (child) => {
      if (child instanceof Error) throw child;
      t.after(() => child.kill());
      return await child.files.read("/run/seed");
    }),
  );
  for (const seed of seeds) assert.match(seed, /^\d+\n$/);
  assert.equal(new Set(seeds).size, 2);
});
