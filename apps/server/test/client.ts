import assert from "node:assert/strict";
import {
  type AnswerOf,
  type BodyIn,
  encodeQuery,
  ErrorBody,
  fillPath,
  type Method,
  type PathParams,
  type QueryIn,
  type RouteDef,
  type RouteId,
  type RouteOf,
  ROUTES,
} from "@aenv/contract";
import type { FakeServer } from "./fake-server.ts";

export interface Received {
  status: number;
  headers: Record<string, string | number | string[] | undefined>;
  text: string;
}

/** A request as bytes, with the key unless `headers` says otherwise. */
export async function send(
  server: FakeServer,
  method: Method,
  url: string,
  o: { body?: unknown; payload?: string | Buffer; headers?: Record<string, string> } = {},
): Promise<Received> {
  const payload = o.payload ?? (o.body === undefined ? undefined : JSON.stringify(o.body));
  const res = await server.app.inject({
    method,
    url,
    headers: {
      "x-api-key": server.key,
      ...(payload === undefined ? {} : { "content-type": "application/json" }),
      ...o.headers,
    },
    ...(payload === undefined ? {} : { payload }),
  });
  return { status: res.statusCode, headers: res.headers, text: res.body };
}

/** The error that a request must fail with; checks that status and body agree. */
export function errorOf(r: Received, status: number, code?: string): ErrorBody {
  assert.equal(r.status, status, r.text);
  assert.match(String(r.headers["content-type"]), /^application\/json/);
  const body = ErrorBody.parse(JSON.parse(r.text));
  assert.equal(body.code, status);
  if (code !== undefined) assert.equal(body.error_code, code);
  assert.ok(body.message.length > 10 && /[.!?)]$/.test(body.message), body.message);
  return body;
}

type Input<R extends RouteDef> = {
  params?: PathParams<R>;
  query?: QueryIn<R>;
  body?: BodyIn<R>;
  headers?: Record<string, string>;
};

/** Calls a route of the table; the answer must be one that the table promises, without a field it does not name. */
export async function call<I extends RouteId>(
  server: FakeServer,
  id: I,
  input: Input<RouteOf<I>> = {},
): Promise<Received & { body: AnswerOf<RouteOf<I>> }> {
  const def: RouteDef = ROUTES[id];
  const url = fillPath(def.path, input.params ?? {}) + encodeQuery(input.query ?? {});
  const r = await send(server, def.method, url, {
    ...(input.body === undefined ? {} : { body: input.body }),
    ...(input.headers === undefined ? {} : { headers: input.headers }),
  });
  const answer = def.success[r.status];
  assert.ok(answer, `${id} answered ${r.status}: ${r.text}`);
  let body: unknown;
  if (answer.schema) {
    const json: unknown = JSON.parse(r.text);
    body = answer.schema.parse(json);
    assert.deepEqual(body, json, `${id} answers with fields that its schema does not have`);
  } else if (answer.contentType === undefined) assert.equal(r.text, "");
  return { ...r, body: body as AnswerOf<RouteOf<I>> };
}
