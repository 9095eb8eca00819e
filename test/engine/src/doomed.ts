/**
 * A server that is killed in the middle of an operation: `node doomed.ts HOME INSTANCE OPERATION SANDBOX STEP` adopts what
 * runs, begins the operation, says "reached" at the step, and stays there.
 */
import type { SandboxId } from "@aenv/base";
import type { Engine } from "@aenv/engine";
import { CONFIG, HOUR, type Operation, TestNode } from "./node.ts";

const [home = "", instance = "", operation = "", id = "", at = ""] = process.argv.slice(2);
const signal = new AbortController().signal;

const operations: Record<Operation, (engine: Engine, id: SandboxId) => Promise<unknown>> = {
  pause: (e, s) => e.pause(s, {}, signal),
  resume: (e, s) => e.connect(s, HOUR, signal),
  snapshot: (e, s) => e.snapshot(s, {}, signal),
  fork: (e, s) => e.fork(s, { count: 2, timeoutMs: HOUR }, signal),
  rewind: (e, s) => e.rewind(s, "cp", {}, signal),
};

const engine = await TestNode.attach(home, instance).open(CONFIG, async (step) => {
  if (step !== at) return;
  console.log("reached");
  await new Promise(() => {});
});
await operations[operation as Operation](engine, id as SandboxId);
console.log("done");
