import { AenvError, type Logger } from "@aenv/base";
import type { ErrorBody } from "@aenv/contract";

export interface WireError {
  status: number;
  body: ErrorBody;
  headers: Record<string, string>;
}

/** Seconds that a client waits before it repeats a request that was refused for want of room. */
const RETRY_AFTER_S = 1;

const sentence = (text: string): string => (/[.!?]$/.test(text) ? text : `${text}.`);

/** How an error looks to a client. `cause` and `data` stay in the log. */
export function wireError(e: AenvError): WireError {
  const headers: Record<string, string> = {};
  // The Python SDK repeats 429, 502, 503 and 504 unless this header forbids it; creates included.
  if (e.status >= 429 || e.retry) headers["should-retry"] = String(e.retry);
  if (e.status === 429 || e.status === 503) headers["retry-after"] = String(RETRY_AFTER_S);
  return {
    status: e.status,
    body: { code: e.status, message: `${sentence(e.message)} ${e.hint}`.trim(), error_code: e.code },
    headers,
  };
}

interface FastifyLike {
  code?: unknown;
  statusCode?: unknown;
  message?: unknown;
}

/** Everything that a handler or fastify itself may throw, as one of ours. The unexpected is logged with its stack. */
export function toAenvError(e: unknown, log: Logger, requestId: string): AenvError {
  if (e instanceof AenvError) {
    if (e.status >= 500) log.error({ requestId, code: e.code, data: e.data, err: e }, "request failed");
    return e;
  }
  const { code, statusCode, message } = (typeof e === "object" && e !== null ? e : {}) as FastifyLike;
  if (code === "FST_ERR_CTP_BODY_TOO_LARGE")
    return new AenvError("TOO_LARGE", "the body is larger than 16 MiB", {
      hint: "Send less; files go to the sandbox itself, not to this API.",
    });
  if (typeof code === "string" && code.startsWith("FST_") && typeof statusCode === "number" && statusCode < 500)
    return new AenvError("INVALID_ARGUMENT", typeof message === "string" ? message : "malformed request");
  log.error({ requestId, err: e }, "request failed unexpectedly");
  return new AenvError("INTERNAL", `something unexpected happened (request ${requestId})`);
}
