import { Worker } from "node:worker_threads";
import { AenvError, ERROR_CODES, type ErrorCode, type Logger } from "@aenv/base";
import type { CallName, FromWorker, WireError, WorkerCalls } from "./protocol.ts";

/** One disk worker, seen from the control thread. */
export class DiskWorker {
  readonly #worker: Worker;
  readonly #waiting = new Map<number, PromiseWithResolvers<unknown>>();
  #nextId = 1;
  /** Disks placed here. */
  disks = 0;

  /** `onCrash` is called when the thread ends by itself; its disks are then not served. */
  constructor(logger: Logger, onCrash: (e: Error) => void) {
    this.#worker = new Worker(new URL("./worker.ts", import.meta.url), {
      // Node takes files that optimised code has closed for open still: it warns, and at its end closes whose they are now.
      trackUnmanagedFds: false,
    });
    this.#worker.on("message", (m: FromWorker) => {
      if (m.kind === "log") return logger[m.level](m.fields, m.message);
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
  }
}

function fromWire(e: WireError): AenvError {
  const code = Object.hasOwn(ERROR_CODES, e.code) ? (e.code as ErrorCode) : "INTERNAL";
  return new AenvError(code, e.message, {
    ...(e.hint === undefined ? {} : { hint: e.hint }),
    ...(e.data === undefined ? {} : { data: e.data }),
  });
}
