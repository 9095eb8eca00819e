/** Who may wake a paused sandbox, and which requests do. */
import type { IncomingMessage, ServerResponse } from "node:http";
import { NOT_FOUND, type EdgeAnswer } from "./answer.ts";
import { ENVD_PORT, plainPath, type Route } from "./route.ts";
import type { Asleep } from "./target.ts";
import { isSigned } from "./signature.ts";
import { sameToken } from "./token.ts";

/**
 * Why this request does not wake the sandbox; undefined when it does. Asking envd for its health does not: it is how
 * clients ask whether the sandbox runs.
 */
export function refusedWake(req: IncomingMessage, route: Route, path: string, asleep: Asleep): EdgeAnswer | undefined {
  const { sandboxId, port } = route;
  if (port !== ENVD_PORT) return undefined;
  if (plainPath(path) === "/health") return { status: 502, message: NOT_FOUND, sandboxId };
  const { accessToken } = asleep;
  if (accessToken === undefined || hasAccess(req, path, accessToken)) return undefined;
  return {
    status: 403,
    message: "This sandbox is paused, and only a request with its access token in the x-access-token header wakes it",
    sandboxId,
  };
}

/**
 * Answers what a browser asks before it calls envd: that question carries no token, so it cannot wake. As envd answers
 * it. False: it is no such question.
 */
export function answerPreflight(req: IncomingMessage, res: ServerResponse, route: Route): boolean {
  const { origin, "access-control-request-method": method, "access-control-request-headers": headers } = req.headers;
  if (route.port !== ENVD_PORT || req.method !== "OPTIONS" || origin === undefined || method === undefined)
    return false;
  res.writeHead(204, {
    "Access-Control-Allow-Origin": "*",
    "Access-Control-Allow-Methods": "GET, HEAD, POST, PUT, PATCH, DELETE, OPTIONS",
    ...(headers === undefined ? {} : { "Access-Control-Allow-Headers": headers }),
    "Access-Control-Max-Age": "7200",
  });
  res.end();
  return true;
}

function hasAccess(req: IncomingMessage, path: string, token: string): boolean {
  const given = req.headers["x-access-token"];
  if (given !== undefined) return sameToken(token, given);
  return plainPath(path) === "/files" && isSigned(req.method ?? "", path, token, Date.now());
}
