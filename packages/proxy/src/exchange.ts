import type { IncomingMessage, ServerResponse } from "node:http";
import type { Socket } from "node:net";
import { answer, type EdgeAnswer, endAfterRequest, PORT_CLOSED, NOT_FOUND, resetSocket } from "./answer.ts";
import { ChunkedDecoder } from "./chunked.ts";
import type { EdgeLimits } from "./limits.ts";
import type { RequestFraming } from "./request-head.ts";
import {
  HeadCollector,
  MalformedResponse,
  NEVER_TRAILER,
  parseResponseHead,
  type ResponseHead,
} from "./response-head.ts";
import type { Route } from "./route.ts";
import type { Target } from "./target.ts";
import { RAW_PROTOCOL, startTunnel } from "./tunnel.ts";
import type { ConnectionUser, GuestConnection, RunPool } from "./upstream.ts";

/** What an exchange tells its edge. */
export interface ExchangeHost {
  readonly limits: EdgeLimits;
  now(): number;
  /** Runs `write` when every event that waits has been read, see `WriteQueue`. */
  later(write: () => void): void;
  /** Called once, when the exchange holds nothing any more. */
  finished(x: Exchange): void;
  retried(): void;
  failed(x: Exchange, a: EdgeAnswer, why: string): void;
}

export interface ExchangeRequest {
  req: IncomingMessage;
  res: ServerResponse;
  route: Route;
  target: Target;
  pool: RunPool;
  head: string;
  framing: RequestFraming;
  expectContinue: boolean;
  /** An upgrade that we answer ourselves: bytes pass from then on, the guest sees no HTTP. */
  raw: boolean;
  /** Set for an upgrade: the client's socket and what it sent ahead. */
  upgrade: { socket: Socket; head: Buffer } | undefined;
}

/** Sent again after a dead connection only when doing it twice is the same as once (RFC 9110, 9.2.2). */
const IDEMPOTENT = new Set(["GET", "HEAD", "OPTIONS", "TRACE", "PUT", "DELETE"]);
/** Interim responses are small; a guest that sends them for ever is stopped by responseHeadBytes. */
const CONTINUE = 100;
const EARLY_HINTS = 103;
const SWITCHING = 101;

/** What we answer to the client of a raw connection. */
const RAW_HEAD: ResponseHead = {
  status: SWITCHING,
  reason: "",
  headers: [],
  framing: { kind: "none" },
  reusable: false,
  keepAliveMs: undefined,
  upgrade: RAW_PROTOCOL,
  hasDate: false,
};

type Phase = "connecting" | "waiting" | "head" | "body" | "tunnel" | "done";

/** One request and its response. Bytes are forwarded as they come; at most a socket buffer of each side is held. */
export class Exchange implements ConnectionUser {
  readonly r: ExchangeRequest;
  readonly #host: ExchangeHost;
  #phase: Phase = "connecting";
  #connection: GuestConnection | undefined;
  #collector: HeadCollector;
  #response: ResponseHead | undefined;
  #chunks: ChunkedDecoder | undefined;
  #lengthLeft = 0;
  #sawByte = false;
  #requestSent = false;
  #continueSent = false;
  #started: number;
  /** Monotonic time at which the present phase has lasted too long. */
  #deadline: number;
  #cancelContinue: (() => void) | undefined;

  constructor(host: ExchangeHost, r: ExchangeRequest) {
    this.#host = host;
    this.r = r;
    this.#collector = new HeadCollector(host.limits.responseHeadBytes);
    this.#started = host.now();
    this.#deadline = this.#started + host.limits.connectMs;
    r.res.once("close", () => this.#clientGone());
  }

  start(): void {
    const { pool, target, upgrade } = this.r;
    const reused = upgrade ? undefined : pool.take(target.port, this, this.#replayable, this.#started);
    if (reused) {
      this.#connection = reused;
      this.#waiting();
    } else this.#connection = pool.connect(target, this);
    this.#send();
  }

  get #replayable(): boolean {
    return this.r.framing.kind === "none" && IDEMPOTENT.has(this.r.req.method ?? "");
  }

  #waiting(): void {
    this.#phase = "waiting";
    this.#deadline = this.#host.now() + this.#host.limits.responseStartMs;
  }

