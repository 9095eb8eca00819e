import { constants } from "node:os";
import { AenvError, type ErrorCode } from "@aenv/base";

/** The exit codes of aenv. They are documented and never change their meaning. */
export const EXIT = {
  ok: { code: 0, about: "Done." },
  failed: { code: 1, about: "The node or aenv failed, or doctor found something." },
  usage: { code: 2, about: "Wrong command line, or a value the node refused (exec, connect, start: 125)." },
  notFound: { code: 3, about: "No such sandbox, template, file or user." },
  auth: { code: 4, about: "No key, a wrong key, or a key that may not do this." },
  unreachable: { code: 5, about: "The node cannot be reached, is busy, or has no capacity." },
  conflict: { code: 6, about: "The state of the sandbox does not allow it." },
  noSpace: { code: 7, about: "The disk of the sandbox or of the node is full." },
  deadline: { code: 124, about: "It took longer than allowed (exec: longer than --timeout)." },
  remote: { code: 125, about: "exec, connect, start: aenv or the node failed, not the command in the sandbox." },
  interrupted: { code: 130, about: "Stopped by Ctrl-C, --follow included; 128+n by signal n, as shells have it." },
} as const satisfies Record<string, { code: number; about: string }>;

const BY_ERROR: Record<ErrorCode, keyof typeof EXIT> = {
  INVALID_ARGUMENT: "usage",
  UNAUTHENTICATED: "auth",
  PERMISSION_DENIED: "auth",
  NOT_FOUND: "notFound",
  CONFLICT: "conflict",
  IN_TRANSITION: "conflict",
  TOO_LARGE: "usage",
  RATE_LIMITED: "unreachable",
  CANCELLED: "interrupted",
  INTERNAL: "failed",
  CORRUPT: "failed",
  UNIMPLEMENTED: "failed",
  GUEST_FAILED: "failed",
  VMM_FAILED: "failed",
  UNAVAILABLE: "unreachable",
  SLOT_EXHAUSTED: "unreachable",
  NO_SPACE: "noSpace",
  DEADLINE: "deadline",
};

export function exitCodeOf({ code, data }: AenvError): number {
  const signal = code === "CANCELLED" ? constants.signals[data["signal"] as NodeJS.Signals] : undefined;
  return signal === undefined ? EXIT[BY_ERROR[code]].code : 128 + signal;
}

/** A signal ended the command: the exit code is 128 and its number. */
export function interruption(signal: NodeJS.Signals): AenvError {
  return new AenvError("CANCELLED", "Interrupted", { hint: "", data: { signal } });
}

/** The command line itself is wrong: exit code 2, whatever the command. */
export function usageError(message: string, hint: string, cause?: unknown): AenvError {
  return new AenvError("INVALID_ARGUMENT", message, { hint, data: { usage: true }, cause });
}
