/** `npm run check`: every static check, at once, with the time of each. Exit code 1 when one fails. */
import { spawn } from "node:child_process";
import { resolve } from "node:path";

const root = resolve(import.meta.dirname, "../..");
const CHECKS: readonly (readonly [name: string, ...argv: string[]])[] = [
  ["format", "biome", "format", "."],
  ["types", "tsc", "-p", "."],
  ["lint", "oxlint", "--type-aware", "--deny-warnings"],
  ["boundaries", "node", "tools/src/check-boundaries.ts"],
  ["documents", "node", "tools/src/check-docs.ts"],
  ["dead code", "knip", "--no-progress"],
  ["generated", "node", "apps/cli/src/docs.ts", "--check"],
  ["wire code", "node", "tools/src/generate-guest.ts", "--check"],
];

interface Outcome {
  name: string;
  ok: boolean;
  ms: number;
  output: string;
}

function run(name: string, argv: readonly string[]): Promise<Outcome> {
  const started = performance.now();
  return new Promise((done) => {
    const [cmd = "", ...args] = argv;
    const child = spawn(cmd, args, {
      cwd: root,
      env: { ...process.env, PATH: `${root}/node_modules/.bin:${process.env["PATH"]}`, FORCE_COLOR: "0" },
      stdio: ["ignore", "pipe", "pipe"],
    });
    let output = "";
    child.stdout.on("data", (d: Buffer) => (output += d.toString()));
    child.stderr.on("data", (d: Buffer) => (output += d.toString()));
    const end = (ok: boolean): void => done({ name, ok, ms: performance.now() - started, output });
    child.on("error", (e) => {
      output += e.message;
      end(false);
    });
    child.on("close", (code) => end(code === 0));
  });
}

const outcomes = await Promise.all(CHECKS.map(([name, ...argv]) => run(name, argv)));
for (const o of outcomes) {
  if (!o.ok) console.error(`\n--- ${o.name}\n${o.output.trim()}`);
}
console.log(
  outcomes.map((o) => `${o.ok ? "ok  " : "FAIL"} ${o.name.padEnd(12)} ${(o.ms / 1000).toFixed(1)} s`).join("\n"),
);
process.exit(outcomes.every((o) => o.ok) ? 0 : 1);
