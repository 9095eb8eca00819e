import type { IncomingMessage, ServerResponse } from "node:http";
import type { Socket } from "node:net";

/** An answer of the edge itself. `sandboxId` and `port` are in the body where clients expect them. */
export interface EdgeAnswer {
  status: number;
  message: string;
  sandboxId?: string;
  port?: number;
  retryAfterSeconds?: number;
}

// Clients compare these two.
export const NOT_FOUND = "The sandbox was not found";
export const PORT_CLOSED = "The sandbox is running but port is not open";

function escapeHtml(text: string): string {
  return text.replace(/[&<>"']/g, (c) => `&#${c.charCodeAt(0)};`);
}

const STYLE = `body{font:16px/1.5 system-ui,sans-serif;margin:0;display:grid;place-items:center;min-height:100vh;background:#fafafa;color:#222}
main{max-width:36rem;padding:2rem}h1{font-size:1.3rem}code{background:#eee;padding:.1em .3em;border-radius:4px}
@media(prefers-color-scheme:dark){body{background:#161616;color:#ddd}code{background:#333}}`;

function page(a: EdgeAnswer): string {
  const facts = [
    a.sandboxId === undefined ? "" : `<p>Sandbox <code>${escapeHtml(a.sandboxId)}</code></p>`,
    a.port === undefined ? "" : `<p>Port <code>${a.port}</code></p>`,
  ].join("");
  const hint =
    a.message === PORT_CLOSED
      ? "<p>Start a server on this port inside the sandbox, then reload.</p>"
      : a.message === NOT_FOUND
        ? "<p>It may have ended, been paused, or never existed.</p>"
        : "";
  const title = escapeHtml(a.message);
  return `<!doctype html><html lang="en"><head><meta charset="utf-8"><title>${title}</title><meta name="viewport" content="width=device-width"><style>${STYLE}</style></head><body><main><h1>${a.status} · ${title}</h1>${facts}${hint}</main></body></html>`;
}

/** A person's browser, not a program: fetch() of a page's script accepts anything and gets JSON. */
function wantsPage(req: IncomingMessage): boolean {
  return (
    (req.headers.accept ?? "").includes("text/html") &&
    (req.headers["user-agent"] ?? "").toLowerCase().includes("mozilla")
  );
}

/**
 * Sends the answer when no response has begun, else resets the client. A client that is still sending its body gets
 * up to `lingerMs` to finish (0: none): closing at once would reset it before it has read the answer.
 */
export function answer(req: IncomingMessage, res: ServerResponse, a: EdgeAnswer, lingerMs: number): void {
  if (res.headersSent) return resetSocket(req.socket);
  const html = wantsPage(req);
  const json = { sandboxId: a.sandboxId, message: a.message, port: a.port, code: a.status };
  const body = Buffer.from(html ? page(a) : JSON.stringify(json));
  res.writeHead(a.status, [
    "Content-Type",
    html ? "text/html; charset=utf-8" : "application/json",
    "Content-Length",
    String(body.length),
    "Cache-Control",
    "no-store",
    "Access-Control-Allow-Origin",
    "*",
    ...(html ? ["Content-Security-Policy", "default-src 'none'; style-src 'unsafe-inline'"] : []),
    ...(a.retryAfterSeconds === undefined ? [] : ["Retry-After", String(a.retryAfterSeconds)]),
  ]);
  res.write(body);
  endAfterRequest(req, res, lingerMs);
}

/** Ends a response whose bytes are all written, when the request has been read or `lingerMs` have passed. */
export function endAfterRequest(req: IncomingMessage, res: ServerResponse, lingerMs: number): void {
  if (req.complete || req.destroyed || lingerMs === 0) {
    res.end();
    return;
  }
  const end = (): void => {
    clearTimeout(timer);
    if (!res.writableEnded) res.end();
    // Still not complete: the rest of the body is not waited for.
    if (!req.complete) res.once("finish", () => req.socket.destroy());
  };
  const timer = setTimeout(end, lingerMs);
  timer.unref();
  req.removeAllListeners("data");
  req.once("end", end);
  res.once("close", () => clearTimeout(timer));
  req.resume();
}

/** The peer sees a reset, never a clean end. TLS sockets have no reset; an end without close-notify has the same effect. */
export function resetSocket(socket: Socket): void {
  if (socket.destroyed) return;
  try {
    socket.resetAndDestroy();
  } catch {
    socket.destroy();
  }
}
