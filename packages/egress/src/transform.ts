import { once } from "node:events";
import {
  createServer,
  type IncomingMessage,
  request,
  type RequestOptions,
  type Server,
  type ServerResponse,
} from "node:http";
import { Agent } from "node:https";
import type { Socket } from "node:net";
import { Duplex } from "node:stream";
import { createSecureContext, connect as secureConnect, type SecureContext, TLSSocket } from "node:tls";
import { AenvError, type Logger, messageOf } from "@aenv/base";
import type { Authority, HostTransform } from "@aenv/network";

/** A server certificate (chain, PEM) of the authority for one name. */
export type Issue = (authority: Authority, name: string) => { cert: string; key: string };

export interface Transformed {
  /** The guest's side; it has sent a TLS hello that is not read yet. */
  socket: Socket;
  name: string;
  authority: Authority;
  transform: HostTransform;
  /** A connection to the real server, or through the proxy to it. */
  dial(): Promise<Socket>;
}

const MAX_CONTEXTS = 1000;
/** Certificates are issued anew after this. */
const CONTEXT_MS = 24 * 3600 * 1000;
const HANDSHAKE_MS = 15_000;
const HEADERS_MS = 60_000;
const MAX_HEADERS = 64 * 1024;
/** They belong to one hop (RFC 9110, 7.6.1). */
const HOP = new Set(
  "connection keep-alive proxy-connection te transfer-encoding upgrade proxy-authenticate".split(" "),
);

/**
 * Ends the guest's TLS with a certificate of its sandbox's authority, and speaks to the real server, whose certificate must
 * be right for the name: what a transform adds is told to nobody else. HTTP/1.1 on both sides.
 */
export class Transformer {
  readonly #issue: Issue;
  readonly #logger: Logger;
  readonly #now: () => number;
  readonly #server: Server;
  readonly #contexts = new Map<string, { until: number; context: SecureContext }>();
  readonly #connections = new WeakMap<Duplex, Transformed & { agent: Agent }>();

