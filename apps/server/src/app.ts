import type { RequestListener, Server } from "node:http";
import { type Duplex, Readable } from "node:stream";
import { AenvError, deadline, type Logger, randomName } from "@aenv/base";
import { LATER, type QueryValue, ROUTE_IDS, ROUTES, type RouteDef } from "@aenv/contract";
import { fastify, type FastifyInstance, type FastifyReply, type FastifyRequest } from "fastify";
import { authenticate, type Caller, type KeyStore } from "./auth.ts";
import { type Call, type Handlers, parseBody, parseJson, parseQuery, type Reply } from "./call.ts";
import { toAenvError, type WireError, wireError } from "./errors.ts";
import { drain } from "./drain.ts";
import type { ServerMetrics } from "./metrics.ts";

const STREAM_TYPE = "application/octet-stream";
const BODY_LIMIT_BYTES = 16 * 1024 * 1024;
/** The SDKs give up after 60 s; a little later nobody waits for the answer. */
const HANDLER_DEADLINE_MS = 70_000;
/** A client that sends its API request slower than this is cut off. Sandbox traffic has no such limit. */
const RECEIVE_DEADLINE_MS = 60_000;

export interface AppDeps {
  handlers: Handlers;
  keys: KeyStore;
  logger: Logger;
  metrics: ServerMetrics;
  /** Puts something before the API: the edge. The default is a plain HTTP server. */
  server?: (api: RequestListener) => Server;
  /** Told of everything that is mounted, as `METHOD /path/:param`. */
  onRoute?: (route: string) => void;
}

declare module "fastify" {
  interface FastifyRequest {
    caller?: Caller;
    receiving?: NodeJS.Timeout;
  }
}

/** The HTTP server: sandbox traffic goes to the edge, the rest is the API of the route table. */
export function buildApp(deps: AppDeps): FastifyInstance {
  const app = fastify({
    ...(deps.server ? { serverFactory: deps.server } : {}),
    bodyLimit: BODY_LIMIT_BYTES,
    genReqId: () => randomName(12),
    logger: false,
    return503OnClosing: true,
    routerOptions: { maxParamLength: 1024, ignoreTrailingSlash: true },
    clientErrorHandler: onClientError,
    frameworkErrors: (e, request, reply) => void sendError(e, request, reply as FastifyReply, deps),
  });
  if (deps.onRoute) {
    const { onRoute } = deps;
    app.addHook("onRoute", (r) => [r.method].flat().forEach((method) => onRoute(`${method} ${r.url}`)));
  }
  app.decorateRequest("caller", undefined);
  app.decorateRequest("receiving", undefined);
  app.removeAllContentTypeParsers();
  app.addContentTypeParser("application/json", { parseAs: "buffer" }, (_request, body, done) => {
    try {
      done(null, parseJson(body as Buffer));
    } catch (e) {
      done(e as Error);
    }
  });
  app.addContentTypeParser(STREAM_TYPE, (_request, payload, done) => done(null, payload));
  addHooks(app, deps);
  app.setErrorHandler((e, request, reply) => sendError(e, request, reply, deps));
  app.setNotFoundHandler((request) => {
    throw new AenvError("NOT_FOUND", `there is no ${request.method} ${request.url.split("?")[0]?.slice(0, 200)}`, {
      hint: "GET /docs lists every endpoint. For a port of a sandbox send E2b-Sandbox-Id and E2b-Sandbox-Port, or use the host <port>-<id>.<domain>.",
    });
  });
  for (const id of ROUTE_IDS) mount(app, ROUTES[id], deps, deps.handlers[id], id);
  for (const { method, path, feature } of LATER) {
    const refuse = (): never => {
      throw new AenvError("UNIMPLEMENTED", `this version of AgentENV does not have ${feature} yet`);
    };
    const def = { method, path, auth: "key", tag: "Node", summary: feature, success: {}, errors: [] } as const;
    mount(app, def, deps, refuse, "later");
  }
  return app;
}

type AnyHandler = (call: Call<RouteDef>) => Reply<number, unknown> | Promise<Reply<number, unknown>>;

const REASONS: Readonly<Record<number, string>> = { 400: "Bad Request", 404: "Not Found", 408: "Request Timeout" };

/** For sockets that have no response object. */
function rawError(socket: Duplex, e: WireError): void {
  const body = JSON.stringify(e.body);
  if (socket.writable)
    socket.end(
      `HTTP/1.1 ${e.status} ${REASONS[e.status] ?? "Error"}\r\ncontent-type: application/json; charset=utf-8\r\ncontent-length: ${Buffer.byteLength(body)}\r\nconnection: close\r\n\r\n${body}`,
    );
  else socket.destroy();
}

