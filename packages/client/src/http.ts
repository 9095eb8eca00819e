import { Agent, type IncomingMessage, request } from "node:http";
import type { Readable, Writable } from "node:stream";
import { buffer } from "node:stream/consumers";
import { pipeline } from "node:stream/promises";
import { AenvError, deadline, ERROR_CODES, type ErrorCode, errnoOf, sleep } from "@aenv/base";

export interface Reply {
  status: number;
  headers: IncomingMessage["headers"];
  body: unknown;
}

export interface CallOptions {
  /** Lists are joined by commas, undefined is left out. */
  query?: Record<string, string | number | readonly string[] | undefined>;
  body?: unknown;
  headers?: Record<string, string>;
  signal?: AbortSignal | undefined;
  /** The same call may be sent twice without harm. */
  repeatable?: boolean;
}

/** A control reply holds lists of records, never file contents. */
const MAX_REPLY_BYTES = 64 * 1024 * 1024;
const MAX_TRIES = 4;
const MAX_RETRY_AFTER_S = 10;

/** One base URL, one key, one keep-alive agent. Every failure leaves as an AenvError. */
export class HttpClient implements Disposable {
  readonly base: string;
  readonly #headers: Record<string, string>;
  readonly #timeoutMs: number;
  readonly #agent: Agent;
  readonly #request: typeof request;

  constructor(base: string, headers: Record<string, string>, timeoutMs: number) {
    const url = parseBase(base);
    this.base = url.href.replace(/\/+$/, "");
    this.#headers = headers;
    this.#timeoutMs = timeoutMs;
    // TLS costs 10 ms to load, which a command line on the node itself does not need to pay.
    const { Agent: AgentOf, request: requestOf } =
      url.protocol === "https:" ? process.getBuiltinModule("node:https") : { Agent, request };
    this.#agent = new AgentOf({ keepAlive: true });
    this.#request = requestOf;
  }

  /** Resolves with a 2xx reply; everything else is thrown. */
  async call(method: string, path: string, options: CallOptions = {}): Promise<Reply> {
    const signal = deadline(this.#timeoutMs, options.signal);
    for (let attempt = 1; ; attempt++) {
      const reply = await this.#once(method, path, options, signal);
      if (reply.status >= 200 && reply.status < 300) return reply;
      const wait = retryAfter(reply, options.repeatable ?? method === "GET");
      if (wait === undefined || attempt >= MAX_TRIES) throw errorOf(reply, `${method} ${path}`);
      try {
        await sleep(wait * 1000, signal);
      } catch (e) {
        throw this.#failed(e);
      }
    }
  }

  #once(method: string, path: string, options: CallOptions, signal: AbortSignal): Promise<Reply> {
    const url = new URL(this.base + path);
    for (const [k, v] of Object.entries(options.query ?? {}))
      if (v !== undefined) url.searchParams.set(k, Array.isArray(v) ? v.join(",") : String(v));
    const body = options.body === undefined ? undefined : JSON.stringify(options.body);
    return new Promise((resolve, reject) => {
      const fail = (e: unknown): void => reject(this.#failed(e));
      const req = this.#request(
        url,
        {
          method,
          agent: this.#agent,
          signal,
          headers: {
            accept: "application/json",
            ...this.#headers,
            ...options.headers,
            ...(body === undefined
              ? {}
              : { "content-type": "application/json", "content-length": Buffer.byteLength(body) }),
          },
        },
        (res) => {
          let size = 0;
          const chunks: Buffer[] = [];
          res.on("data", (c: Buffer) => {
            size += c.length;
            if (size > MAX_REPLY_BYTES) req.destroy(new AenvError("TOO_LARGE", "The server's reply is too large"));
            else chunks.push(c);
          });
          res.on("error", fail);
          res.on("end", () =>
            resolve({
              status: res.statusCode ?? 0,
              headers: res.headers,
              body: parseBody(Buffer.concat(chunks).toString(), res.headers["content-type"]),
            }),
          );
        },
      );
      req.on("error", fail);
      req.end(body);
    });
  }

