import { type Command, flagName, GROUPS, type Option, type Positional } from "./define.ts";
import { EXIT } from "./exit.ts";
import { COMMANDS, GLOBAL_OPTIONS, invocation } from "./table.ts";

const WIDTH = 92;

export function usageOf(c: Command): string {
  const operands = Object.entries(c.positionals).map(([key, p]) => operand(key, p));
  const last = operands.at(-1);
  if ("command" in c.positionals && c.exit === "remote" && last !== undefined) operands.splice(-1, 1, `-- ${last}`);
  return ["aenv", invocation(c), Object.keys(c.options).length > 0 ? "[OPTIONS]" : "", ...operands]
    .filter((w) => w !== "")
    .join(" ");
}

export function operand(key: string, p: Positional): string {
  const label = (p.label ?? key.toUpperCase()) + (p.variadic ? "..." : "");
  return p.optional ? `[${label}]` : label;
}

export function optionNames(key: string, o: Option): string {
  return `${o.short === undefined ? "    " : `-${o.short}, `}--${flagName(key)}${o.value === undefined ? "" : ` ${o.value}`}`;
}

/** What else the command may be called. */
export function otherNames(c: Command): string[] {
  return [c.name, ...(c.aliases ?? [])].filter((n) => n !== invocation(c));
}

export function commandHelp(c: Command, bold: (text: string) => string): string {
  const out = [c.about + ".", "", `${bold("Usage:")} ${usageOf(c)}`];
  const others = otherNames(c);
  if (others.length > 0) out.push(`${bold("Also:")} ${others.map((n) => `aenv ${n}`).join(", ")}`);
  for (const paragraph of c.details ?? []) out.push("", ...wrap(paragraph, WIDTH));
  if (c.examples.length > 0) {
    out.push("", bold("Examples:"));
    for (const e of c.examples) out.push(`  # ${e.about}`, `  ${e.run}`);
  }
  const operands = Object.entries(c.positionals).map(([key, p]) => [operand(key, p), p.about] as const);
  if (operands.length > 0) out.push("", bold("Arguments:"), ...columns(operands));
  const own = Object.entries(c.options).map(([key, o]) => [optionNames(key, o), o.about] as const);
  if (own.length > 0) out.push("", bold("Options:"), ...columns(own));
  const common = Object.entries<Option>(GLOBAL_OPTIONS).map(([key, o]) => [optionNames(key, o), o.about] as const);
  out.push("", bold("Options of every command:"), ...columns(common));
  return out.join("\n");
}

export function mainHelp(bold: (text: string) => string): string {
  const out = [
    "aenv: sandboxes in microVMs, from the command line.",
    "",
    `${bold("Usage:")} aenv COMMAND [OPTIONS]`,
    "",
    bold("First steps:"),
    "  # A shell in a new sandbox",
    "  aenv start",
    "  # Create one in the background, run something, delete it",
    "  id=$(aenv start -d); aenv exec $id -- uname -a; aenv delete $id",
    "  # Use the node from an E2B SDK",
    '  eval "$(aenv env)"',
  ];
  for (const group of GROUPS) {
    const rows = COMMANDS.filter((c) => c.group === group && !c.hidden).map((c) => [invocation(c), c.about] as const);
    out.push("", bold(`${group}:`), ...columns(rows));
  }
  const common = Object.entries<Option>(GLOBAL_OPTIONS).map(([key, o]) => [optionNames(key, o), o.about] as const);
  out.push("", bold("Options of every command:"), ...columns(common));
  const codes = Object.values(EXIT).map((e) => [String(e.code), e.about] as const);
  out.push("", bold("Exit codes:"), ...columns(codes));
  out.push("", "aenv COMMAND --help explains a command and shows examples.");
  return out.join("\n");
}

/** The commands of one noun. */
export function nounHelp(noun: string, bold: (text: string) => string): string {
  const rows = COMMANDS.filter((c) => c.name.startsWith(`${noun} `) && !c.hidden).map(
    (c) => [c.name, c.about] as const,
  );
  return [
    `${bold("Usage:")} aenv ${noun} COMMAND [OPTIONS]`,
    "",
    bold("Commands:"),
    ...columns(rows),
    "",
    `aenv ${noun} COMMAND --help explains one and shows examples.`,
  ].join("\n");
}

function columns(rows: readonly (readonly [string, string])[]): string[] {
  const left = Math.max(...rows.map(([name]) => name.length));
  return rows.flatMap(([name, about]) =>
    wrap(about, Math.max(30, WIDTH - left - 4)).map((line, i) =>
      `  ${(i === 0 ? name : "").padEnd(left)}  ${line}`.trimEnd(),
    ),
  );
}

function wrap(text: string, width: number): string[] {
  const lines: string[] = [];
  let line = "";
  for (const word of text.split(" ")) {
    if (line !== "" && line.length + 1 + word.length > width) {
      lines.push(line);
      line = word;
    } else line = line === "" ? word : `${line} ${word}`;
  }
  return [...lines, line];
}
