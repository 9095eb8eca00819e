import { connect, type Socket } from "node:net";
import { AenvError } from "@aenv/base";
import { type QmpObject, QmpReader } from "./qmp-reader.ts";

export interface QmpEvent {
  name: string;
  data: QmpObject;
}

interface Pending {
  resolve(value: unknown): void;
  reject(e: Error): void;
}

/** Commands in flight at once; the driver serialises, so more means that QEMU no longer answers. */
const MAX_PENDING = 64;

const asObject = (v: unknown): QmpObject =>
  typeof v === "object" && v !== null && !Array.isArray(v) ? (v as QmpObject) : {};

/** One QMP connection. QEMU serves one client at a time: a second connection gets no greeting until the first is closed. */
export class Qmp {
  readonly #socket: Socket;
  readonly #reader = new QmpReader();
  readonly #pending = new Map<number, Pending>();
  readonly #listeners = new Set<(e: QmpEvent) => void>();
  readonly #greeting = Promise.withResolvers<void>();
  readonly #closed = Promise.withResolvers<void>();
  #nextId = 1;
  #failure: Error | undefined;

  private constructor(socket: Socket) {
    this.#socket = socket;
    this.#greeting.promise.catch(() => {});
    socket.on("data", (chunk) => {
      try {
        for (const message of this.#reader.push(chunk)) this.#receive(message);
      } catch (e) {
        socket.destroy(e as Error);
      }
    });
    socket.on("error", (e) => (this.#failure ??= e));
    socket.on("close", () => this.#onClose());
  }

  /** Connects and leaves the capabilities mode. Rejects with the socket's error (ENOENT, ECONNREFUSED) while QEMU is not there yet. */
  static async connect(path: string, signal: AbortSignal): Promise<Qmp> {
    signal.throwIfAborted();
    const socket = connect(path);
    const qmp = new Qmp(socket);
    const abort = (): void => void socket.destroy(signal.reason as Error);
    signal.addEventListener("abort", abort, { once: true });
    try {
      await qmp.#greeting.promise;
      await qmp.execute("qmp_capabilities", {}, signal);
      return qmp;
    } catch (e) {
      socket.destroy();
      throw e;
    } finally {
      signal.removeEventListener("abort", abort);
    }
  }

  /** Resolves when the connection is gone, for whatever reason. */
  get closed(): Promise<void> {
    return this.#closed.promise;
  }

  onEvent(fn: (e: QmpEvent) => void): () => void {
    this.#listeners.add(fn);
    return () => this.#listeners.delete(fn);
  }

  execute(command: string, args: QmpObject, signal: AbortSignal): Promise<unknown> {
    return new Promise((resolve, reject) => {
      if (signal.aborted) return reject(signal.reason as Error);
      if (this.#socket.destroyed) return reject(this.#gone());
      if (this.#pending.size >= MAX_PENDING)
        return reject(new AenvError("VMM_FAILED", "the VMM no longer answers QMP commands"));
      const id = this.#nextId++;
      const abort = (): void => {
        this.#pending.delete(id);
        reject(signal.reason as Error);
      };
      signal.addEventListener("abort", abort, { once: true });
      const done = (): void => signal.removeEventListener("abort", abort);
      this.#pending.set(id, {
        resolve: (v) => {
          done();
          resolve(v);
        },
        reject: (e) => {
          done();
          reject(e);
        },
      });
      this.#socket.write(`${JSON.stringify({ execute: command, arguments: args, id })}\n`);
    });
  }

  close(): void {
    this.#socket.destroy();
  }

  #receive(message: QmpObject): void {
    if ("QMP" in message) return this.#greeting.resolve();
    if (typeof message["event"] === "string") {
      const event = { name: message["event"], data: asObject(message["data"]) };
      for (const fn of this.#listeners) fn(event);
      return;
    }
    const id = message["id"];
    const pending = typeof id === "number" ? this.#pending.get(id) : undefined;
    // An answer to a command whose caller gave up.
    if (!pending) return;
    this.#pending.delete(id as number);
    if ("error" in message) {
      const desc = asObject(message["error"])["desc"];
      pending.reject(new AenvError("VMM_FAILED", `QEMU: ${String(desc).slice(0, 500)}`));
    } else pending.resolve(message["return"]);
  }

  #onClose(): void {
    const gone = this.#gone();
    this.#greeting.reject(this.#failure ?? gone);
    for (const p of this.#pending.values()) p.reject(gone);
    this.#pending.clear();
    this.#closed.resolve();
  }

  #gone(): AenvError {
    return new AenvError("VMM_FAILED", "the QMP connection is closed", { cause: this.#failure });
  }
}
