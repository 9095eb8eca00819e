import { AenvError, ERROR_CODES, type ErrorCode } from "@aenv/base";
import { type Command, flagName } from "./define.ts";
import { EXIT, exitCodeOf } from "./exit.ts";
import type { Output } from "./output.ts";
import { printable } from "./output.ts";
import { invocation } from "./table.ts";

/** What to do at the command line, where the error table speaks to callers of the API. */
const HINTS: Record<ErrorCode, string> = {
  INVALID_ARGUMENT: "",
  UNAUTHENTICATED: "aenv auth shows which key is in use and where it comes from; aenv auth login saves another.",
  PERMISSION_DENIED: "aenv auth shows which key is in use; another one may be allowed to do this.",
  NOT_FOUND: "aenv list shows what there is; a sandbox is gone when its time is over.",
  CONFLICT: "aenv info ID shows the state of a sandbox.",
  IN_TRANSITION: "Something else is being done with it; try again in a moment.",
  TOO_LARGE: "Give less at a time.",
  RATE_LIMITED: "Try again in a moment, or delete what is not needed: aenv delete ID.",
  CANCELLED: "",
  INTERNAL: "--verbose shows more, and aenv doctor where the node's log is; please report it as a bug.",
  CORRUPT: "aenv doctor names what is damaged and what to do.",
  UNIMPLEMENTED: "The node does not have this; aenv version shows its version.",
  GUEST_FAILED: "aenv logs ID tells what happened to a sandbox; aenv start makes another.",
  VMM_FAILED: "aenv logs ID tells what happened to a sandbox; aenv doctor checks the node.",
  UNAVAILABLE: "Try again in a moment; aenv doctor tells what is missing.",
  SLOT_EXHAUSTED: "Delete sandboxes that are not needed (aenv delete ID), or start the node with more slots.",
  NO_SPACE: "Free disk space; aenv doctor shows how much the node has left.",
  DEADLINE: "Try again; aenv doctor checks the node, and its load may be too high.",
};

/** A thrower that knew better keeps its hint. */
export function hintOf(error: AenvError, command: Command | undefined): string {
  if (error.hint !== ERROR_CODES[error.code].hint) return error.hint;
  if (error.code === "NOT_FOUND" && command?.group === "Templates") return "aenv template list shows what there is.";
  if (error.code === "INVALID_ARGUMENT" && command !== undefined)
    return `aenv ${invocation(command)} --help explains its options.`;
  return HINTS[error.code];
}

/** The node names a refused value as the API calls it; people know it as an option or an argument. */
export function messageFor(error: AenvError, command: Command | undefined): string {
  const [, what] = /^the (?:body|query) is not valid: ([^]+)$/.exec(error.message) ?? [];
  if (error.code !== "INVALID_ARGUMENT" || what === undefined) return error.message;
  return what.replace(/(^|; )(\w+)((?:\.\w+)*): /g, (_, before: string, field: string, below: string) => {
    if (command && field in command.options) return `${before}--${flagName(field)}: `;
    const positional = command?.positionals[field];
    if (positional) return `${before}${positional.label ?? field.toUpperCase()}: `;
    return `${before}${field}${below}: `;
  });
}

/** The one place that prints errors. Returns the exit code. */
export function reportError(
  e: unknown,
  out: Output,
  options: { verbose: boolean; command?: Command | undefined },
): number {
  const error = AenvError.from(e, "aenv");
  const exit = exitOf(error, options.command?.exit === "remote");
  const hint = hintOf(error, options.command);
  const message = messageFor(error, options.command);
  if (out.json) {
    const body = { code: error.code, message, hint, exitCode: exit, data: error.data };
    out.stderr.write(`${JSON.stringify({ error: body })}\n`);
  } else {
    out.stderr.write(`${out.styleError("red", "error:")} ${printable(message)}\n`);
    if (hint !== "") out.stderr.write(`${out.styleError("cyan", "hint:")}  ${printable(hint)}\n`);
  }
  if (options.verbose) {
    out.stderr.write(`${out.styleError("dim", `code: ${error.code}`)}\n`);
    if (Object.keys(error.data).length > 0)
      out.stderr.write(out.styleError("dim", `data: ${JSON.stringify(error.data)}\n`));
    for (let cause: unknown = error; cause instanceof Error; cause = cause.cause)
      out.stderr.write(
        out.styleError("dim", `${cause === error ? "" : "caused by "}${cause.stack ?? cause.message}\n`),
      );
  }
  return exit;
}

/** exec passes a guest command's code on: failures of aenv and the node must not look like one. */
function exitOf(error: AenvError, remote: boolean): number {
  if (!remote || error.code === "CANCELLED" || error.code === "DEADLINE" || error.data["usage"] === true)
    return exitCodeOf(error);
  return EXIT.remote.code;
}
