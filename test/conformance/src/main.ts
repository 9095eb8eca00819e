/** `npm run conformance [-- LANGUAGE [VERSION]]`, see README.md. */
import { execFileSync, spawn } from "node:child_process";
import { existsSync, readFileSync } from "node:fs";
import { createRequire } from "node:module";
import { join } from "node:path";
import { messageOf } from "@aenv/base";
import { aenvHome, readServerFile, run } from "@aenv/host";

const root = join(import.meta.dirname, "../../..");
const cache = join(root, ".cache/conformance");
const clients = join(import.meta.dirname, "../clients");

/** Registries and proxies are the user's. */
const env = process.env as Record<string, string>;

const VERSIONS = { js: ["2.45.0", "2.51.0", "newest"], python: ["2.45.1", "newest"] } as const;
type Language = keyof typeof VERSIONS;
/** By row; or that nothing could be run. */
type Column = Record<string, string>;

function connection(): Record<string, string> {
  const home = process.env["AENV_TEST_HOME"] ?? aenvHome();
  const { apiKey } = JSON.parse(readFileSync(join(home, "auth.json"), "utf8")) as { apiKey: string };
  const url = process.env["AENV_TEST_URL"] ?? `http://127.0.0.1:${readServerFile(home)?.port}`;
  return { E2B_API_KEY: apiKey, E2B_API_URL: url, E2B_SANDBOX_URL: url };
}

function client(language: Language, dir: string): [string, string[]] {
  if (language === "python") return [join(dir, "bin/python"), [join(clients, "rows.py")]];
  return [process.execPath, [join(clients, "rows.mjs"), createRequire(join(dir, "x.js")).resolve("e2b")]];
}

/** The folder with the SDK in it, installed once. `newest` is asked for again each time. */
async function install(language: Language, wanted: string): Promise<{ dir: string; version: string }> {
  const version = wanted === "newest" ? await newest(language) : wanted;
  const dir = join(cache, `${language}-${version}`);
  if (existsSync(join(dir, "done"))) return { dir, version };
  await run("mkdir", ["-p", dir]);
  if (language === "js") {
    await run("npm", ["install", "--no-fund", "--no-audit", "--loglevel=error", "--prefix", dir, `e2b@${version}`], {
      env,
    });
  } else {
    await run("python3", ["-m", "venv", dir], { env });
    await run(join(dir, "bin/pip"), ["-q", "install", `e2b==${version}`], { env });
  }
  await run("touch", [join(dir, "done")]);
  return { dir, version };
}

async function newest(language: Language): Promise<string> {
  if (language === "js") return (await run("npm", ["view", "e2b", "version"], { env })).stdout.trim();
  const { stdout } = await run("python3", ["-m", "pip", "index", "versions", "e2b"], { env });
  return /\(([^)]+)\)/.exec(stdout)?.[1] ?? "";
}

async function ask(language: Language, dir: string): Promise<Column> {
  const [cmd, args] = client(language, dir);
  const plain = { PATH: process.env["PATH"] ?? "", HOME: "/nonexistent", ...connection() };
  const child = spawn(cmd, args, { env: plain, stdio: ["ignore", "pipe", "inherit"] });
  let text = "";
  child.stdout.setEncoding("utf8").on("data", (d: string) => (text += d));
  const code = await new Promise((resolve, reject) => child.on("close", resolve).on("error", reject));
  if (code !== 0) throw new Error(`the client ended with ${String(code)}`);
  return JSON.parse(text) as Column;
}

const [only, version] = process.argv.slice(2);
const columns: { name: string; rows: Column }[] = [];
const reasons: string[] = [];
for (const language of Object.keys(VERSIONS) as Language[]) {
  if (only !== undefined && only !== language) continue;
  const done = new Set<string>();
  for (const wanted of version === undefined ? VERSIONS[language] : [version]) {
    try {
      const sdk = await install(language, wanted);
      if (done.has(sdk.version)) continue;
      done.add(sdk.version);
      console.error(`${language} ${sdk.version} ...`);
      columns.push({ name: `${language} ${sdk.version}`, rows: await ask(language, sdk.dir) });
    } catch (e) {
      columns.push({ name: `${language} ${wanted}`, rows: {} });
      reasons.push(`${language} ${wanted}: ${messageOf(e)}`);
    }
  }
}
const names = [...new Set(columns.flatMap((c) => Object.keys(c.rows)))];
const width = Math.max(...names.map((n) => n.length), 4);
console.log(["row".padEnd(width), ...columns.map((c) => c.name.padEnd(14))].join("  "));
for (const name of names) {
  const cells = columns.map((c) => {
    const said = c.rows[name] ?? "not run";
    if (said === "ok" || said === "-") return said.padEnd(14);
    reasons.push(`${c.name}, ${name}: ${said}`);
    return "FAILED".padEnd(14);
  });
  console.log([name.padEnd(width), ...cells].join("  ").trimEnd());
}
for (const reason of reasons) console.log(`\n${reason}`);
console.log(
  `\nnode: commit ${execFileSync("git", ["-C", root, "rev-parse", "--short", "HEAD"], { encoding: "utf8" }).trim()}`,
);
process.exitCode = reasons.length > 0 || columns.length === 0 ? 1 : 0;
