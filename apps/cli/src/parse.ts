import { CommanderError, Command as Parser } from "commander";
import { type Command, flagName, type Option } from "./define.ts";
import { usageError } from "./exit.ts";
import { likelyOption } from "./suggest.ts";
import { COMMANDS, GLOBAL_OPTIONS, invocation } from "./table.ts";

export interface Globals {
  json: boolean;
  verbose: boolean;
  noColor: boolean;
  help: boolean;
  apiUrl: string | undefined;
  sandboxUrl: string | undefined;
  apiKey: string | undefined;
}

export interface Parsed {
  command: Command;
  values: Record<string, unknown>;
  globals: Globals;
}

/** The command that the words name and what follows it; undefined when there is none. */
export function findCommand(
  argv: readonly string[],
): { command: Command; rest: string[]; words: string[] } | undefined {
  const words: string[] = [];
  const positions: number[] = [];
  for (let i = 0; i < argv.length && words.length < 2; i++) {
    const token = argv[i] ?? "";
    if (token === "--") break;
    if (!token.startsWith("-")) {
      words.push(token);
      positions.push(i);
    } else if (takesValue(token)) i++;
  }
  for (let n = words.length; n > 0; n--) {
    const name = words.slice(0, n).join(" ");
    const command = COMMANDS.find((c) => c.name === name || c.short === name || c.aliases?.includes(name));
    if (command === undefined) continue;
    const used = new Set(positions.slice(0, n));
    return { command, rest: argv.filter((_, i) => !used.has(i)), words };
  }
  return undefined;
}

/** Whether a global option before the command's words has its value in the next token. */
function takesValue(token: string): boolean {
  return Object.entries<Option>(GLOBAL_OPTIONS).some(
    ([key, o]) => o.value !== undefined && token === `--${flagName(key)}`,
  );
}

/** Reads the words after a command's name. Throws INVALID_ARGUMENT with what is wrong and how to see the usage. */
export function parseCommand(command: Command, rest: readonly string[]): Parsed {
  const usage = `Run aenv ${invocation(command)} --help for its usage.`;
  const parser = new Parser()
    .exitOverride()
    .helpOption(false)
    .allowExcessArguments(false)
    .showSuggestionAfterError(false)
    .configureOutput({ writeErr: () => {}, writeOut: () => {} });
  const options = { ...command.options, ...GLOBAL_OPTIONS };
  for (const [key, option] of Object.entries<Option>(options)) addOption(parser, key, option);
  // Presence is judged by the schemas, whose messages name the value.
  for (const [key, p] of Object.entries(command.positionals)) parser.argument(`[${key}${p.variadic ? "..." : ""}]`);
  let raw: Record<string, unknown>;
  let operands: unknown[];
  try {
    parser.action(() => {});
    const [own, after] = splitCommand(command, rest);
    parser.parse(own, { from: "user" });
    raw = parser.opts();
    operands = parser.processedArgs;
    if (after !== undefined) {
      const last = Object.keys(command.positionals).length - 1;
      operands[last] = [...((operands[last] as string[] | undefined) ?? []), ...after];
    }
  } catch (e) {
    if (!(e instanceof CommanderError)) throw e;
    throw usageError(sentence(e.message), hintFor(command, e) ?? usage, e);
  }
  const globals = values(GLOBAL_OPTIONS, (key, o) => read(o, key, raw, usage)) as unknown as Globals;
  if (globals.help) return { command, values: {}, globals };
  return {
    command,
    globals,
    values: {
      ...values(command.options, (key, o) => read(o, key, raw, usage)),
      ...Object.fromEntries(
        Object.entries(command.positionals).map(([key, p], i) => {
          const given = operands[i];
          const label = p.label ?? key.toUpperCase();
          if (given === undefined && !p.variadic && !p.optional) throw usageError(`${label} is missing`, usage);
          return [key, check(p.schema.safeParse(p.variadic ? (given ?? []) : given), label, usage)];
        }),
      ),
    },
  };
}

/** What follows -- is the guest's command, and never an operand that was left out before it. */
function splitCommand(command: Command, rest: readonly string[]): [own: string[], after: string[] | undefined] {
  const at = rest.indexOf("--");
  if (at < 0 || !("command" in command.positionals) || command.exit !== "remote") return [[...rest], undefined];
  return [rest.slice(0, at), rest.slice(at + 1)];
}

function addOption(parser: Parser, key: string, option: Option): void {
  const names = `${option.short === undefined ? "" : `-${option.short}, `}--${flagName(key)}`;
  if (option.value === undefined) parser.option(names);
  else if (option.repeat)
    parser.option(`${names} <value>`, "", (value: string, before: string[] | undefined) => [...(before ?? []), value]);
  else parser.option(`${names} <value>`);
}

function read(option: Option, key: string, raw: Record<string, unknown>, usage: string): unknown {
  // The parser understands --no-x as x being false.
  const negated = /^no([A-Z])(.*)$/.exec(key);
  if (negated) return raw[`${negated[1]?.toLowerCase()}${negated[2]}`] === false;
  return check(option.schema.safeParse(raw[key]), `--${flagName(key)}`, usage);
}

function values<O extends Record<string, Option>>(
  options: O,
  one: (key: string, option: Option) => unknown,
): Record<string, unknown> {
  return Object.fromEntries(Object.entries(options).map(([key, option]) => [key, one(key, option)]));
}

function check(
  result: { success: true; data: unknown } | { success: false; error: { issues: { message: string }[] } },
  label: string,
  usage: string,
): unknown {
  if (result.success) return result.data;
  const message = result.error.issues[0]?.message ?? "is not valid";
  throw usageError(/^(is|are) /.test(message) ? `${label} ${message}` : `${label}: ${message}`, usage);
}

function sentence(message: string): string {
  const text = message.replace(/^error: /, "").replace(/\n/g, " ");
  return text.charAt(0).toUpperCase() + text.slice(1);
}

function hintFor(command: Command, e: CommanderError): string | undefined {
  if (e.code !== "commander.unknownOption") return undefined;
  const given = /'(-[^']*)'/.exec(e.message)?.[1] ?? "";
  const likely = likelyOption(given, command);
  if (likely !== undefined || command.exit !== "remote" || !("command" in command.positionals)) return likely;
  return "Write the command after --, as in aenv exec ID -- ls -l.";
}
