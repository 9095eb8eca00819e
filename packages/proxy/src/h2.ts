/**
 * HTTP/2 of clients. Each stream is served as one HTTP/1.1 request on a connection within the process, so that the edge and
 * the API have one way in, one set of limits and one set of refusals.
 */
import {
  constants,
  type Http2Session,
  type IncomingHttpHeaders,
  type OutgoingHttpHeaders,
  performServerHandshake,
  type ServerHttp2Stream,
} from "node:http2";
import type { TLSSocket } from "node:tls";
import { ChunkedDecoder } from "./chunked.ts";
import { PipeEnd } from "./pipe.ts";
import { HeadCollector, parseResponseHead, type ResponseHead } from "./response-head.ts";

const { NGHTTP2_INTERNAL_ERROR, NGHTTP2_NO_ERROR, NGHTTP2_PROTOCOL_ERROR } = constants;

const SETTINGS = {
  maxConcurrentStreams: 256,
  maxHeaderListSize: 64 * 1024,
  initialWindowSize: 1024 * 1024,
  enablePush: false,
};
/** Bytes that a connection may have under way to us, of all its streams together. */
const CONNECTION_WINDOW_BYTES = 8 * 1024 * 1024;
/** Of our own server: an error of ours is not to fill memory. */
const RESPONSE_HEAD_BYTES = 128 * 1024;
const TOKEN_LIKE = /^[!#$%&'*+\-.^_`|~0-9a-z]+$/;
const METHOD = /^[A-Z][A-Z-]{0,31}$/;
const TARGET = /^(?:\/[\x21-\x7e\x80-\xff]*|\*)$/;
const AUTHORITY = /^[A-Za-z0-9.\-_:[\]]{1,300}$/;
// biome-ignore lint: the class is the definition
const VALUE = /^[\t\x20-\x7e\x80-\xff]*$/;
/** They belong to a connection of HTTP/1.1, or are written anew. */
const DROPPED = new Set(
  "connection keep-alive proxy-connection transfer-encoding upgrade http2-settings host content-length te cookie".split(
    " ",
  ),
);

/** Gives one connection of HTTP/1.1 to the server. */
export type Serve = (connection: PipeEnd) => void;

export interface H2Options {
  serve: Serve;
  /** A connection without an open stream is closed after this (ms). */
  idleMs: number;
}

/** Takes over a TLS connection on which HTTP/2 was agreed. */
export function serveH2(socket: TLSSocket, o: H2Options): Http2Session {
  const session = performServerHandshake(socket, { settings: SETTINGS });
  session.setLocalWindowSize(CONNECTION_WINDOW_BYTES);
  let open = 0;
  session.setTimeout(o.idleMs, () => {
    if (open === 0) session.close();
  });
  session.on("error", () => session.destroy());
  session.on("stream", (stream, headers, _flags, raw) => {
    open++;
    stream.once("close", () => open--);
    new StreamServer(stream, socket, o.serve).start(headers, raw);
  });
  return session;
}

/** The head of the request in HTTP/1.1; undefined where it is not one. `length`: bytes of the body, if said. */
function requestHead(
  headers: IncomingHttpHeaders,
  raw: readonly string[],
  hasBody: boolean,
): { head: string; length: number | undefined } | undefined {
  const { ":method": method = "", ":path": path = "" } = headers;
  const authority = headers[":authority"] ?? headers.host ?? "";
  // Two names of the host would let the edge and a guest disagree about whom this is for.
  const two = headers[":authority"] !== undefined && (headers.host ?? headers[":authority"]) !== headers[":authority"];
  if (two || !METHOD.test(method) || !TARGET.test(path) || !AUTHORITY.test(authority)) return undefined;
  let head = `${method} ${path} HTTP/1.1\r\nHost: ${authority}\r\nConnection: close\r\n`;
  const cookies: string[] = [];
  let length: string | undefined;
  for (let i = 0; i < raw.length; i += 2) {
    const name = raw[i] as string;
    const value = raw[i + 1] as string;
    if (name.startsWith(":")) continue;
    if (!TOKEN_LIKE.test(name) || !VALUE.test(value)) return undefined;
    if (name === "cookie") cookies.push(value);
    if (name === "content-length") length = value;
    if (name === "te" && value === "trailers") head += "te: trailers\r\n";
    if (!DROPPED.has(name)) head += `${name}: ${value}\r\n`;
  }
  // RFC 9113, 8.2.3: a list of cookies may come in parts.
  if (cookies.length > 0) head += `cookie: ${cookies.join("; ")}\r\n`;
  if (length !== undefined && !/^[0-9]{1,15}$/.test(length)) return undefined;
  if (!hasBody && Number(length ?? 0) > 0) return undefined;
  if (length !== undefined) head += `content-length: ${length}\r\n`;
  else if (hasBody) head += "transfer-encoding: chunked\r\n";
  else if (method === "POST" || method === "PUT" || method === "PATCH") head += "content-length: 0\r\n";
  return { head: `${head}\r\n`, length: length === undefined ? undefined : Number(length) };
}

/** Header fields as node wants them: lower case, repeated ones as a list. */
function fields(status: number, flat: readonly string[]): OutgoingHttpHeaders {
  const out: Record<string, string | number | string[]> = { ":status": status };
  for (let i = 0; i < flat.length; i += 2) {
    const name = (flat[i] as string).toLowerCase();
    const value = flat[i + 1] as string;
    const before = out[name];
    if (before === undefined) out[name] = value;
    else if (name === "content-length") continue;
    else out[name] = Array.isArray(before) ? [...before, value] : [String(before), value];
  }
  return out;
}

/** One stream: its request goes into the connection, what comes back is its response. */
class StreamServer {
  readonly #stream: ServerHttp2Stream;
  readonly #pipe: PipeEnd;
  readonly #collector = new HeadCollector(RESPONSE_HEAD_BYTES);
  readonly #serve: () => void;
  #method = "GET";
  #response: ResponseHead | undefined;
  #chunks: ChunkedDecoder | undefined;
  #left = 0;
  #done = false;

  constructor(stream: ServerHttp2Stream, socket: TLSSocket, serve: Serve) {
    const [client, server] = PipeEnd.pair({ remoteAddress: socket.remoteAddress, encrypted: true });
    this.#stream = stream;
    this.#pipe = client;
    this.#serve = () => serve(server);
  }

  start(headers: IncomingHttpHeaders, raw: readonly string[]): void {
    const stream = this.#stream;
    const pipe = this.#pipe;
    stream.on("error", () => {});
    pipe.on("error", () => {});
    const request = requestHead(headers, raw, !stream.endAfterHeaders);
    if (!request) {
      stream.respond({ ":status": 400 }, { endStream: true });
      stream.close(NGHTTP2_PROTOCOL_ERROR);
      return;
    }
    this.#method = headers[":method"] ?? "GET";
    stream.once("close", () => {
      if (!this.#done) pipe.resetAndDestroy();
    });
    pipe.on("data", (chunk: Buffer) => this.#data(chunk));
    pipe.once("close", () => {
      if (!this.#done) stream.close(NGHTTP2_INTERNAL_ERROR);
    });
    pipe.once("end", () => {
      if (!this.#done) pipe.resetAndDestroy();
    });
    stream.on("drain", () => pipe.resume());
    this.#serve();
    pipe.write(request.head, "latin1");
    if (!stream.endAfterHeaders) this.#body(request.length);
  }

  #body(length: number | undefined): void {
    const stream = this.#stream;
    const pipe = this.#pipe;
    let left = length ?? Number.POSITIVE_INFINITY;
    pipe.on("drain", () => stream.resume());
    stream.on("data", (chunk: Buffer) => {
      left -= chunk.length;
      if (left < 0) stream.close(NGHTTP2_PROTOCOL_ERROR);
      if (left < 0 || pipe.destroyed || pipe.writableEnded) return;
      if (length !== undefined) {
        if (!pipe.write(chunk)) stream.pause();
        return;
      }
      pipe.cork();
      pipe.write(`${chunk.length.toString(16)}\r\n`, "latin1");
      pipe.write(chunk);
      if (!pipe.write("\r\n", "latin1")) stream.pause();
      pipe.uncork();
    });
    stream.on("end", () => {
      if (stream.aborted || pipe.destroyed || pipe.writableEnded) return;
      if (length === undefined) pipe.write("0\r\n\r\n", "latin1");
      else if (left > 0) stream.close(NGHTTP2_PROTOCOL_ERROR);
    });
  }

  #data(chunk: Buffer): void {
    try {
      let rest = chunk;
      while (!this.#response) {
        const found = this.#collector.push(rest);
        if (!found) return;
        rest = rest.subarray(found.used);
        this.#head(parseResponseHead(found.text, this.#method));
      }
      if (!this.#done) this.#responseBody(rest);
    } catch {
      // The server is ours: only a stream that has ended meanwhile leads here.
      this.#pipe.resetAndDestroy();
    }
  }

  #head(head: ResponseHead): void {
    const stream = this.#stream;
    if (stream.destroyed) {
      this.#pipe.resetAndDestroy();
      return;
    }
    if (head.status < 200) {
      if (head.status !== 101) stream.additionalHeaders(fields(head.status, head.headers));
      return;
    }
    this.#response = head;
    const { framing } = head;
    const empty = framing.kind === "none" || (framing.kind === "length" && framing.bytes === 0);
    if (framing.kind === "length") this.#left = framing.bytes;
    if (framing.kind === "chunked") {
      this.#chunks = new ChunkedDecoder();
      stream.on("wantTrailers", () => {
        const trailers = (this.#chunks?.trailers ?? []).flat();
        const { ":status": _, ...rest } = fields(0, trailers);
        stream.sendTrailers(rest);
      });
    }
    stream.respond(fields(head.status, head.headers), {
      endStream: empty,
      waitForTrailers: framing.kind === "chunked",
    });
    if (empty) this.#complete();
  }

  #responseBody(chunk: Buffer): void {
    const stream = this.#stream;
    let more = true;
    if (this.#chunks) {
      this.#chunks.push(chunk, (data) => {
        more = stream.write(data) && more;
      });
      if (this.#chunks.done) return this.#complete(true);
    } else if (chunk.length > 0) {
      this.#left -= chunk.length;
      more = stream.write(chunk);
      if (this.#left <= 0) return this.#complete(true);
    }
    if (!more) this.#pipe.pause();
  }

  /** A client that still sends a body that nobody reads is told to stop (RFC 9113, 8.1). */
  #complete(end = false): void {
    this.#done = true;
    const stream = this.#stream;
    if (end) stream.end();
    this.#pipe.end();
    this.#pipe.resume();
    if (stream.readableEnded || stream.endAfterHeaders) return;
    if (stream.writableFinished) stream.close(NGHTTP2_NO_ERROR);
    else
      stream.once("finish", () => {
        if (!stream.readableEnded) stream.close(NGHTTP2_NO_ERROR);
      });
  }
}
