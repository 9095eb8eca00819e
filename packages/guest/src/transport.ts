/** HTTP to a guest: bounded replies, Connect JSON unary and server streams, errors in our own table. */
import {
  type Agent,
  type IncomingHttpHeaders,
  type IncomingMessage,
  type OutgoingHttpHeaders,
  request,
} from "node:http";
import { request as secureRequest } from "node:https";
import { type Readable } from "node:stream";
import { pipeline } from "node:stream/promises";
import { AenvError, type ErrorCode, errnoOf } from "@aenv/base";
import { z } from "zod";
import { EndOfStream, ErrorBody } from "./messages.ts";

/** No honest guest answers a unary call or an error with more than this. */
const MAX_REPLY = 32 * 1024 * 1024;
/** Output comes in chunks of 32 KiB, which are 44 KiB of base64; a watch event is smaller. */
const MAX_ENVELOPE = 4 * 1024 * 1024;
const END_STREAM = 0x02;
const COMPRESSED = 0x01;

const CONNECT_CODES: Readonly<Record<string, ErrorCode>> = {
  invalid_argument: "INVALID_ARGUMENT",
  failed_precondition: "CONFLICT",
  out_of_range: "INVALID_ARGUMENT",
  unauthenticated: "UNAUTHENTICATED",
  permission_denied: "PERMISSION_DENIED",
  not_found: "NOT_FOUND",
  already_exists: "CONFLICT",
  resource_exhausted: "RATE_LIMITED",
  unimplemented: "UNIMPLEMENTED",
  deadline_exceeded: "DEADLINE",
  canceled: "CANCELLED",
};
const STATUS_CODES: Readonly<Record<number, ErrorCode>> = {
  400: "INVALID_ARGUMENT",
  401: "UNAUTHENTICATED",
  403: "PERMISSION_DENIED",
  404: "NOT_FOUND",
  409: "CONFLICT",
  429: "RATE_LIMITED",
  501: "UNIMPLEMENTED",
  504: "DEADLINE",
  507: "NO_SPACE",
};

function failure(what: string, code: string | number | undefined, status: number, message: string): AenvError {
  const own = (typeof code === "string" ? CONNECT_CODES[code] : undefined) ?? STATUS_CODES[status] ?? "GUEST_FAILED";
  return new AenvError(own, message || `${what}: the guest answered ${status}`, {
    data: { call: what, status, ...(code === undefined ? {} : { guestCode: code }) },
  });
}

/** A broken connection, seen from the caller of one request. */
function broken(e: unknown, what: string, signal?: AbortSignal): AenvError {
  if (signal?.aborted) return AenvError.from(signal.reason, what);
  if (e instanceof AenvError) return e;
  return new AenvError("GUEST_FAILED", `${what}: ${e instanceof Error ? e.message : String(e)}`, {
    cause: e,
    data: { errno: errnoOf(e) },
  });
}

export interface Exchange {
  method: string;
  path: string;
  headers?: OutgoingHttpHeaders;
  body?: Buffer | Readable;
}

export class Transport {
  readonly #base: URL;
  readonly #headers: Record<string, string>;
  readonly #agent: Agent;

  constructor(base: URL, headers: Record<string, string>, agent: Agent) {
    this.#base = base;
    this.#headers = headers;
    this.#agent = agent;
  }

  /** Sends the request; resolves with the head of the answer. The caller must consume or destroy the message. */
  send(x: Exchange, signal: AbortSignal): Promise<IncomingMessage> {
    const what = `${x.method} ${x.path}`;
    const prefix = this.#base.pathname.replace(/\/$/, "");
    return new Promise((resolve, reject) => {
      if (signal.aborted) return reject(broken(undefined, what, signal));
      const req = (this.#base.protocol === "https:" ? secureRequest : request)({
        host: this.#base.hostname.replace(/^\[|\]$/g, ""),
        port: this.#base.port,
        path: prefix + x.path,
        method: x.method,
        agent: this.#agent,
        headers: { ...this.#headers, ...x.headers },
        signal,
      });
      req.once("response", resolve);
      // Also after the answer: an upload that the guest cut short ends here, and the answer decides.
      req.on("error", (e) => reject(broken(e, what, signal)));
      if (x.body === undefined || Buffer.isBuffer(x.body)) req.end(x.body);
      else void pipeline(x.body, req).catch((e: unknown) => reject(broken(e, what, signal)));
    });
  }

  /** The whole body of an answer, which must be a success. */
  async fetch(
    x: Exchange,
    signal: AbortSignal,
    limit = MAX_REPLY,
  ): Promise<{ body: Buffer; headers: IncomingHttpHeaders }> {
    const what = `${x.method} ${x.path.split("?")[0]}`;
    const res = await this.send(x, signal);
    const body = await readAll(res, limit, what, signal);
    if (res.statusCode === undefined || res.statusCode < 200 || res.statusCode > 299)
      throw errorOf(what, res.statusCode ?? 0, body);
    return { body, headers: res.headers };
  }

