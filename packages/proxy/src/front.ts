import { createServer, type IncomingMessage, type RequestListener, type Server } from "node:http";
import type { Socket } from "node:net";
import { type Logger, silentLogger } from "@aenv/base";
import type { Edge } from "./edge.ts";
import { answerTls, type TlsSource } from "./secure.ts";

export interface FrontOptions {
  edge: Edge;
  /** Everything that is not for a sandbox. */
  api: RequestListener;
  /** A request body for the API must have arrived within this (default 60 s); bodies for sandboxes have no limit of time. */
  apiBodyMs?: number;
  /** A client must send its request head within this, and first its TLS handshake (default 30 s). */
  headMs?: number;
  /** With it the port speaks TLS too, HTTP/2 included. */
  tls?: TlsSource;
  logger?: Logger;
}

/** Bodies and responses have no limit of time. */
const HEAD_MS = 30_000;
/** How often node looks for heads that are late: at its default of 30 s they would have twice their time. */
const CHECK_MS = 5000;
const API_BODY_MS = 60_000;
/** Above what clients keep idle connections for (undici 4 s, nginx 60 s): they close first, so no request meets a close. */
const CLIENT_IDLE_MS = 75_000;
const MAX_HEADER_BYTES = 64 * 1024;

/** Bodies of upgrade requests and h2c offers are for plain HTTP: the offer is not taken, which RFC 9110 allows. */
function wantsTunnel(req: IncomingMessage): boolean {
  const h = req.headers;
  if (h.upgrade === undefined || h["transfer-encoding"] !== undefined) return false;
  if (h["content-length"] !== undefined && h["content-length"] !== "0") return false;
  return !h.upgrade
    .toLowerCase()
    .split(",")
    .some((p) => p.trim() === "h2c");
}

/** node's own requestTimeout counts for every request of a server, so it is off and the API has this instead. */
function limitBody(req: IncomingMessage, ms: number): void {
  if (req.headers["transfer-encoding"] === undefined && (req.headers["content-length"] ?? "0") === "0") return;
  const timer = setTimeout(() => {
    if (!req.complete) req.destroy();
  }, ms);
  timer.unref();
  req.once("close", () => clearTimeout(timer));
}

/** The node's public server: sandbox traffic to the edge, the rest to the API. */
export function createFrontServer({
  edge,
  api,
  apiBodyMs = API_BODY_MS,
  headMs = HEAD_MS,
  tls,
  logger,
}: FrontOptions): Server {
  const server = createServer({
    maxHeaderSize: MAX_HEADER_BYTES,
    headersTimeout: headMs,
    connectionsCheckingInterval: Math.min(CHECK_MS, headMs),
    requestTimeout: 0,
    keepAliveTimeout: CLIENT_IDLE_MS,
    noDelay: true,
    keepAlive: true,
    keepAliveInitialDelay: 60_000,
    insecureHTTPParser: false,
    requireHostHeader: true,
    shouldUpgradeCallback: (req: IncomingMessage) => wantsTunnel(req) && edge.handlesRequest(req),
  });
  server.timeout = 0;
  server.on("request", (req, res) => {
    if (edge.request(req, res)) return;
    limitBody(req, apiBodyMs);
    api(req, res);
  });
  server.on("checkContinue", (req: IncomingMessage, res) => {
    if (edge.request(req, res, true)) return;
    res.writeContinue();
    limitBody(req, apiBodyMs);
    api(req, res);
  });
  server.on("upgrade", (req: IncomingMessage, socket, head: Buffer) => edge.upgrade(req, socket as Socket, head));
  if (tls) {
    const limits = { handshakeMs: headMs, idleMs: CLIENT_IDLE_MS };
    answerTls(server, { source: tls, logger: logger ?? silentLogger, ...limits });
  }
  return server;
}
