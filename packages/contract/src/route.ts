import type { ErrorCode } from "@aenv/base";
import type { z } from "zod";

export type Method = "GET" | "POST" | "PUT" | "PATCH" | "DELETE";
export type Tag = "Sandboxes" | "State" | "Templates" | "Store" | "Account" | "Events" | "Node";

export interface Answer {
  description: string;
  /** Absent: the answer has no body. */
  schema?: z.ZodType;
  /** Default application/json. */
  contentType?: string;
  headers?: Readonly<Record<string, string>>;
}

/** One endpoint, as data: the server mounts it, clients call it and the OpenAPI document describes it. */
export interface RouteDef {
  readonly method: Method;
  /** OpenAPI form: `/sandboxes/{sandboxID}`. */
  readonly path: string;
  /** `key`: X-API-KEY. */
  readonly auth: "key" | "none";
  readonly tag: Tag;
  readonly summary: string;
  readonly description?: string;
  readonly deprecated?: true;
  /** What the official SDKs do not know: our own endpoint. */
  readonly own?: true;
  readonly query?: z.ZodObject;
  readonly headers?: Readonly<Record<string, string>>;
  readonly body?: z.ZodObject;
  /** The body may be absent; it is then read as `{}`. */
  readonly bodyOptional?: true;
  /** The body is bytes of any length, which the handler reads. */
  readonly stream?: true;
  readonly success: Readonly<Record<number, Answer>>;
  /** Beside those that every route has, see COMMON_ERRORS. */
  readonly errors: readonly ErrorCode[];
  /** A body for the examples of the documents. */
  readonly example?: unknown;
}

/** Keeps the literal types of a definition. */
export function route<const R extends RouteDef>(def: R): R {
  return def;
}

/** Errors that any route may answer with. */
export const COMMON_ERRORS: readonly ErrorCode[] = ["INTERNAL", "UNAVAILABLE"];

/** Names in the braces of a path. */
type ParamNames<P extends string> = P extends `${string}{${infer N}}${infer Rest}` ? N | ParamNames<Rest> : never;
export type PathParams<R extends RouteDef> = { readonly [N in ParamNames<R["path"]>]: string };
export type QueryOf<R extends RouteDef> = R extends { query: infer Q extends z.ZodType } ? z.output<Q> : undefined;
export type QueryIn<R extends RouteDef> = R extends { query: infer Q extends z.ZodType } ? z.input<Q> : undefined;
export type BodyOf<R extends RouteDef> = R extends { body: infer B extends z.ZodType } ? z.output<B> : undefined;
export type BodyIn<R extends RouteDef> = R extends { body: infer B extends z.ZodType } ? z.input<B> : undefined;

type Schemas<S> = { [K in keyof S]: S[K] extends { schema: infer T extends z.ZodType } ? z.output<T> : undefined };
/** The success bodies by status. */
export type Answers<R extends RouteDef> = Schemas<R["success"]>;
export type AnswerOf<R extends RouteDef> = Answers<R>[keyof Answers<R>];
