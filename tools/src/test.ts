/**
 * `npm test`: all set-up, the static checks, the tests of every package, then the end-to-end tests against a node of
 * their own in a temporary data folder. `npm test -- PATH…` runs only the test files below the given paths.
 */
import { spawn } from "node:child_process";
import { globSync } from "node:fs";
import { mkdtemp, readFile, rm, stat } from "node:fs/promises";
import { createServer } from "node:net";
import { tmpdir } from "node:os";
import { basename, join } from "node:path";
import { ensureS3Server } from "@aenv/block/testing";
import { publishFile, run } from "@aenv/host";
import { TEST } from "./debian-packages.ts";
import { down } from "./down.ts";
import { root, runningServer } from "./node.ts";
import { setupSteps } from "./setup.ts";
import { runSteps, type Step } from "./steps.ts";

/** Tests that need a running node. */
const E2E = ["test/e2e/", "test/soak/"];

interface Counts {
  passed: number;
  failed: number;
}
const total: Counts = { passed: 0, failed: 0 };

/** Ctrl-C ends the tests, never the clean-up after them. */
const interrupted = new AbortController();
for (const name of ["SIGINT", "SIGTERM", "SIGHUP"] as const)
  process.on(name, () => interrupted.abort(new Error(`interrupted by ${name}`)));

/** Runs a command with its output on the terminal; node's own test summaries in it are added to the total. */
function show(
  title: string,
  cmd: string,
  args: readonly string[],
  env: Record<string, string> = {},
  cwd = root,
): Promise<boolean> {
  if (interrupted.signal.aborted) return Promise.resolve(false);
  console.log(`\n=== ${title}`);
  return new Promise((resolve, reject) => {
    const child = spawn(cmd, args, { cwd, env: { ...process.env, ...env }, stdio: ["ignore", "pipe", "inherit"] });
    const end = (): boolean => child.kill("SIGTERM");
    interrupted.signal.addEventListener("abort", end, { once: true });
    let rest = "";
    child.stdout.on("data", (d: Buffer) => {
      process.stdout.write(d);
      const lines = (rest + d.toString()).split("\n");
      rest = lines.pop() ?? "";
      for (const line of lines) {
        const found = /^ℹ (pass|fail|cancelled) (\d+)$/.exec(line);
        if (found?.[1] === "pass") total.passed += Number(found[2]);
        else if (found) total.failed += Number(found[2]);
      }
    });
    child.on("error", reject);
    child.on("close", (code) => {
      interrupted.signal.removeEventListener("abort", end);
      resolve(code === 0);
    });
  });
}

/** `--test-timeout` ends a hung test; the longest test states its own. */
const NODE_TEST = ["--test", "--test-reporter=spec", "--test-timeout=600000"];

function testFiles(paths: readonly string[]): string[] {
  const all = globSync("{packages,apps,test,bench,tools}/**/*.test.ts", { cwd: root }).filter(
    (f) => !f.includes("node_modules"),
  );
  return paths.length === 0
    ? all.toSorted()
    : all.filter((f) => paths.some((p) => f.startsWith(p.replace(/^\.\//, "")))).toSorted();
}

function freePort(): Promise<number> {
  return new Promise((resolve, reject) => {
    const probe = createServer();
    probe.on("error", reject);
    probe.listen(0, "127.0.0.1", () => {
      const address = probe.address();
      probe.close(() => resolve(typeof address === "object" && address ? address.port : 0));
    });
  });
}

const venv = join(root, ".cache/python");
const pythonStep: Step = {
  name: "Python SDK",
  hint: "pip could not install the test's requirements: check the network.",
  run: async () => {
    const wanted = await readFile(join(root, "test/e2e/python/requirements.txt"), "utf8");
    const marker = join(venv, ".requirements");
    if ((await readFile(marker, "utf8").catch(() => "")) === wanted) return "already there";
    const env = { PATH: process.env["PATH"] ?? "", HOME: process.env["HOME"] ?? "/root" };
    await rm(venv, { recursive: true, force: true });
    await run("python3", ["-m", "venv", venv], { env });
    await run(join(venv, "bin/pip"), ["-q", "install", ...wanted.trim().split("\n")], { env });
    await publishFile(marker, wanted);
    return wanted.trim();
  },
};

const s3Step: Step = {
  name: "S3 server",
  hint: "The Go build of versitygw failed: see its output; the Go module proxy must be reachable.",
  run: async () => basename(await ensureS3Server()),
};

const files = testFiles(process.argv.slice(2));
if (files.length === 0) {
  console.error(`no test file below ${process.argv.slice(2).join(" ")}`);
  process.exit(2);
}
const e2e = files.filter((f) => E2E.some((dir) => f.startsWith(dir)));
const unit = files.filter((f) => !e2e.includes(f));
const whole = process.argv.length === 2;

const home = await mkdtemp(join(tmpdir(), "aenv-test-"));
let ok = true;
const must = (good: boolean): void => {
  ok &&= good;
};

const steps = setupSteps({ home, port: await freePort(), packages: TEST }, interrupted.signal);
// The node and its template are the last two steps: the tests of the packages need neither.
const nodeSteps = steps.splice(-2);
const prepared = await runSteps([...steps, pythonStep, s3Step]);
if (prepared) {
  const env = {
    AENV_TEST_HOME: home,
    AENV_TEST_PYTHON: join(venv, "bin/python"),
    AENV_TEST_CACHE: join(root, ".cache"),
  };
  if (whole) must(await show("static checks", process.execPath, ["tools/src/check.ts"]));
  if (unit.length > 0)
    must(await show("tests of the packages", process.execPath, [...NODE_TEST, "--test-concurrency=2", ...unit], env));
  if (whole) must(await show("tests of the guest binary", "go", ["test", "./..."], {}, join(root, "guest")));
  if (e2e.length > 0) {
    console.log("\n=== a node for the end-to-end tests");
    if (await runSteps(nodeSteps)) {
      const url = `http://127.0.0.1:${runningServer(home)?.port}`;
      must(
        await show("end-to-end tests", process.execPath, [...NODE_TEST, "--test-concurrency=1", ...e2e], {
          ...env,
          AENV_TEST_URL: url,
        }),
      );
      must(await show("aenv doctor", join(root, "bin/aenv"), ["doctor"], { AENV_HOME: home }));
    } else ok = false;
  }
} else ok = false;

const log = join(home, "log/server.log");
if (!ok && (await stat(log).catch(() => undefined))) {
  console.log(`\n=== end of ${log}`);
  console.log((await readFile(log, "utf8")).split("\n").slice(-60).join("\n"));
}
console.log("\n=== taking the node down");
must(await down(home, true));
await rm(home, { recursive: true, force: true });
console.log(`\n${total.passed} passed, ${total.failed} failed`);
if (interrupted.signal.aborted) console.log("Interrupted: not all tests were run.");
else if (!ok && total.failed === 0) console.log("A step outside the tests failed: see FAIL or FAILED above.");
process.exit(interrupted.signal.aborted ? 130 : ok ? 0 : 1);
