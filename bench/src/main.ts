/**
 * `npm run bench -- NAME [--json]` (through tools/src/bench.ts, which installs what is missing) runs bench/src/NAME.ts
 * and prints one object {name, conditions, results}.
 * `all` runs each briefly. A module exports `run: Bench` (lib/series.ts). Exit code 1 when something failed.
 */
import { readdirSync } from "node:fs";
import { join } from "node:path";
import { AenvError, messageOf } from "@aenv/base";
import { commonConditions } from "./lib/conditions.ts";
import { type Report, renderTable } from "./lib/print.ts";
import type { Bench } from "./lib/series.ts";

const names = readdirSync(import.meta.dirname)
  .filter((f) => f.endsWith(".ts") && !f.endsWith(".test.ts") && f !== "main.ts")
  .map((f) => f.slice(0, -".ts".length))
  .toSorted();

const abort = new AbortController();
for (const signal of ["SIGINT", "SIGTERM"] as const) {
  process.once(signal, () => abort.abort(new AenvError("CANCELLED", `stopped by ${signal}`)));
}

function explain(e: unknown): string {
  if (!(e instanceof AenvError)) return e instanceof Error ? (e.stack ?? e.message) : messageOf(e);
  return `${e.message}${e.hint === "" ? "" : `. ${e.hint}`}`;
}

async function runOne(name: string, brief: boolean): Promise<Report> {
  const conditions = await commonConditions();
  const module = (await import(join(import.meta.dirname, `${name}.ts`))) as { run: Bench };
  const log = (line: string): void => void process.stderr.write(`${name}: ${line}\n`);
  const outcome = await module.run({ brief, signal: abort.signal, log });
  return { name, conditions: { ...conditions, ...outcome.conditions }, results: outcome.results };
}

/** One object for all: metrics carry their benchmark's name, and so do conditions that are not common. */
async function runAll(): Promise<Report> {
  const all: Required<Report> = { name: "all", conditions: await commonConditions(), results: [], failures: [] };
  const common = new Set(Object.keys(all.conditions));
  for (const name of names) {
    try {
      const report = await runOne(name, true);
      for (const [k, v] of Object.entries(report.conditions)) {
        if (!common.has(k)) all.conditions[`${name}.${k}`] = v;
      }
      all.results.push(...report.results.map((r) => ({ ...r, metric: `${name}: ${r.metric}` })));
    } catch (e) {
      all.failures.push({ name, reason: explain(e) });
    }
  }
  return all;
}

async function main(args: readonly string[]): Promise<number> {
  const json = args.includes("--json");
  const brief = args.includes("--brief");
  const [name, ...rest] = args.filter((a) => a !== "--json" && a !== "--brief");
  if (name === undefined || rest.length > 0 || (name !== "all" && !names.includes(name))) {
    console.error(`usage: npm run bench -- NAME [--json] [--brief]\nNAME is one of: ${[...names, "all"].join(", ")}`);
    return 2;
  }
  const report = name === "all" ? await runAll() : await runOne(name, brief);
  process.stdout.write(json ? `${JSON.stringify(report)}\n` : renderTable(report));
  return report.failures?.length ? 1 : 0;
}

try {
  process.exitCode = await main(process.argv.slice(2));
} catch (e) {
  console.error(`bench failed: ${explain(e)}`);
  process.exitCode = 1;
}
