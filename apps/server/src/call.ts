import type { IncomingHttpHeaders } from "node:http";
import type { Readable } from "node:stream";
import { AenvError } from "@aenv/base";
import {
  type AnswerOf,
  type Answers,
  type BodyOf,
  decodeQuery,
  type PathParams,
  type QueryOf,
  type QueryValue,
  type RouteDef,
  type RouteId,
  type RouteOf,
} from "@aenv/contract";
import type { z } from "zod";
import type { Caller } from "./auth.ts";

/** A request whose every part has been checked against its route. */
export interface Call<R extends RouteDef> {
  params: PathParams<R>;
  query: QueryOf<R>;
  body: BodyOf<R>;
  headers: IncomingHttpHeaders;
  /** Throws UNAUTHENTICATED on a route without auth. */
  readonly caller: Caller;
  /** Aborts when the client hangs up or the request takes too long. */
  readonly signal: AbortSignal;
  /** Aborts only when the client hangs up: for what moves files. */
  readonly connection: AbortSignal;
  /** The bytes of the body, on a route with `stream`. */
  readonly stream: Readable;
}

export interface Reply<S extends number, B> {
  status: S;
  body: B;
  headers?: Record<string, string>;
}

type ReplyOf<R extends RouteDef> = {
  [S in keyof Answers<R>]: S extends number
    ? Reply<S, AnswerOf<R> extends undefined ? string | undefined : Answers<R>[S]>
    : never;
}[keyof Answers<R>];

export type Handler<I extends RouteId> = (call: Call<RouteOf<I>>) => ReplyOf<RouteOf<I>> | Promise<ReplyOf<RouteOf<I>>>;
export type Handlers = { [I in RouteId]: Handler<I> };

export const ok = <B>(body: B, headers?: Record<string, string>): Reply<200, B> =>
  headers ? { status: 200, body, headers } : { status: 200, body };
export const created = <B>(body: B): Reply<201, B> => ({ status: 201, body });
export const accepted = <B>(body: B): Reply<202, B> => ({ status: 202, body });
/** Sent as it comes; an error of the stream resets the connection. */
export const streamed = (body: Readable): Reply<200, string> => ({ status: 200, body: body as unknown as string });
export const noContent = (): Reply<204, undefined> => ({ status: 204, body: undefined });

const MAX_ISSUES = 5;

function parse<T extends z.ZodType>(schema: T, value: unknown, what: string): z.output<T> {
  const result = schema.safeParse(value);
  if (result.success) return result.data;
  const issues = result.error.issues
    .slice(0, MAX_ISSUES)
    .map((i) => (i.path.length > 0 ? `${i.path.map(String).join(".")}: ${i.message}` : i.message));
  throw new AenvError("INVALID_ARGUMENT", `the ${what} is not valid: ${issues.join("; ")}`);
}

export function parseQuery(def: RouteDef, raw: Record<string, QueryValue>): unknown {
  return def.query ? parse(def.query, decodeQuery(def.query, raw), "query") : undefined;
}

export function parseBody(def: RouteDef, body: unknown): unknown {
  if (!def.body) return undefined;
  if (body === undefined || body === null) {
    if (!def.bodyOptional) throw new AenvError("INVALID_ARGUMENT", `${def.method} ${def.path} needs a JSON body`);
    return parse(def.body, {}, "body");
  }
  return parse(def.body, body, "body");
}

/** The body as JSON whatever its content type says: SDKs and hand-written clients vary. Empty is undefined. */
export function parseJson(bytes: Buffer): unknown {
  const text = bytes.toString("utf8").replace(/^\uFEFF/, "");
  if (text.trim() === "") return undefined;
  try {
    return JSON.parse(text);
  } catch (e) {
    throw new AenvError("INVALID_ARGUMENT", `the body is not valid JSON: ${(e as Error).message.slice(0, 120)}`);
  }
}