  /** Bytes of any length one way; what comes back is parsed, unless it goes to `to`. Sent once. */
  async stream(
    method: string,
    path: string,
    o: { from?: Readable; to?: Writable; signal?: AbortSignal | undefined },
  ): Promise<unknown> {
    const { from, to, signal } = o;
    try {
      const res = await new Promise<IncomingMessage>((resolve, reject) => {
        const req = this.#request(new URL(this.base + path), {
          method,
          agent: this.#agent,
          headers: { ...this.#headers, ...(from ? { "content-type": "application/octet-stream" } : {}) },
          ...(signal === undefined ? {} : { signal }),
        });
        req.on("error", reject);
        req.on("response", resolve);
        // A server that refuses answers before it has read everything.
        if (from) void pipeline(from, req).catch((e: unknown) => req.destroy(e as Error));
        else req.end();
      });
      const status = res.statusCode ?? 0;
      if (to && status < 300) {
        await pipeline(res, to);
        return undefined;
      }
      const body = parseBody((await buffer(res)).toString(), res.headers["content-type"]);
      if (status >= 300) throw errorOf({ status, body }, `${method} ${path}`);
      return body;
    } catch (e) {
      signal?.throwIfAborted();
      throw this.#failed(e);
    }
  }

  #failed(e: unknown): AenvError {
    if (e instanceof AenvError) return e;
    // An abort carries the caller's reason.
    if (e instanceof Error && e.cause instanceof AenvError) return e.cause;
    const code = errnoOf(e);
    const connect: Record<string, string> = {
      ECONNREFUSED: "nothing listens there",
      ENOTFOUND: "the host name is unknown",
      EAI_AGAIN: "the host name could not be looked up",
      EHOSTUNREACH: "the host is unreachable",
      ENETUNREACH: "the network is unreachable",
      ECONNRESET: "the connection was reset",
      ETIMEDOUT: "the connection timed out",
      EPIPE: "the connection was closed",
    };
    const why = code === undefined ? undefined : connect[code];
    if (why !== undefined)
      return new AenvError("UNAVAILABLE", `Cannot reach the server at ${this.base}: ${why}`, {
        cause: e,
        hint: "Start the node with npm run up, or name another one with --api-url or AENV_API_URL.",
      });
    if (e instanceof Error && (e.name === "TimeoutError" || (e.cause as Error | undefined)?.name === "TimeoutError"))
      return new AenvError("DEADLINE", `The server at ${this.base} did not answer in ${this.#timeoutMs / 1000} s`, {
        cause: e,
      });
    return AenvError.from(e, `request to ${this.base}`);
  }

  [Symbol.dispose](): void {
    this.#agent.destroy();
  }
}

function parseBase(text: string): URL {
  let url: URL | undefined;
  try {
    url = new URL(text);
  } catch {
    // Reported below with the text.
  }
  if (url === undefined || (url.protocol !== "http:" && url.protocol !== "https:"))
    throw new AenvError("INVALID_ARGUMENT", `${JSON.stringify(text)} is not an http or https URL`, {
      hint: "Write it with its scheme, as in http://localhost:8000.",
    });
  return url;
}

function parseBody(text: string, type: string | undefined): unknown {
  if (text === "") return undefined;
  if (type !== undefined && !type.includes("json")) return text;
  try {
    return JSON.parse(text);
  } catch {
    return text;
  }
}

/** Seconds to wait before the same call, or undefined when it must not be repeated. */
function retryAfter(reply: Reply, repeatable: boolean): number | undefined {
  if (reply.headers["should-retry"] === "false") return undefined;
  if (reply.status !== 429 && !(reply.status === 503 && repeatable)) return undefined;
  const seconds = Number(reply.headers["retry-after"] ?? Number.NaN);
  return Number.isInteger(seconds) && seconds >= 0 && seconds <= MAX_RETRY_AFTER_S ? seconds : undefined;
}

const BY_STATUS: Readonly<Record<number, ErrorCode>> = {
  400: "INVALID_ARGUMENT",
  401: "UNAUTHENTICATED",
  403: "PERMISSION_DENIED",
  404: "NOT_FOUND",
  409: "CONFLICT",
  413: "TOO_LARGE",
  429: "RATE_LIMITED",
  500: "INTERNAL",
  501: "UNIMPLEMENTED",
  502: "GUEST_FAILED",
  503: "UNAVAILABLE",
  504: "DEADLINE",
  507: "NO_SPACE",
};

/** From the body of an error, which may be anything. `request`: what was asked for. */
export function errorOf(reply: Pick<Reply, "status" | "body">, request: string): AenvError {
  const body = (typeof reply.body === "object" && reply.body !== null ? reply.body : {}) as Record<string, unknown>;
  const named = typeof body["error_code"] === "string" ? body["error_code"].toUpperCase() : "";
  const code = named in ERROR_CODES ? (named as ErrorCode) : (BY_STATUS[reply.status] ?? "INTERNAL");
  const text = typeof body["message"] === "string" ? body["message"] : `${request} was answered with ${reply.status}`;
  const data = { status: reply.status, request };
  // The server appends what to do: the hint of the code, which ours show on a line of its own, or a better one.
  const { hint } = ERROR_CODES[code];
  if (text.endsWith(` ${hint}`)) return new AenvError(code, text.slice(0, -hint.length - 1), { data });
  const ours = typeof body["error_code"] === "string";
  return new AenvError(code, text, { data, ...(ours ? { hint: "" } : {}) });
}
