import { type Command, flagName } from "./define.ts";
import { usageError } from "./exit.ts";
import { COMMANDS, GLOBAL_OPTIONS, invocation } from "./table.ts";

/** What other tools call our commands. */
const FOREIGN: Readonly<Record<string, string>> = {
  attach: "connect",
  clone: "fork",
  copy: "upload",
  cp: "upload",
  create: "start",
  destroy: "delete",
  kill: "delete",
  launch: "start",
  login: "auth login",
  logout: "auth logout",
  new: "start",
  ps: "list",
  pull: "download",
  push: "upload",
  remove: "delete",
  run: "exec",
  shell: "connect",
  show: "info",
  ssh: "connect",
  stats: "metrics",
  status: "doctor",
  stop: "delete",
  unpause: "resume",
};

/** The error for words that name no command, with the one that was probably meant. */
export function unknownCommand(words: readonly string[]): Error {
  const [noun = "", verb] = words;
  const isNoun = COMMANDS.some((c) => c.name.startsWith(`${noun} `) && !c.hidden);
  const shown = isNoun && verb !== undefined ? `${noun} ${verb}` : noun;
  return usageError(
    `There is no command ${JSON.stringify(shown)}`,
    likelyCommand(noun, verb) ?? "Run aenv --help for the commands.",
  );
}

/** "Did you mean ...?" for words that name no command. */
function likelyCommand(noun: string, verb: string | undefined): string | undefined {
  const names = COMMANDS.filter((c) => !c.hidden).flatMap((c) => [c.name, invocation(c), ...(c.aliases ?? [])]);
  const foreign = FOREIGN[noun];
  const found =
    (verb === undefined ? undefined : nearest(`${noun} ${verb}`, names)) ??
    (foreign !== undefined && names.includes(foreign) ? foreign : undefined) ??
    nearest(noun, [...names, ...names.flatMap((n) => (n.includes(" ") ? [n.split(" ")[0] ?? n] : []))]);
  return found === undefined ? undefined : `Did you mean aenv ${found}?`;
}

/** "Did you mean ...?" for an option that a command does not have; without a command, of those that all have. */
export function likelyOption(given: string, command: Command | undefined): string | undefined {
  const options = { ...command?.options, ...GLOBAL_OPTIONS, ...(command === undefined ? { version: true } : {}) };
  const found = nearest(
    (given.split("=")[0] ?? given).replace(/^-+/, ""),
    Object.keys(options).map((key) => flagName(key)),
  );
  return found === undefined ? undefined : `Did you mean --${found}?`;
}

/** The name that needs the fewest edits, when that is few for its length. */
function nearest(word: string, names: readonly string[]): string | undefined {
  const scored = names.map((name) => ({ name, edits: edits(word, name) })).sort((a, b) => a.edits - b.edits)[0];
  return scored !== undefined && scored.edits <= Math.max(1, Math.floor(word.length / 3)) ? scored.name : undefined;
}

/** Letters to insert, delete, replace, or swap with their neighbour. */
function edits(a: string, b: string): number {
  let before: number[] = [];
  let row = Array.from({ length: b.length + 1 }, (_, i) => i);
  for (let i = 1; i <= a.length; i++) {
    const next = [i];
    for (let j = 1; j <= b.length; j++) {
      const same = a[i - 1] === b[j - 1];
      const swapped = i > 1 && j > 1 && a[i - 1] === b[j - 2] && a[i - 2] === b[j - 1];
      next[j] = Math.min(
        (row[j] ?? 0) + 1,
        (next[j - 1] ?? 0) + 1,
        (row[j - 1] ?? 0) + (same ? 0 : 1),
        swapped ? (before[j - 2] ?? 0) + 1 : Number.POSITIVE_INFINITY,
      );
    }
    [before, row] = [row, next];
  }
  return row[b.length] ?? 0;
}
