import { AenvError } from "@aenv/base";
import { EXIT, exitCodeOf } from "./exit.ts";
import type { Output } from "./output.ts";
import { printable } from "./output.ts";

/** The one place that prints errors. Returns the exit code. */
export function reportError(e: unknown, out: Output, options: { verbose: boolean; remote: boolean }): number {
  const error = AenvError.from(e, "aenv");
  const own = exitCodeOf(error.code);
  // exec passes a guest command's code on: its own failures must not look like one.
  const exit = options.remote && own !== EXIT.interrupted.code && own !== EXIT.deadline.code ? EXIT.remote.code : own;
  if (out.json) {
    const body = { code: error.code, message: error.message, hint: error.hint, exitCode: exit, data: error.data };
    out.stderr.write(`${JSON.stringify({ error: body })}\n`);
  } else {
    out.stderr.write(`${out.styleError("red", "error:")} ${printable(error.message)}\n`);
    if (error.hint !== "") out.stderr.write(`${out.styleError("cyan", "hint:")}  ${printable(error.hint)}\n`);
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
