/** Who may wake a paused sandbox, and which requests do. */
import { createHash } from "node:crypto";
import type { IncomingMessage } from "node:http";
import { NOT_FOUND, type EdgeAnswer } from "./answer.ts";
import { ENVD_PORT, plainPath, type Route } from "./route.ts";
import type { Asleep } from "./target.ts";
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

function hasAccess(req: IncomingMessage, path: string, token: string): boolean {
  const given = req.headers["x-access-token"];
  if (given !== undefined) return sameToken(token, given);
  return plainPath(path) === "/files" && isSigned(req.method ?? "", path, token, Date.now());
}

/** As envd checks the signature of a file's URL. */
export function isSigned(method: string, path: string, token: string, nowMs: number): boolean {
  const operation = method === "GET" || method === "HEAD" ? "read" : method === "POST" ? "write" : undefined;
  const at = path.indexOf("?");
  if (operation === undefined || at < 0) return false;
  const query = new URLSearchParams(path.slice(at + 1));
  const expiration = query.get("signature_expiration") ?? "";
  const raw = `${query.get("path") ?? ""}:${operation}:${query.get("username") ?? ""}:${token}`;
  const sum = createHash("sha256")
    .update(expiration === "" ? raw : `${raw}:${expiration}`)
    .digest("base64")
    .replace(/=+$/, "");
  if (!sameToken(`v1_${sum}`, query.get("signature") ?? undefined)) return false;
  return expiration === "" || (/^[0-9]{1,15}$/.test(expiration) && Number(expiration) >= Math.floor(nowMs / 1000));
}
