import { connect, type Socket } from "node:net";
import { AenvError, sleep } from "@aenv/base";
import { type ProcIdentity, signalExact } from "@aenv/host";
import { JsonLines, jsonLine } from "./json-lines.ts";
import type { ProcExit, Spawner, SpawnSpec } from "./spawner.ts";
import type { VmdChild, VmdInfo, VmdMessage, VmdRequest } from "./vmd-protocol.ts";

type Body<R = VmdRequest> = R extends VmdRequest ? Omit<R, "id"> : never;

interface Pending {
  resolve(value: unknown): void;
  reject(e: Error): void;
}

/** How long after a lost connection the next attempt is made; a restarted vmd is listening within this. */
const RECONNECT_MS = 200;

/** Client of vmd. Connects when first used; while there are subscribers it connects again after a restart of vmd. */
export class VmdClient implements Spawner {
  readonly #path: string;
  readonly #pending = new Map<number, Pending>();
  readonly #subscribers = new Set<(e: ProcExit) => void>();
  /** Exits not acknowledged yet, for subscribers that come later. */
  readonly #exits = new Map<string, ProcExit>();
  readonly #closing = new AbortController();
  #connection: Promise<Socket> | undefined;
  #epoch = "";
  #nextId = 1;

  constructor(socketPath: string) {
    this.#path = socketPath;
  }

  async ping(signal: AbortSignal): Promise<VmdInfo> {
    return (await this.#request({ op: "ping" }, signal)) as VmdInfo;
  }

  async spawn(spec: SpawnSpec, signal: AbortSignal): Promise<ProcIdentity> {
    const request = this.#send({ op: "spawn", spec }) as Promise<ProcIdentity>;
    try {
      return await abortable(request, signal);
    } catch (e) {
      // The request may still succeed after the caller gave up: then nobody would own the process.
      if (signal.aborted) request.then((id) => signalExact(id, "SIGKILL")).catch(() => {});
      throw e;
    }
  }

  onExit(fn: (exit: ProcExit) => void): () => void {
    this.#subscribers.add(fn);
    for (const exit of this.#exits.values()) queueMicrotask(() => fn(exit));
    this.#connect().catch(() => {});
    return () => this.#subscribers.delete(fn);
  }

  acknowledge(exit: ProcExit): void {
    if (!this.#exits.delete(keyOf(exit))) return;
    // When it is lost with the connection, vmd repeats the exit and the subscriber acknowledges again.
    this.#send({ op: "ack", seq: exit.seq, epoch: this.#epoch }).catch(() => {});
  }

  async list(signal: AbortSignal): Promise<VmdChild[]> {
    return (await this.#request({ op: "list" }, signal)) as VmdChild[];
  }

  close(): void {
    this.#closing.abort();
    this.#subscribers.clear();
    this.#connection?.then((s) => s.destroy()).catch(() => {});
  }

  #request(body: Body, signal: AbortSignal): Promise<unknown> {
    return abortable(this.#send(body), signal);
  }

  async #send(body: Body): Promise<unknown> {
    const socket = await this.#connect();
    return await this.#write(socket, body);
  }

  #write(socket: Socket, body: Body): Promise<unknown> {
    const id = this.#nextId++;
    return new Promise((resolve, reject) => {
      this.#pending.set(id, { resolve, reject });
      // An idle client does not keep its process alive; one that waits for an answer does.
      socket.ref();
      socket.write(jsonLine({ ...body, id }));
    });
  }

  #connect(): Promise<Socket> {
    if (this.#closing.signal.aborted) return Promise.reject(gone("the client is closed"));
    this.#connection ??= this.#open().catch((e: unknown) => {
      this.#connection = undefined;
      this.#retry();
      throw e;
    });
    return this.#connection;
  }

  async #open(): Promise<Socket> {
    const socket = connect(this.#path);
    await new Promise<void>((resolve, reject) => {
      socket.once("connect", resolve);
      socket.once("error", (e) => reject(gone(e.message, e)));
    });
    const lines = new JsonLines();
    socket.on("data", (chunk) => {
      try {
        for (const message of lines.push(chunk)) this.#receive(message as VmdMessage);
        if (this.#pending.size === 0) socket.unref();
      } catch (e) {
        socket.destroy(e as Error);
      }
    });
    socket.on("error", () => {});
    socket.on("close", () => {
      this.#connection = undefined;
      for (const p of this.#pending.values()) p.reject(gone("the connection was lost"));
      this.#pending.clear();
      this.#retry();
    });
    const info = (await this.#write(socket, { op: "ping" })) as VmdInfo;
    if (info.epoch !== this.#epoch) this.#exits.clear();
    this.#epoch = info.epoch;
    await this.#write(socket, { op: "exits" });
    return socket;
  }

  #retry(): void {
    if (this.#subscribers.size === 0 || this.#closing.signal.aborted) return;
    sleep(RECONNECT_MS, this.#closing.signal)
      .then(() => this.#connect())
      .catch(() => {});
  }

  #receive(message: VmdMessage): void {
    if ("exit" in message) {
      const key = keyOf(message.exit);
      if (this.#exits.has(key)) return;
      this.#exits.set(key, message.exit);
      for (const fn of this.#subscribers) fn(message.exit);
      return;
    }
    const pending = this.#pending.get(message.id);
    this.#pending.delete(message.id);
    if ("error" in message) pending?.reject(new AenvError(message.error.code, message.error.message));
    else pending?.resolve(message.ok);
  }
}

const keyOf = (e: ProcExit): string => `${e.identity.pid}:${e.identity.startTicks}`;

const gone = (why: string, cause?: unknown): AenvError =>
  new AenvError("UNAVAILABLE", `vmd does not answer: ${why}`, {
    cause,
    hint: "aenv doctor tells whether vmd runs; npm run up starts it.",
  });

function abortable<T>(promise: Promise<T>, signal: AbortSignal): Promise<T> {
  return new Promise((resolve, reject) => {
    const abort = (): void => reject(signal.reason as Error);
    if (signal.aborted) abort();
    else signal.addEventListener("abort", abort, { once: true });
    promise.then(resolve, reject).finally(() => signal.removeEventListener("abort", abort));
  });
}
