import type { AenvClient } from "@aenv/client";
import { type Context, requireKey } from "./context.ts";
import { reportError } from "./errors.ts";
import { EXIT, interruption, usageError } from "./exit.ts";
import { Output } from "./output.ts";
import { findCommand, type Globals, type Parsed, parseCommand } from "./parse.ts";
import { resolveSettings, type Settings } from "./settings.ts";
import { likelyOption, unknownCommand } from "./suggest.ts";
import { COMMANDS } from "./table.ts";
import { onSignals } from "./tty.ts";

/** Runs one command line and resolves with the exit code. Nothing it opened is left open. */
export async function runProgram(argv: readonly string[], env: NodeJS.ProcessEnv): Promise<number> {
  const before = argv.slice(0, argv.includes("--") ? argv.indexOf("--") : argv.length);
  // Known even when the rest of the line cannot be read.
  const early = { json: before.includes("--json"), verbose: before.some((a) => a === "-v" || a === "--verbose") };
  const out = new Output({ json: early.json, colour: !before.includes("--no-color") });
  const found = findCommand(argv);
  const deferred: (() => void | Promise<void>)[] = [];
  try {
    if (found === undefined) return await withoutCommand(before, out);
    const parsed = parseCommand(found.command, found.rest);
    if (parsed.globals.help) {
      const { commandHelp } = await import("./help.ts");
      out.line(commandHelp(found.command, (t) => out.style("bold", t)));
      return EXIT.ok.code;
    }
    return await run(parsed, out, env, deferred);
  } catch (e) {
    return reportError(e, out, { verbose: early.verbose, command: found?.command });
  } finally {
    for (const fn of deferred.toReversed()) await fn();
  }
}

async function run(
  parsed: Parsed,
  out: Output,
  env: NodeJS.ProcessEnv,
  deferred: (() => void | Promise<void>)[],
): Promise<number> {
  const handler = await parsed.command.load();
  const context = makeContext(parsed.globals, out, env, deferred);
  return (await handler(parsed.values as never, context)) ?? EXIT.ok.code;
}

function makeContext(
  globals: Globals,
  out: Output,
  env: NodeJS.ProcessEnv,
  deferred: (() => void | Promise<void>)[],
): Context {
  let settings: Settings | undefined;
  let client: Promise<AenvClient> | undefined;
  let interrupted: AbortController | undefined;
  const context: Context = {
    out,
    env,
    flags: globals,
    settings: () => (settings ??= resolveSettings(globals, env)),
    client: () =>
      (client ??= (async () => {
        const s = context.settings();
        const apiKey = requireKey(s);
        const { AenvClient } = await import("@aenv/client");
        const made = new AenvClient({ apiUrl: s.apiUrl.value, apiKey, userAgent: "aenv-cli" });
        context.defer(() => made[Symbol.dispose]());
        return made;
      })()),
    defer: (fn) => deferred.push(fn),
    interrupted: () => {
      if (interrupted) return interrupted.signal;
      const abort = (interrupted = new AbortController());
      const taken = onSignals((name) => abort.abort(interruption(name)));
      context.defer(() => taken[Symbol.dispose]());
      return abort.signal;
    },
  };
  return context;
}

async function withoutCommand(before: readonly string[], out: Output): Promise<number> {
  const words = before.filter((a) => !a.startsWith("-"));
  if (words.length === 0) {
    if (before.includes("--version") || before.includes("-V")) {
      const { cliVersion } = await import("./run/version.ts");
      out.line(cliVersion());
      return EXIT.ok.code;
    }
    const { mainHelp } = await import("./help.ts");
    const asked = before.includes("--help") || before.includes("-h") || before.length === 0;
    if (asked) {
      out.line(mainHelp((t) => out.style("bold", t)));
      return EXIT.ok.code;
    }
    const option = before.find((a) => a.startsWith("-")) ?? "";
    throw usageError(
      `Unknown option ${option}`,
      likelyOption(option, undefined) ?? "Run aenv --help for the commands.",
    );
  }
  const noun = words[0] ?? "";
  const verbs = COMMANDS.filter((c) => c.name.startsWith(`${noun} `) && !c.hidden);
  if (verbs.length > 0 && words.length === 1) {
    const { nounHelp } = await import("./help.ts");
    out.line(nounHelp(noun, (t) => out.style("bold", t)));
    return before.includes("--help") || before.includes("-h") ? EXIT.ok.code : EXIT.usage.code;
  }
  throw unknownCommand(words);
}
