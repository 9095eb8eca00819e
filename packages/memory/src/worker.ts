/** Runs jobs on guest memory beside the event loop of the server. One at a time, in order; others go on while one waits for the device. */
import { parentPort } from "node:worker_threads";
import { toPlain } from "./plain-error.ts";
import { flatten, inject, mergeDeltas } from "./jobs.ts";
import { Take } from "./take.ts";
import type { Answer, Request } from "./workers.ts";

const takes = new Map<number, Take>();

async function handle(r: Request): Promise<unknown> {
  switch (r.op) {
    case "begin":
      takes.set(r.take, new Take(r.plan));
      return undefined;
    case "estimate":
      return takes.get(r.take)?.estimate();
    case "take":
      takes.get(r.take)?.take(r.share);
      return undefined;
    case "finish": {
      const take = takes.get(r.take);
      if (!take) throw new Error(`no take ${r.take}`);
      const result = await take.finish(r.durable);
      takes.delete(r.take);
      return result;
    }
    case "discard":
      takes.get(r.take)?.[Symbol.dispose]();
      takes.delete(r.take);
      return undefined;
    case "inject":
      return inject(r.mappings, r.files);
    case "merge":
      return mergeDeltas(r.files, r.target, r.durable);
    case "flatten":
      return flatten(r.files, r.target, r.owner, r.durable);
    default:
      throw new Error("unknown job");
  }
}

async function answerTo({ id, request }: { id: number; request: Request }): Promise<void> {
  let answer: Answer;
  try {
    answer = { id, value: await handle(request) };
  } catch (e) {
    answer = { id, error: toPlain(e) };
  }
  // oxlint-disable-next-line unicorn/require-post-message-target-origin -- a worker thread, not a window
  parentPort?.postMessage(answer);
}

parentPort?.on("message", (m: { id: number; request: Request }) => void answerTo(m));
