/** Parts of the tests: an edge in front of guests in this process, and clients that speak raw bytes. */
import { createServer, type IncomingMessage, type RequestListener, type Server, type ServerResponse } from "node:http";
import {
  type AddressInfo,
  connect,
  createServer as createTcpServer,
  type Server as TcpServer,
  type Socket,
} from "node:net";
import type { TestContext } from "node:test";
import { silentLogger } from "@aenv/base";
import { createEdge, type Edge, type EdgeOptions } from "./edge.ts";
import { createFrontServer } from "./front.ts";
import type { TlsSource } from "./secure.ts";
import type { EdgeLimits } from "./limits.ts";
import type { Resolve } from "./target.ts";

export const DOMAIN = "sandbox.test";
export const ID = "iabc0123456789abcdef";

async function listen(server: TcpServer): Promise<number> {
  await new Promise<void>((resolve) => server.listen(0, "127.0.0.1", resolve));
  return (server.address() as AddressInfo).port;
}

function track(t: TestContext, server: TcpServer): void {
  const sockets = new Set<Socket>();
  server.on("connection", (s: Socket) => {
    sockets.add(s);
    s.once("close", () => sockets.delete(s));
  });
  t.after(() => {
    for (const s of sockets) s.destroy();
    server.close();
  });
}

type Handler = (req: IncomingMessage, res: ServerResponse) => void | Promise<void>;

/** A guest's HTTP server. A handler that throws destroys its connection. */
export async function httpGuest(t: TestContext, handler: Handler): Promise<{ port: number; server: Server }> {
  const server = createServer({ requestTimeout: 0 }, (req, res) => {
    const run = async (): Promise<void> => handler(req, res);
    run().catch((e: unknown) => res.destroy(e as Error));
  });
  track(t, server);
  return { port: await listen(server), server };
}

/** A guest that speaks whatever the test wants. */
export async function rawGuest(t: TestContext, onSocket: (s: Socket) => void): Promise<number> {
  const server = createTcpServer({ allowHalfOpen: true }, (s) => {
    s.on("error", () => {});
    onSocket(s);
  });
  track(t, server);
  return listen(server);
}

/** A guest that reads one request head, then writes `reply` and, unless told otherwise, closes. */
export function cannedGuest(t: TestContext, reply: string | Buffer, end = true): Promise<number> {
  return rawGuest(t, (s) => {
    let seen = "";
    s.on("data", (d: Buffer) => {
      seen += d.toString("latin1");
      if (!seen.includes("\r\n\r\n")) return;
      seen = "";
      if (end) s.end(reply);
      else s.write(reply);
    });
  });
}

export interface Fixture {
  edge: Edge;
  port: number;
  origin: string;
  /** Host of a sandbox port, for the Host header. */
  host(port?: number, id?: string): string;
  /** What the next resolutions of ID answer; guests by their own port on 127.0.0.1 in run "r1" until set. */
  setTarget(fn: (id: string, port: number) => ReturnType<Resolve>): void;
}

export async function fixture(
  t: TestContext,
  options: {
    limits?: Partial<EdgeLimits>;
    edge?: Partial<EdgeOptions>;
    api?: RequestListener;
    apiBodyMs?: number;
    headMs?: number;
    tls?: TlsSource;
  } = {},
): Promise<Fixture> {
  let target: (id: string, port: number) => ReturnType<Resolve> = (id, port) =>
    id === ID ? { run: "r1", host: "127.0.0.1", port } : { error: "not_found" };
  const edge = createEdge({
    resolve: (id, port) => target(id, port),
    domain: `${DOMAIN}:8000`,
    logger: silentLogger,
    limits: { drainMs: 0, ...options.limits },
    ...options.edge,
  });
  const server = createFrontServer({
    edge,
    api: options.api ?? ((_req, res) => void res.end("api")),
    ...(options.apiBodyMs === undefined ? {} : { apiBodyMs: options.apiBodyMs }),
    ...(options.headMs === undefined ? {} : { headMs: options.headMs }),
    ...(options.tls === undefined ? {} : { tls: options.tls }),
  });
  track(t, server);
  const port = await listen(server);
  t.after(() => edge.close());
  return {
    edge,
    port,
    origin: `http://127.0.0.1:${port}`,
    host: (p = 3000, id = ID) => `${p}-${id}.${DOMAIN}`,
    setTarget: (fn) => {
      target = fn;
    },
  };
}

/** A connection whose input can be waited for. */
export class RawClient {
  readonly socket: Socket;
  readonly closed: Promise<NodeJS.ErrnoException | undefined>;
  text = "";
  #waiters: { test: (text: string) => boolean; resolve: () => void }[] = [];

  constructor(port: number, bytes?: string) {
    this.socket = connect(port, "127.0.0.1");
    let error: NodeJS.ErrnoException | undefined;
    this.socket.on("data", (d: Buffer) => {
      this.text += d.toString("latin1");
      this.#waiters = this.#waiters.filter((w) => {
        if (!w.test(this.text)) return true;
        w.resolve();
        return false;
      });
    });
    this.socket.on("error", (e) => (error = e));
    this.closed = new Promise((resolve) => this.socket.on("close", () => resolve(error)));
    if (bytes !== undefined) this.socket.write(bytes, "latin1");
  }

  /** Resolves when the input so far has `part`. */
  until(part: string): Promise<void> {
    if (this.text.includes(part)) return Promise.resolve();
    return new Promise((resolve) => this.#waiters.push({ test: (text) => text.includes(part), resolve }));
  }
}

export async function bodyOf(req: IncomingMessage): Promise<Buffer> {
  const parts: Buffer[] = [];
  for await (const part of req) parts.push(part as Buffer);
  return Buffer.concat(parts);
}

/** A promise with its resolver, for "the guest has seen it". */
export function event<T = void>(): { promise: Promise<T>; fire: (value: T) => void } {
  const { promise, resolve } = Promise.withResolvers<T>();
  return { promise, fire: resolve };
}

/** Resolves when the socket is gone, however it ended. */
export function gone(s: Socket): Promise<void> {
  return new Promise((resolve) => (s.closed ? resolve() : void s.once("close", () => resolve())));
}