function onClientError(e: NodeJS.ErrnoException, socket: Duplex): void {
  if (e.code === "ECONNRESET") return void socket.destroy();
  const what =
    e.code === "HPE_HEADER_OVERFLOW"
      ? "the headers are too large"
      : e.code === "ERR_HTTP_REQUEST_TIMEOUT"
        ? "the headers did not arrive in time"
        : "this is not an HTTP request that the server understands";
  rawError(socket, wireError(new AenvError("INVALID_ARGUMENT", what)));
}

/** Pages of any origin may use the API: who calls is known by the key in a header, which no browser adds by itself. */
const CORS = {
  "access-control-allow-origin": "*",
  "access-control-expose-headers": "x-next-token, x-total-running, x-request-id, retry-after",
};
const PREFLIGHT = {
  "access-control-allow-methods": "GET, POST, PUT, PATCH, DELETE",
  "access-control-allow-headers": "*, authorization",
  "access-control-max-age": "86400",
};

function isPreflight({ method, headers }: FastifyRequest): boolean {
  return method === "OPTIONS" && headers.origin !== undefined && headers["access-control-request-method"] !== undefined;
}

function addHooks(app: FastifyInstance, deps: AppDeps): void {
  app.addHook("onRequest", (request, reply, done) => {
    reply.header("x-request-id", request.id);
    if (request.headers.origin !== undefined) reply.headers(CORS);
    if (isPreflight(request)) {
      reply.code(204).headers(PREFLIGHT).send();
      return;
    }
    // Whatever a client calls its body, this API reads JSON; fastify refuses some names before a parser sees the body.
    const { stream } = request.routeOptions.config as { stream?: boolean };
    request.raw.headers["content-type"] = stream === true ? STREAM_TYPE : "application/json";
    request.receiving = setTimeout(() => request.raw.destroy(), RECEIVE_DEADLINE_MS).unref();
    done();
  });
  app.addHook("preValidation", (request, _reply, done) => {
    clearTimeout(request.receiving);
    done();
  });
  app.addHook("onResponse", (request, reply, done) => {
    clearTimeout(request.receiving);
    const route = (request.routeOptions.config as { id?: string }).id ?? "none";
    deps.metrics.request(route, request.method, reply.statusCode, reply.elapsedTime);
    deps.logger.debug(
      { id: request.id, route, status: reply.statusCode, ms: Math.round(reply.elapsedTime) },
      "request",
    );
    done();
  });
}

async function sendError(
  e: unknown,
  request: FastifyRequest,
  reply: FastifyReply,
  deps: AppDeps,
): Promise<FastifyReply> {
  const { status, body, headers } = wireError(toAenvError(e, deps.logger, request.id));
  if (!(await drain(request.raw))) reply.header("connection", "close");
  return reply.code(status).headers(headers).send(body);
}

const fastifyPath = (path: string): string => path.replace(/\{(\w+)\}/g, ":$1");

function mount(app: FastifyInstance, def: RouteDef, deps: AppDeps, handler: AnyHandler, id: string): void {
  app.route({
    method: def.method,
    url: fastifyPath(def.path),
    config: { id, stream: def.stream === true },
    ...(def.stream ? { bodyLimit: Number.MAX_SAFE_INTEGER } : {}),
    // Before the body is read: strangers cannot make the server take 16 MiB.
    onRequest: (request, _reply, done) => {
      try {
        if (def.auth === "key") request.caller = authenticate(request.headers, deps.keys);
        done();
      } catch (e) {
        done(e as Error);
      }
    },
    handler: async (request, reply) => {
      const { status, body, headers } = await handler(callOf(def, request, reply));
      reply.code(status);
      if (headers) reply.headers(headers);
      const { contentType } = def.success[status] ?? {};
      if (body instanceof Readable && contentType !== undefined) reply.type(contentType);
      return reply.send(body);
    },
  });
}

function callOf(def: RouteDef, request: FastifyRequest, reply: FastifyReply): Call<RouteDef> {
  let signal: AbortSignal | undefined;
  let connection: AbortSignal | undefined;
  return {
    params: request.params as Call<RouteDef>["params"],
    query: parseQuery(def, request.query as Record<string, QueryValue>) as undefined,
    body: (def.stream ? undefined : parseBody(def, request.body)) as undefined,
    headers: request.headers,
    get caller() {
      if (!request.caller) throw new AenvError("UNAUTHENTICATED", "the request has no API key");
      return request.caller;
    },
    get signal() {
      return (signal ??= deadline(HANDLER_DEADLINE_MS, this.connection));
    },
    get connection() {
      return (connection ??= connectionOf(reply));
    },
    get stream() {
      if (request.body instanceof Readable) return request.body;
      throw new AenvError("INVALID_ARGUMENT", `${def.method} ${def.path} needs a body`);
    },
  };
}

function connectionOf(reply: FastifyReply): AbortSignal {
  const gone = new AbortController();
  reply.raw.once("close", () => {
    if (!reply.raw.writableFinished) gone.abort(new AenvError("CANCELLED", "the client hung up"));
  });
  return gone.signal;
}
