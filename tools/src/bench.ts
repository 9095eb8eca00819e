/**
 * `npm run bench -- NAME`: installs what the benchmark compares with, then runs it (bench/src/main.ts) with the same
 * arguments. Standard output is the benchmark's alone.
 */
import { spawn } from "node:child_process";
import { join } from "node:path";
import { AenvError, messageOf } from "@aenv/base";
import { benchPackages } from "./debian-packages.ts";
import { ensureDebianPackages } from "./debian.ts";
import { root } from "./node.ts";

const args = process.argv.slice(2);
const abort = new AbortController();
// The benchmark gets Ctrl-C from the terminal, too, and takes down what it made; then it ends, and so do we.
for (const name of ["SIGINT", "SIGTERM"] as const)
  process.on(name, () => abort.abort(new AenvError("CANCELLED", `stopped by ${name}`, { hint: "" })));
const say = (note: string): void => console.error(`packages: ${note}`);
try {
  const installed = await ensureDebianPackages(benchPackages(args), say, abort.signal);
  if (installed.length > 0) say(`installed ${installed.join(", ")}`);
} catch (e) {
  const hint =
    e instanceof AenvError && e.code !== "INTERNAL" ? e.hint : "Check the network and /etc/apt/sources.list.";
  console.error(`bench failed: ${messageOf(e)}${hint === "" ? "" : `\nWhat to do: ${hint}`}`);
  process.exit(1);
}
const child = spawn(process.execPath, [join(root, "bench/src/main.ts"), ...args], { stdio: "inherit" });
abort.signal.addEventListener("abort", () => child.kill("SIGTERM"));
child.on("close", (code, signal) => process.exit(code ?? (signal === null ? 1 : 128)));
