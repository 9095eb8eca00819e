/**
 * The closed table of error codes. A code is never reused for another meaning.
 *
 * `status` is the HTTP status the API answers with, `retry` whether the same request may succeed later without a
 * change by the caller, `hint` what a person should do about it.
 */
export const ERROR_CODES = {
  INVALID_ARGUMENT: { status: 400, retry: false, hint: "Correct the request." },
  UNAUTHENTICATED: {
    status: 401,
    retry: false,
    hint: "Send a valid API key in the X-API-KEY header (aenv auth shows it).",
  },
  PERMISSION_DENIED: { status: 403, retry: false, hint: "Use a key or token that may do this." },
  NOT_FOUND: { status: 404, retry: false, hint: "Check the id; it may have been deleted or have expired." },
  CONFLICT: { status: 409, retry: false, hint: "Read the current state and decide again." },
  IN_TRANSITION: { status: 409, retry: true, hint: "Wait until the running transition has ended, then retry." },
  TOO_LARGE: { status: 413, retry: false, hint: "Send a smaller body." },
  RATE_LIMITED: { status: 429, retry: true, hint: "Wait as long as Retry-After says." },
  CANCELLED: { status: 499, retry: false, hint: "The caller gave up." },
  INTERNAL: { status: 500, retry: false, hint: "Read the server log (aenv doctor names it) and report this as a bug." },
  CORRUPT: { status: 500, retry: false, hint: "The named file is damaged; delete and rebuild what uses it." },
  UNIMPLEMENTED: { status: 501, retry: false, hint: "This node does not have the feature." },
  GUEST_FAILED: {
    status: 502,
    retry: true,
    hint: "The virtual machine died or its agent did not answer; create another sandbox.",
  },
  VMM_FAILED: { status: 503, retry: true, hint: "The virtual machine monitor failed; read its log (aenv logs)." },
  UNAVAILABLE: { status: 503, retry: true, hint: "Retry in a moment; aenv doctor tells what is missing." },
  SLOT_EXHAUSTED: { status: 503, retry: true, hint: "Kill sandboxes or raise the limit of network slots." },
  NO_SPACE: { status: 507, retry: true, hint: "Free disk space on the node." },
  DEADLINE: { status: 504, retry: true, hint: "It took too long; retry, or look at the load of the node." },
} as const satisfies Record<string, { status: number; retry: boolean; hint: string }>;

export type ErrorCode = keyof typeof ERROR_CODES;

export interface AenvErrorOptions {
  cause?: unknown;
  /** Facts for logs and for API clients; must be JSON. */
  data?: Record<string, unknown>;
  /** Replaces the hint of the code table where the thrower knows better. */
  hint?: string;
}

/** The one error class of the project. `cause` is for logs and never goes on the wire. */
export class AenvError extends Error {
  override readonly name = "AenvError";
  readonly code: ErrorCode;
  readonly data: Record<string, unknown>;
  readonly hint: string;

  constructor(code: ErrorCode, message: string, options: AenvErrorOptions = {}) {
    super(message, options.cause === undefined ? undefined : { cause: options.cause });
    this.code = code;
    this.data = options.data ?? {};
    this.hint = options.hint ?? ERROR_CODES[code].hint;
  }

  get status(): number {
    return ERROR_CODES[this.code].status;
  }

  get retry(): boolean {
    return ERROR_CODES[this.code].retry;
  }

  /** Passes an AenvError through and wraps everything else; `what` says which operation failed. */
  static from(e: unknown, what: string): AenvError {
    if (e instanceof AenvError) return e;
    const code = errnoOf(e);
    const message = `${what}: ${e instanceof Error ? e.message : String(e)}`;
    if (code === "ENOSPC" || code === "EDQUOT") return new AenvError("NO_SPACE", message, { cause: e });
    if (e instanceof DOMException && e.name === "TimeoutError") return new AenvError("DEADLINE", message, { cause: e });
    if (e instanceof DOMException && e.name === "AbortError") return new AenvError("CANCELLED", message, { cause: e });
    return new AenvError("INTERNAL", message, { cause: e });
  }
}

/** The errno name ("ENOENT") of a Node system error, else undefined. */
export function errnoOf(e: unknown): string | undefined {
  if (typeof e !== "object" || e === null || !("code" in e)) return undefined;
  return typeof e.code === "string" ? e.code : undefined;
}

/** The message of anything thrown, for logs. */
export function messageOf(e: unknown): string {
  return e instanceof Error ? e.message : String(e);
}