  // --- request, client to guest

  #send(): void {
    const c = this.#connection as GuestConnection;
    if (this.r.raw) return;
    if (this.r.framing.kind === "none") {
      this.#requestSent = true;
      this.#host.later(() => {
        if (this.#connection === c) c.socket.write(this.r.head, "latin1");
      });
      return;
    }
    c.socket.write(this.r.head, "latin1");
    const { req, res, expectContinue } = this.r;
    const chunked = this.r.framing.kind === "chunked";
    if (expectContinue) this.#armContinue(res);
    req.on("data", (chunk: Buffer) => {
      if (this.#phase === "done" || this.#connection !== c) return;
      if (!writeBody(c.socket, chunk, chunked)) req.pause();
    });
    req.once("end", () => {
      if (this.#phase === "done" || this.#connection !== c) return;
      if (chunked) c.socket.write(lastChunk(req), "latin1");
      this.#requestSent = true;
      if (this.#phase === "waiting") this.#waiting();
      else if (this.#phase === "body" && this.#bodyEnded) this.#complete();
    });
  }

  /** A client may wait for 100 for ever, a guest's server may never send it. */
  #armContinue(res: ServerResponse): void {
    const timer = setTimeout(() => this.#sendContinue(res), this.#host.limits.continueMs);
    timer.unref();
    this.#cancelContinue = () => clearTimeout(timer);
  }

  #sendContinue(res: ServerResponse): void {
    this.#cancelContinue?.();
    if (this.#continueSent || res.headersSent || res.destroyed) return;
    this.#continueSent = true;
    res.writeContinue();
  }

  // --- connection

  connected(): void {
    if (this.r.raw) this.#switch(RAW_HEAD, Buffer.alloc(0));
    else if (this.#phase === "connecting") this.#waiting();
  }

  drained(): void {
    if (this.#phase === "waiting") this.#waiting();
    this.r.req.resume();
  }

  data(chunk: Buffer): void {
    this.#sawByte = true;
    try {
      if (this.#phase === "body") this.#bodyData(chunk, false);
      else this.#headData(chunk);
    } catch (e) {
      if (!(e instanceof MalformedResponse)) throw e;
      this.#fail(502, `The server in the sandbox sent a malformed response: ${e.message}`, e.message);
    }
  }

  ended(): void {
    if (this.#phase === "body" && this.#response?.framing.kind === "close") return this.#complete();
    this.#broken(undefined);
  }

  closed(error: NodeJS.ErrnoException | undefined): void {
    this.#broken(error);
  }

  #broken(error: NodeJS.ErrnoException | undefined): void {
    if (this.#phase === "done") return;
    const c = this.#connection;
    if (this.#phase === "connecting") return this.#connectFailed(error);
    if (c?.reused && !this.#sawByte && this.#replayable && !this.r.pool.ended && !this.r.res.destroyed) {
      c.reset();
      this.#host.retried();
      this.#phase = "connecting";
      this.#deadline = this.#host.now() + this.#host.limits.connectMs;
      this.#connection = this.r.pool.connect(this.r.target, this);
      this.#send();
      return;
    }
    const why = error ? (error.code ?? error.message) : "closed";
    this.#fail(502, "The server in the sandbox closed the connection before it had answered completely", why);
  }

  #connectFailed(error: NodeJS.ErrnoException | undefined): void {
    if (error?.code === "ECONNREFUSED" || error?.code === "ECONNRESET") {
      const { sandboxId, port } = this.r.route;
      this.#end({ status: 502, message: PORT_CLOSED, sandboxId, port }, error.code);
    } else if (this.r.target.tls) {
      this.#fail(
        502,
        "The server on this port of the sandbox did not answer with TLS, which httpsPorts asks for",
        error?.code ?? "closed",
      );
    } else this.#fail(502, "The sandbox could not be reached", error?.code ?? "closed");
  }

  // --- response, guest to client

  #headData(chunk: Buffer): void {
    let rest = chunk;
    while (this.#phase === "waiting" || this.#phase === "head" || this.#phase === "connecting") {
      const found = this.#collector.push(rest);
      if (!found) {
        if (this.#phase !== "head") {
          this.#phase = "head";
          this.#deadline = this.#host.now() + this.#host.limits.responseHeadMs;
        }
        return;
      }
      rest = rest.subarray(found.used);
      const head = parseResponseHead(found.text, this.r.req.method ?? "GET");
      if (head.status === SWITCHING) return this.#switch(head, rest);
      if (head.status >= 200) return this.#begin(head, rest);
      this.#interim(head);
      if (rest.length === 0) return;
    }
  }

  #interim(head: ResponseHead): void {
    const { res, upgrade } = this.r;
    if (upgrade) return;
    if (head.status === CONTINUE) {
      if (this.r.expectContinue) this.#sendContinue(res);
    } else if (head.status === EARLY_HINTS) {
      const links: string[] = [];
      for (let i = 0; i < head.headers.length; i += 2) {
        if (head.headers[i]?.toLowerCase() === "link") links.push(head.headers[i + 1] as string);
      }
      try {
        if (links.length > 0) res.writeEarlyHints({ link: links });
      } catch {
        // node accepts only plain Link values; hints may be left out.
      }
    }
  }

  #begin(head: ResponseHead, rest: Buffer): void {
    const { res } = this.r;
    this.#cancelContinue?.();
    this.#response = head;
    this.#phase = "body";
    this.#deadline = Number.POSITIVE_INFINITY;
    if (head.framing.kind === "chunked") this.#chunks = new ChunkedDecoder();
    if (head.framing.kind === "length") this.#lengthLeft = head.framing.bytes;
    if (head.hasDate) res.sendDate = false;
    res.writeHead(head.status, head.reason, head.headers);
    if (this.#bodyEnded) {
      if (rest.length > 0) this.#dropConnection();
      this.#complete();
    } else if (rest.length > 0) this.#bodyData(rest, true);
    else res.flushHeaders();
  }

  get #bodyEnded(): boolean {
    const kind = this.#response?.framing.kind;
    if (kind === "chunked") return this.#chunks?.done === true;
    if (kind === "length") return this.#lengthLeft === 0;
    return kind === "none";
  }

  #bodyData(chunk: Buffer, first: boolean): void {
    const { res } = this.r;
    let used = chunk.length;
    let more = true;
    switch (this.#response?.framing.kind) {
      case "chunked":
        used = (this.#chunks as ChunkedDecoder).push(chunk, (data) => {
          more = res.write(data) && more;
        });
        break;
      case "length": {
        used = Math.min(chunk.length, this.#lengthLeft);
        const data = used === chunk.length ? chunk : chunk.subarray(0, used);
        this.#lengthLeft -= used;
        if (this.#lengthLeft === 0 && this.#requestSent) {
          // One write for the head and a small body.
          if (used < chunk.length) this.#dropConnection();
          return this.#complete(data);
        }
        more = res.write(data);
        break;
      }
      case "close":
        more = res.write(chunk);
        break;
      case "none":
      case undefined:
        used = 0;
    }
    if (this.#bodyEnded) {
      // Bytes after the response belong to no request.
      if (used < chunk.length) this.#dropConnection();
      this.#complete();
      return;
    }
    if (first && !res.headersSent) res.flushHeaders();
    if (!more) {
      const c = this.#connection as GuestConnection;
      c.socket.pause();
      res.once("drain", () => {
        if (this.#connection === c) c.socket.resume();
      });
    }
  }

  /** The response is whole. The connection is reused only when the request was sent whole, too. */
  #complete(last?: Buffer): void {
    if (this.#phase === "done") return;
    const { req, res, pool } = this.r;
    const c = this.#connection;
    const head = this.#response as ResponseHead;
    this.#phase = "done";
    if (c) {
      this.#connection = undefined;
      if (this.#requestSent && head.reusable) pool.release(c, head.keepAliveMs, this.#host.now());
      else c.reset();
    }
    if (this.#chunks && this.#chunks.trailers.length > 0) res.addTrailers(this.#chunks.trailers);
    if (last) this.#host.later(() => endWith(res, last));
    else if (this.#requestSent || head.framing.kind !== "length") res.end();
    else endAfterRequest(req, res, this.#host.limits.lingerMs);
    this.#cleanUp();
  }

  #switch(head: ResponseHead, rest: Buffer): void {
    const { upgrade, res } = this.r;
    if (!upgrade) throw new MalformedResponse("it switched protocols without being asked");
    const c = this.#connection as GuestConnection;
    this.#phase = "tunnel";
    this.#deadline = Number.POSITIVE_INFINITY;
    res.detachSocket(upgrade.socket);
    startTunnel(c, upgrade, head, rest, () => this.#cleanUp());
  }

  // --- ends

  #dropConnection(): void {
    this.#connection?.reset();
    this.#connection = undefined;
  }

  #fail(status: number, message: string, why: string): void {
    const { sandboxId, port } = this.r.route;
    this.#end({ status, message, sandboxId, port }, why);
  }

  #end(a: EdgeAnswer, why: string): void {
    if (this.#phase === "done" || this.#phase === "tunnel") return;
    this.#phase = "done";
    this.#dropConnection();
    this.#host.failed(this, a, why);
    answer(this.r.req, this.r.res, a, this.#host.limits.lingerMs);
    this.#cleanUp();
  }

  #cleanUp(): void {
    this.#cancelContinue?.();
    this.#host.finished(this);
  }

  /** The client is gone, or its response has been flushed. */
  #clientGone(): void {
    if (this.#phase === "done" || this.#phase === "tunnel") return;
    this.#phase = "done";
    this.#dropConnection();
    this.#cleanUp();
  }

  /** Called about once a second. */
  check(now: number): void {
    if (now < this.#deadline) return;
    if (this.#phase === "connecting") {
      this.#fail(504, "The sandbox did not accept the connection in time", "connect timeout");
    } else if (this.#phase === "head") {
      this.#fail(504, "The server in the sandbox did not finish its response head in time", "head timeout");
    } else if (this.#phase === "waiting") {
      // The client is still sending and the guest takes it all: it is not the guest who is late.
      if (!this.#requestSent && this.#connection?.socket.writableLength === 0) return this.#waiting();
      this.#fail(504, "The server in the sandbox did not answer in time", "response timeout");
    }
  }

  /**
   * The VM has ended. A response that has begun is reset: a clean end would look like a whole one. A client without any
   * byte of the answer gets the same 502 as the next request would.
   */
  runEnded(): void {
    if (this.#phase === "tunnel") {
      const c = this.#connection;
      this.#connection = undefined;
      c?.reset();
      if (this.r.upgrade) resetSocket(this.r.upgrade.socket);
      this.#cleanUp();
      return;
    }
    this.#end({ status: 502, message: NOT_FOUND, sandboxId: this.r.route.sandboxId }, "run ended");
  }
}

/** As text a small body is one write together with the head; as bytes node hands both to the kernel as a list. */
const ONE_WRITE_BYTES = 16 * 1024;

function endWith(res: ServerResponse, body: Buffer): void {
  if (body.length <= ONE_WRITE_BYTES) res.end(body.toString("latin1"), "latin1");
  else res.end(body);
}

function writeBody(socket: Socket, chunk: Buffer, chunked: boolean): boolean {
  if (!chunked) return socket.write(chunk);
  socket.cork();
  socket.write(`${chunk.length.toString(16)}\r\n`, "latin1");
  socket.write(chunk);
  const more = socket.write("\r\n", "latin1");
  socket.uncork();
  return more;
}

function lastChunk(req: IncomingMessage): string {
  let text = "0\r\n";
  const raw = req.rawTrailers;
  for (let i = 0; i < raw.length; i += 2) {
    const name = raw[i] as string;
    if (!NEVER_TRAILER.has(name.toLowerCase())) text += `${name}: ${raw[i + 1]}\r\n`;
  }
  return `${text}\r\n`;
}
