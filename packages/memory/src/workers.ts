import { availableParallelism } from "node:os";
import { Worker } from "node:worker_threads";
import { AenvError } from "@aenv/base";
import type { FlatOwner } from "./flat-file.ts";
import type { GuestMapping } from "./guest-memory.ts";
import { flatten, inject, mergeDeltas } from "./jobs.ts";
import { fromPlain, type PlainError } from "./plain-error.ts";
import type { StackFiles } from "./stack.ts";
import { type Share, Take, type TakePlan, type TakeResult } from "./take.ts";

/** One capture in two steps around the moment at which the guest may go on. */
export interface TakeSession {
  /** Bytes written so far; the VM may run. */
  estimate(): Promise<number>;
  /** The VM stands still. */
  take(share?: Share): Promise<void>;
  /** The new file is complete; `durable`: it also survives a loss of power. */
  finish(durable: boolean): Promise<TakeResult>;
  /** Nothing is left of it, unless it is finished. Never rejects. */
  discard(): Promise<void>;
}

/** Everything the engine does with the memory of guests. */
export interface MemoryPort {
  begin(plan: TakePlan): Promise<TakeSession>;
  inject(mappings: readonly GuestMapping[], files: StackFiles): Promise<number>;
  mergeDeltas(files: StackFiles, target: string, durable: boolean): Promise<number>;
  flatten(files: StackFiles, target: string, owner: FlatOwner, durable: boolean): Promise<number>;
  close(): Promise<void>;
}

/** In this thread, for tests and tools. */
export const localMemory: MemoryPort = {
  begin: async (plan) => {
    const take = new Take(plan);
    return {
      estimate: async () => take.estimate(),
      take: async (share) => take.take(share),
      finish: async (durable) => take.finish(durable),
      discard: async () => take[Symbol.dispose](),
    };
  },
  inject: async (mappings, files) => inject(mappings, files),
  mergeDeltas,
  flatten,
  close: async () => {},
};

export type Request =
  | { op: "begin"; take: number; plan: TakePlan }
  | { op: "estimate" | "discard"; take: number }
  | { op: "take"; take: number; share: Share | undefined }
  | { op: "finish"; take: number; durable: boolean }
  | { op: "inject"; mappings: readonly GuestMapping[]; files: StackFiles }
  | { op: "merge"; files: StackFiles; target: string; durable: boolean }
  | { op: "flatten"; files: StackFiles; target: string; owner: FlatOwner; durable: boolean };
export type Answer = { id: number; value: unknown } | { id: number; error: PlainError };

/**
 * Guest memory in worker threads, started when they are first needed: for what a caller waits for one per core; one more
 * for compaction, which may take seconds.
 */
export class MemoryWorkers implements MemoryPort {
  readonly #foreground: Thread[];
  readonly #background = new Thread();
  #takes = 0;

  constructor(threads = Math.min(4, availableParallelism())) {
    this.#foreground = Array.from({ length: threads }, () => new Thread());
  }

  async begin(plan: TakePlan): Promise<TakeSession> {
    // All steps of one take are done by the thread that holds its buffer.
    const thread = this.#idlest();
    const take = ++this.#takes;
    thread.sessions++;
    let open = true;
    const end = (): void => {
      if (open) thread.sessions--;
      open = false;
    };
    try {
      await thread.call({ op: "begin", take, plan });
    } catch (e) {
      end();
      throw e;
    }
    return {
      estimate: async () => (await thread.call({ op: "estimate", take })) as number,
      take: async (share) => void (await thread.call({ op: "take", take, share })),
      finish: async (durable) => {
        const result = (await thread.call({ op: "finish", take, durable })) as TakeResult;
        end();
        return result;
      },
      discard: async () => {
        if (open) await thread.call({ op: "discard", take }).catch(() => {});
        end();
      },
    };
  }

  async inject(mappings: readonly GuestMapping[], files: StackFiles): Promise<number> {
    return (await this.#idlest().call({ op: "inject", mappings, files })) as number;
  }

  async mergeDeltas(files: StackFiles, target: string, durable: boolean): Promise<number> {
    return (await this.#background.call({ op: "merge", files, target, durable })) as number;
  }

  async flatten(files: StackFiles, target: string, owner: FlatOwner, durable: boolean): Promise<number> {
    return (await this.#background.call({ op: "flatten", files, target, owner, durable })) as number;
  }

  async close(): Promise<void> {
    await Promise.all([this.#background, ...this.#foreground].map((t) => t.close()));
  }

  #idlest(): Thread {
    return this.#foreground.reduce((a, b) => (b.load < a.load ? b : a));
  }
}

/** A small heap: the pieces live outside of it. */
const HEAP_MIB = 64;

class Thread {
  /** Takes that it holds. */
  sessions = 0;
  readonly #waiting = new Map<number, PromiseWithResolvers<unknown>>();
  #worker: Worker | undefined;
  #next = 0;

  get load(): number {
    return this.#waiting.size + this.sessions;
  }

  call(request: Request): Promise<unknown> {
    const worker = (this.#worker ??= this.#start());
    const id = ++this.#next;
    const answer = Promise.withResolvers<unknown>();
    this.#waiting.set(id, answer);
    worker.ref();
    // oxlint-disable-next-line unicorn/require-post-message-target-origin -- a worker thread, not a window
    worker.postMessage({ id, request });
    return answer.promise;
  }

  async close(): Promise<void> {
    await this.#worker?.terminate();
    this.#failAll("the memory worker was closed");
  }

  #start(): Worker {
    const worker = new Worker(new URL("./worker.ts", import.meta.url), {
      resourceLimits: { maxOldGenerationSizeMb: HEAP_MIB },
      // Node counts files that optimised code has closed as open still, and warns.
      trackUnmanagedFds: false,
    });
    worker.on("message", (answer: Answer) => {
      const waiting = this.#waiting.get(answer.id);
      this.#waiting.delete(answer.id);
      if (this.#waiting.size === 0) worker.unref();
      if ("error" in answer) waiting?.reject(fromPlain(answer.error));
      else waiting?.resolve(answer.value);
    });
    const ended = (why: string): void => {
      // The next call starts another.
      if (this.#worker === worker) this.#worker = undefined;
      this.#failAll(why);
    };
    worker.on("error", (e) => ended(`the memory worker failed: ${String(e)}`));
    worker.on("exit", () => ended("the memory worker ended"));
    return worker;
  }

  #failAll(why: string): void {
    const waiting = [...this.#waiting.values()];
    this.#waiting.clear();
    for (const w of waiting) w.reject(new AenvError("INTERNAL", why));
  }
}
