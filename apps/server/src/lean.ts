import { globSync, mkdirSync, statSync, writeFileSync } from "node:fs";
import { enableCompileCache, flushCompileCache } from "node:module";
import { join } from "node:path";

const ROOT = join(import.meta.dirname, "../../..");
/** Compiled modules, shared by every process of this checkout; where it cannot be written nothing is cached. */
const CACHE = join(ROOT, ".cache/node-compile");
/** As old as the last time at which every module of the server was compiled. */
const STAMP = join(CACHE, "server-compiled");

/** The young generation may grow to three times this (MiB); an idle server would keep all of it. */
const FLAGS = ["--max-semi-space-size=4", "--disable-warning=ExperimentalWarning"];

function mtime(path: string): number {
  return statSync(path, { throwIfNoEntry: false })?.mtimeMs ?? 0;
}

function isCompiled(): boolean {
  const stamp = mtime(STAMP);
  return globSync("{packages/*,apps/server}/src/**/*.ts", { cwd: ROOT }).every((f) => mtime(join(ROOT, f)) < stamp);
}

/**
 * Replaces this process by one that reads compiled modules from the cache (same pid, same start time). Node's TypeScript
 * compiler holds 30 MB for good, and it is loaded as soon as one module is not cached: so everything is compiled first.
 */
export async function leanProcess(load: () => Promise<unknown>): Promise<void> {
  if (FLAGS.every((f) => process.execArgv.includes(f)) || process.execve === undefined) return;
  try {
    if (!isCompiled()) {
      enableCompileCache(CACHE);
      await load();
      flushCompileCache();
      mkdirSync(CACHE, { recursive: true });
      writeFileSync(STAMP, "");
    }
  } catch (e) {
    // A read-only checkout costs memory, nothing else. What does not compile fails again below, with its message.
    console.error(`modules are not cached: ${String(e)}`);
  }
  const argv = [process.execPath, ...process.execArgv, ...FLAGS, ...process.argv.slice(1)];
  process.execve(process.execPath, argv, { ...process.env, NODE_COMPILE_CACHE: CACHE });
}
