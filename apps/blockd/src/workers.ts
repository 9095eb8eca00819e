import { Worker } from "node:worker_threads";
import { AenvError, type Logger } from "@aenv/base";
import type { LoadPieces } from "@aenv/block";
import { type CallName, type FromWorker, fromWire, type Loaded, type WorkerCalls } from "./protocol.ts";

/** One disk worker, seen from the control thread. */
export class DiskWorker {
  readonly #worker: Worker;
  readonly #waiting = new Map<number, PromiseWithResolvers<unknown>>();
  readonly #load: LoadPieces;
  /** Pieces that the worker reads now. */
  readonly #held = new Map<number, () => void>();
  #nextId = 1;
  /** Disks placed here. */
  disks = 0;

  /** `onCrash` is called when the thread ends by itself; its disks are then not served. */
  constructor(logger: Logger, load: LoadPieces, onCrash: (e: Error) => void) {
    this.#load = load;
    this.#worker = new Worker(new URL("./worker.ts", import.meta.url), {
      // Node takes files that optimised code has closed for open still: it warns, and at its end closes whose they are now.
      trackUnmanagedFds: false,
    });
    this.#worker.on("message", (m: FromWorker) => {
      if (m.kind === "log") return logger[m.level](m.fields, m.message);
      if (m.kind === "load") return void this.#answerLoad(m);
      if (m.kind === "release") return this.#release(m.load);
      const waiting = this.#waiting.get(m.id);
      this.#waiting.delete(m.id);
      if (m.kind === "done") waiting?.resolve(m.result);
      else waiting?.reject(fromWire(m.error));
    });
    this.#worker.on("error", (e) => onCrash(e as Error));
  }

  call<K extends CallName>(op: K, args: WorkerCalls[K]["args"]): Promise<WorkerCalls[K]["result"]> {
    const id = this.#nextId++;
    const waiting = Promise.withResolvers<unknown>();
    this.#waiting.set(id, waiting);
    // oxlint-disable-next-line unicorn/require-post-message-target-origin -- a worker thread, not a window
    this.#worker.postMessage({ id, op, args });
    return waiting.promise as Promise<WorkerCalls[K]["result"]>;
  }

  async end(): Promise<void> {
    await this.call("stop", undefined);
    await this.#worker.terminate();
    for (const load of this.#held.keys()) this.#release(load);
  }

  async #answerLoad({ load, blob, from, to }: Extract<FromWorker, { kind: "load" }>): Promise<void> {
    let answer: Loaded;
    try {
      this.#held.set(load, await this.#load(blob, from, to));
      answer = { op: "loaded", load };
    } catch (e) {
      const { code, message, hint, data } = AenvError.from(e, "loading pieces of a layer");
      answer = { op: "loadFailed", load, error: { code, message, hint, data } };
    }
    // oxlint-disable-next-line unicorn/require-post-message-target-origin -- a worker thread, not a window
    this.#worker.postMessage(answer);
  }

  #release(load: number): void {
    this.#held.get(load)?.();
    this.#held.delete(load);
  }
}
