import { AenvError } from "@aenv/base";
import { explainLoss, openGuest } from "../access.ts";
import type * as commands from "../commands/sandbox.ts";
import type { Context } from "../context.ts";
import type { Args, Exit } from "../define.ts";
import { usageError } from "../exit.ts";
import { runPipes } from "../session/pipes.ts";
import { writeTo } from "../session/remote.ts";
import { signalOf } from "../session/status.ts";
import { runTerminal } from "../session/terminal.ts";

/** What --json keeps of each stream; more is an error, since a JSON text is held whole. */
const JSON_LIMIT = 64 * 1024 * 1024;
/** As shells answer for a program that is not there. */
const NO_SUCH_PROGRAM = 127;

export async function exec(args: Args<typeof commands.exec>, context: Context): Promise<Exit> {
  const { out } = context;
  if (args.tty && out.json) throw usageError("--tty and --json exclude each other", "Leave one of them out.");
  const [cmd = "", ...rest] = args.command;
  const spec = {
    cmd,
    args: rest,
    ...(args.env === undefined ? {} : { envs: args.env }),
    ...(args.cwd === undefined ? {} : { cwd: args.cwd }),
    ...(args.user === undefined ? {} : { user: args.user }),
    ...(args.timeout === 0 ? {} : { timeoutMs: args.timeout * 1000 }),
  };
  const guest = await openGuest(context, args.id, args.user);
  try {
    if (args.tty) return await runTerminal(guest, spec, context.interrupted());
    const stdin = args.noStdin || process.stdin.isTTY ? undefined : process.stdin;
    const kept = { stdout: new Kept(), stderr: new Kept() };
    const forever = new AbortController().signal;
    const end = await runPipes(
      guest,
      {
        spec,
        stdin,
        output: (kind, data) =>
          out.json ? kept[kind].add(data) : writeTo(kind === "stdout" ? out.stdout : out.stderr, data, forever),
      },
      (fn) => out.onClosed(fn),
    );
    if (out.json)
      out.value({
        exitCode: end.code,
        signal: signalOf(end) ?? null,
        stdout: kept.stdout.text(),
        stderr: kept.stderr.text(),
      });
    return end.code;
  } catch (e) {
    if (e instanceof AenvError && e.code === "DEADLINE" && args.timeout > 0)
      throw new AenvError("DEADLINE", `${cmd} took longer than --timeout ${args.timeout} s and was killed`, {
        cause: e,
        hint: "Give it more, or 0 for no limit.",
      });
    if (e instanceof AenvError && isMissingProgram(e)) {
      out.stderr.write(`${out.styleError("red", "error:")} ${cmd}: there is no such program in the sandbox\n`);
      return NO_SUCH_PROGRAM;
    }
    throw await explainLoss(e, context, args.id);
  }
}

/** The guest refuses to start what is not there; a missing folder or user has another text. */
function isMissingProgram(e: AenvError): boolean {
  const refused = e.code === "NOT_FOUND" || e.code === "INVALID_ARGUMENT" || e.code === "GUEST_FAILED";
  return (
    refused &&
    /executable file not found|no such file or directory|command not found/i.test(e.message) &&
    !/\bcwd\b/.test(e.message)
  );
}

class Kept {
  readonly #parts: Buffer[] = [];
  #size = 0;

  async add(part: Buffer): Promise<void> {
    this.#size += part.length;
    if (this.#size > JSON_LIMIT)
      throw new AenvError("TOO_LARGE", `The command wrote more than ${JSON_LIMIT} bytes`, {
        hint: "Leave --json out: output is then passed on as it comes.",
      });
    this.#parts.push(part);
  }

  text(): string {
    return Buffer.concat(this.#parts).toString("utf8");
  }
}