  /** Reads the error out of an answer that is not the wanted success, and throws it. */
  async refuse(res: IncomingMessage, what: string, signal: AbortSignal): Promise<never> {
    throw errorOf(what, res.statusCode ?? 0, await readAll(res, MAX_REPLY, what, signal));
  }

  async call<T>(rpc: string, message: unknown, shape: z.ZodType<T>, signal: AbortSignal): Promise<T> {
    const { body } = await this.fetch(
      {
        method: "POST",
        path: `/${rpc}`,
        headers: { "content-type": "application/json", "connect-protocol-version": "1" },
        body: Buffer.from(JSON.stringify(message)),
      },
      signal,
    );
    return parse(rpc, body, shape);
  }

  /** A server stream. Ends when the guest ends it cleanly; throws what the guest reports or when it breaks. */
  async *stream<T>(
    rpc: string,
    message: unknown,
    shape: z.ZodType<T>,
    headers: OutgoingHttpHeaders,
    signal: AbortSignal,
  ): AsyncGenerator<T, void, void> {
    const request = Buffer.from(JSON.stringify(message));
    const envelope = Buffer.alloc(5);
    envelope.writeUInt32BE(request.length, 1);
    const res = await this.send(
      {
        method: "POST",
        path: `/${rpc}`,
        headers: { "content-type": "application/connect+json", "connect-protocol-version": "1", ...headers },
        body: Buffer.concat([envelope, request]),
      },
      signal,
    );
    try {
      if (res.statusCode !== 200) throw errorOf(rpc, res.statusCode ?? 0, await readAll(res, MAX_REPLY, rpc, signal));
      const reader = new EnvelopeReader();
      for await (const chunk of res) {
        for (const { flags, body } of reader.push(chunk as Buffer)) {
          if (flags & COMPRESSED) throw new AenvError("GUEST_FAILED", `${rpc}: the guest sent a compressed message`);
          if ((flags & END_STREAM) === 0) {
            yield parse(rpc, body, shape);
            continue;
          }
          const { error } = parse(rpc, body, EndOfStream);
          if (error) throw failure(rpc, error.code, 200, error.message);
          return;
        }
      }
      throw new AenvError("GUEST_FAILED", `${rpc}: the guest closed the stream without an end`);
    } catch (e) {
      throw broken(e, rpc, signal);
    } finally {
      res.destroy();
    }
  }

  close(): void {
    this.#agent.destroy();
  }
}

function errorOf(what: string, status: number, body: Buffer): AenvError {
  const parsed = ErrorBody.safeParse(tryJson(body));
  if (!parsed.success) return failure(what, undefined, status, "");
  return failure(what, parsed.data.code, status, parsed.data.message);
}

function tryJson(body: Buffer): unknown {
  try {
    return JSON.parse(body.toString("utf8"));
  } catch {
    return undefined;
  }
}

export function parse<T>(what: string, body: Buffer, shape: z.ZodType<T>): T {
  const parsed = shape.safeParse(tryJson(body));
  if (parsed.success) return parsed.data;
  throw new AenvError("GUEST_FAILED", `${what}: the guest answered something that is not its protocol`, {
    data: { problem: z.prettifyError(parsed.error).slice(0, 500) },
  });
}

export async function readAll(res: IncomingMessage, limit: number, what: string, signal: AbortSignal): Promise<Buffer> {
  const parts: Buffer[] = [];
  let size = 0;
  try {
    for await (const chunk of res) {
      const part = chunk as Buffer;
      size += part.length;
      if (size > limit) throw new AenvError("GUEST_FAILED", `${what}: the guest answered more than ${limit} bytes`);
      parts.push(part);
    }
  } catch (e) {
    throw broken(e, what, signal);
  }
  return Buffer.concat(parts);
}

/** Connect envelopes: flags u8 | length u32 big-endian | body. Fed with whatever the socket gives. */
export class EnvelopeReader {
  #pending: Buffer = Buffer.alloc(0);

  *push(chunk: Buffer): Generator<{ flags: number; body: Buffer }> {
    this.#pending = this.#pending.length === 0 ? chunk : Buffer.concat([this.#pending, chunk]);
    while (this.#pending.length >= 5) {
      const length = this.#pending.readUInt32BE(1);
      if (length > MAX_ENVELOPE)
        throw new AenvError(
          "GUEST_FAILED",
          `the guest announced a message of ${length} bytes, more than ${MAX_ENVELOPE}`,
        );
      if (this.#pending.length < 5 + length) return;
      const flags = this.#pending.readUInt8(0);
      const body = this.#pending.subarray(5, 5 + length);
      this.#pending = this.#pending.subarray(5 + length);
      yield { flags, body };
    }
  }
}