  constructor(options: { issue: Issue; logger: Logger; now: () => number }) {
    this.#issue = options.issue;
    this.#logger = options.logger;
    this.#now = options.now;
    this.#server = createServer({ maxHeaderSize: MAX_HEADERS, headersTimeout: HEADERS_MS, requestTimeout: 0 });
    this.#server.on("request", (req: IncomingMessage, res: ServerResponse) => this.#forward(req, res));
    this.#server.on("upgrade", (req: IncomingMessage, socket: Duplex, head: Buffer) =>
      this.#upgrade(req, socket, head),
    );
    this.#server.on("clientError", (_e, socket) => socket.destroy());
  }

  serve(t: Transformed): void {
    const secure = new TLSSocket(t.socket, {
      isServer: true,
      secureContext: this.#context(t.authority, t.name),
      ALPNProtocols: ["http/1.1"],
    });
    const agent = new Agent({ keepAlive: true, maxSockets: 1 });
    const upstream = async (): Promise<Duplex> => {
      const socket = await t.dial();
      const secured = secureConnect({ socket, servername: t.name, ALPNProtocols: ["http/1.1"] });
      await once(secured, "secureConnect");
      return secured;
    };
    agent.createConnection = callbackify(upstream);
    this.#connections.set(secure, { ...t, agent });
    const timer = setTimeout(() => t.socket.destroy(), HANDSHAKE_MS);
    secure.once("secure", () => clearTimeout(timer));
    secure.on("error", (e) => {
      this.#logger.debug({ name: t.name, error: messageOf(e) }, "transformed connection ended");
      t.socket.destroy();
    });
    t.socket.once("close", () => {
      clearTimeout(timer);
      agent.destroy();
      secure.destroy();
    });
    this.#server.emit("connection", secure);
  }

  #context(authority: Authority, name: string): SecureContext {
    const key = `${name} ${authority.cert}`;
    const known = this.#contexts.get(key);
    if (known && known.until > this.#now()) return known.context;
    const context = createSecureContext(this.#issue(authority, name));
    this.#contexts.delete(key);
    this.#contexts.set(key, { until: this.#now() + CONTEXT_MS, context });
    for (const oldest of this.#contexts.keys()) {
      if (this.#contexts.size <= MAX_CONTEXTS) break;
      this.#contexts.delete(oldest);
    }
    return context;
  }

  /** The request as it goes on; undefined: it is for another host than the connection. */
  #outgoing(req: IncomingMessage, keep: ReadonlySet<string>): RequestOptions | undefined {
    const c = this.#connections.get(req.socket);
    const host = req.headers.host?.toLowerCase().replace(/:443$/, "").replace(/\.$/, "");
    if (!c || host !== c.name) return undefined;
    const set = c.transform.headers;
    const headers: string[] = [];
    for (let i = 0; i < req.rawHeaders.length; i += 2) {
      const name = req.rawHeaders[i] ?? "";
      const low = name.toLowerCase();
      if (!(low in set) && (!HOP.has(low) || keep.has(low))) headers.push(name, req.rawHeaders[i + 1] ?? "");
    }
    for (const [name, value] of Object.entries(set)) headers.push(name, value);
    return {
      agent: c.agent,
      host: c.name,
      port: 443,
      method: req.method ?? "GET",
      path: req.url ?? "/",
      // Pairs in a row, as they came: names may repeat.
      headers,
      setDefaultHeaders: false,
      protocol: "https:",
    };
  }

  #forward(req: IncomingMessage, res: ServerResponse): void {
    const options = this.#outgoing(req, new Set(["transfer-encoding"]));
    if (!options) {
      res.writeHead(421, { "content-type": "text/plain", connection: "close" });
      res.end("This connection is for another host.\n");
      return;
    }
    const out = request(options);
    out.on("response", (answer) => {
      const headers: string[] = [];
      for (let i = 0; i < answer.rawHeaders.length; i += 2) {
        const name = answer.rawHeaders[i] ?? "";
        if (!HOP.has(name.toLowerCase())) headers.push(name, answer.rawHeaders[i + 1] ?? "");
      }
      res.writeHead(answer.statusCode ?? 502, answer.statusMessage ?? "", headers);
      answer.pipe(res);
      answer.on("error", () => res.destroy());
      answer.on("aborted", () => res.destroy());
    });
    out.on("error", (e) => {
      if (res.headersSent) {
        res.destroy();
        return;
      }
      res.writeHead(502, { "content-type": "text/plain", connection: "close" });
      res.end(`The egress gateway could not reach the host: ${messageOf(e)}\n`);
    });
    req.on("error", () => out.destroy());
    res.on("close", () => {
      if (!res.writableFinished) out.destroy();
    });
    req.pipe(out);
  }

  #upgrade(req: IncomingMessage, socket: Duplex, head: Buffer): void {
    socket.on("error", () => socket.destroy());
    const options = this.#outgoing(req, new Set(["connection", "upgrade"]));
    if (!options) return void socket.end("HTTP/1.1 421 Misdirected Request\r\nConnection: close\r\n\r\n");
    const out = request(options);
    const line = (answer: IncomingMessage): string => {
      const pairs: string[] = [];
      for (let i = 0; i < answer.rawHeaders.length; i += 2)
        pairs.push(`${answer.rawHeaders[i]}: ${answer.rawHeaders[i + 1]}\r\n`);
      return `HTTP/1.1 ${answer.statusCode} ${answer.statusMessage}\r\n${pairs.join("")}\r\n`;
    };
    out.on("upgrade", (answer, upstream: Socket, rest: Buffer) => {
      socket.write(line(answer));
      if (rest.length > 0) socket.write(rest);
      if (head.length > 0) upstream.write(head);
      upstream.on("error", () => socket.destroy());
      upstream.on("close", () => socket.destroy());
      socket.on("close", () => upstream.destroy());
      socket.pipe(upstream).pipe(socket);
    });
    out.on("response", (answer) => {
      // Not taken up: the answer has no end that the guest's side could keep apart from what follows.
      socket.write(
        line(answer)
          .replace(/\r\ntransfer-encoding:[^\r]*/i, "")
          .replace("\r\n", "\r\nConnection: close\r\n"),
      );
      answer.pipe(socket);
    });
    out.on("error", () => socket.destroy());
    out.end();
  }
}

/** A function that gives a connection, in the form that an agent asks for it. */
function callbackify(make: () => Promise<Duplex>): Agent["createConnection"] {
  return (_options, done) => {
    const settle = (error: Error | null, socket: Duplex | undefined): void => done?.(error, socket as Duplex);
    void make().then(
      (socket) => setImmediate(settle, null, socket),
      (e: unknown) => setImmediate(settle, AenvError.from(e, "connect"), undefined),
    );
    return undefined;
  };
}
