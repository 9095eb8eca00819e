import { type Command, type Completion, flagName, type Option, type Positional } from "./define.ts";
import { otherNames } from "./help.ts";
import { COMMANDS, GLOBAL_OPTIONS, invocation } from "./table.ts";

/** One way to write a command, and what may follow it. */
interface Form {
  words: string;
  command: Command;
}

const forms = (): Form[] =>
  COMMANDS.filter((c) => !c.hidden).flatMap((command) =>
    [invocation(command), ...otherNames(command)].map((words) => ({ words, command })),
  );
const optionsOf = (c: Command): [string, Option][] => Object.entries<Option>({ ...c.options, ...GLOBAL_OPTIONS });
const sh = (text: string): string => `'${text.replaceAll("'", "'\\''")}'`;

export function completionScript(shell: "bash" | "zsh" | "fish"): string {
  return { bash, zsh, fish }[shell]();
}

/** Words after `aenv` that begin a command: first words, and second words by first. */
function wordTree(): Map<string, string[]> {
  const tree = new Map<string, string[]>();
  for (const { words } of forms()) {
    const [first = "", second] = words.split(" ");
    const seconds = tree.get(first) ?? [];
    if (second !== undefined) seconds.push(second);
    tree.set(first, seconds);
  }
  return tree;
}

function bashAction(completion: Completion | undefined): string {
  if (completion === undefined) return ":";
  if (completion === "file") return 'compopt -o filenames 2>/dev/null; COMPREPLY=($(compgen -f -- "$cur"))';
  if (completion === "sandbox" || completion === "template" || completion === "snapshot")
    return `COMPREPLY=($(compgen -W "$(aenv complete ${completion} 2>/dev/null)" -- "$cur"))`;
  return `COMPREPLY=($(compgen -W ${sh(completion.join(" "))} -- "$cur"))`;
}

/** Positions of a command's operands as shell case branches; a variadic one takes all that follow. */
function operandBranches(c: Command, action: (completion: Completion | undefined) => string, from: number): string[] {
  return Object.values<Positional>(c.positionals).map(
    (p, i) => `${p.variadic ? "*" : String(i + from)}) ${action(p.complete)} ;;`,
  );
}

function bash(): string {
  const tree = wordTree();
  const valued = new Set(
    COMMANDS.flatMap((c) => optionsOf(c).flatMap(([k, o]) => (o.value === undefined ? [] : optionWords(k, o)))),
  );
  return `# bash completion for aenv
_aenv() {
  local cur prev cmd="" n=0 i word
  cur=\${COMP_WORDS[COMP_CWORD]}
  prev=\${COMP_WORDS[COMP_CWORD-1]}
  COMPREPLY=()
  for ((i = 1; i < COMP_CWORD; i++)); do
    word=\${COMP_WORDS[i]}
    case $word in
      --) return ;;
      ${[...valued].join("|")}) ((i++)) ;;
      -*) ;;
      *)
        if [[ -z $cmd ]]; then
          cmd=$word
        elif [[ $n -eq 0 && " ${[...tree].flatMap(([a, bs]) => bs.map((b) => `${a}/${b}`)).join(" ")} " == *" $cmd/$word "* ]]; then
          cmd="$cmd $word"
        else
          ((n++))
        fi ;;
    esac
  done
  case "$cmd" in
    "") COMPREPLY=($(compgen -W ${sh(cur(tree))} -- "$cur")); return ;;
${[...tree]
  .filter(([first, seconds]) => seconds.length > 0 && !forms().some((f) => f.words === first))
  .map(([first, seconds]) => `    ${first}) COMPREPLY=($(compgen -W ${sh(seconds.join(" "))} -- "$cur")); return ;;`)
  .join("\n")}
  esac
  case "$cmd" in
${forms()
  .map(({ words, command }) => {
    const options = optionsOf(command);
    const values = options
      .filter(([, o]) => o.value !== undefined)
      .map(([k, o]) => `        ${optionWords(k, o).join("|")}) ${bashAction(o.complete)}; return ;;`);
    const names = options.map(([k]) => `--${flagName(k)}`).join(" ");
    const seconds = tree.get(words) ?? [];
    return `    ${sh(words)})
      case "$prev" in
${values.join("\n")}
      esac
      if [[ $cur == -* ]]; then COMPREPLY=($(compgen -W ${sh(names)} -- "$cur")); return; fi
      case $n in
${operandBranches(command, bashAction, 0)
  .concat(seconds.length > 0 ? [`0) COMPREPLY=($(compgen -W ${sh(seconds.join(" "))} -- "$cur")) ;;`] : [])
  .map((l) => `        ${l}`)
  .join("\n")}
        *) : ;;
      esac ;;`;
  })
  .join("\n")}
  esac
}
complete -F _aenv aenv
`;
}

const cur = (tree: Map<string, string[]>): string => [...tree.keys()].join(" ");

function optionWords(key: string, o: Option): string[] {
  return [`--${flagName(key)}`, ...(o.short === undefined ? [] : [`-${o.short}`])];
}

const zshText = (text: string): string => text.replace(/[[\]:\\']/g, (c) => (c === "'" ? "'\\''" : `\\${c}`));

function zshAction(completion: Completion | undefined): string {
  if (completion === undefined) return " ";
  if (completion === "file") return "_files";
  if (completion === "sandbox") return "_aenv_sandboxes";
  if (completion === "template") return "_aenv_templates";
  if (completion === "snapshot") return "_aenv_snapshots";
  return `(${completion.join(" ")})`;
}

function zsh(): string {
  const tree = wordTree();
  const about = (words: string): string =>
    forms().find((f) => f.words === words)?.command.about ?? `commands of ${words}`;
  const describe = (items: string[], prefix: string): string =>
    items.map((w) => `'${w}:${zshText(about(`${prefix}${w}`))}'`).join(" ");
  return `#compdef aenv
_aenv_sandboxes() { local -a ids; ids=(\${(f)"$(aenv complete sandbox 2>/dev/null)"}); compadd -a ids }
_aenv_templates() { local -a names; names=(\${(f)"$(aenv complete template 2>/dev/null)"}); compadd -a names }
_aenv_snapshots() { local -a names; names=(\${(f)"$(aenv complete snapshot 2>/dev/null)"}); compadd -a names }
_aenv() {
  local cmd=\${words[2]:-}
  local -a choices
  if (( CURRENT == 2 )); then
    choices=(${describe([...tree.keys()], "")})
    _describe command choices
    return
  fi
  case $cmd in
${[...tree]
  .filter(([, seconds]) => seconds.length > 0)
  .map(
    ([first, seconds]) => `    ${first})
      if (( CURRENT == 3 )); then choices=(${describe(seconds, `${first} `)}); _describe command choices; return; fi
      cmd="$cmd \${words[3]}"; shift words; (( CURRENT-- )) ;;`,
  )
  .join("\n")}
  esac
  shift words; (( CURRENT-- ))
  case $cmd in
${forms()
  .map(({ words, command }) => {
    const options = optionsOf(command).flatMap(([key, o]) =>
      optionWords(key, o).map((name) => {
        const value = o.value === undefined ? "" : `:${zshText(o.value)}:${zshAction(o.complete)}`;
        return `'${o.repeat ? "*" : ""}${name}[${zshText(o.about)}]${value}'`;
      }),
    );
    const operands = Object.entries<Positional>(command.positionals).map(
      ([key, p], i) => `'${p.variadic ? "*" : i + 1}:${key}:${zshAction(p.complete)}'`,
    );
    return `    ${sh(words)}) _arguments -S ${[...options, ...operands].join(" ")} ;;`;
  })
  .join("\n")}
  esac
}
if [ "$funcstack[1]" = "_aenv" ]; then _aenv "$@"; else compdef _aenv aenv; fi
`;
}

function fish(): string {
  const tree = wordTree();
  const lines = [
    "# fish completion for aenv",
    "complete -c aenv -f",
    "function __aenv_words",
    "  set -l tokens (commandline -opc)",
    "  string match -v -- '-*' $tokens[2..-1]",
    "end",
    "function __aenv_at",
    "  set -l words (__aenv_words)",
    '  test "$words" = "$argv"',
    "end",
    "function __aenv_in",
    "  set -l words (__aenv_words)",
    "  set -l n (count $argv)",
    '  test (count $words) -ge $n; and test "$words[1..$n]" = "$argv"',
    "end",
  ];
  for (const [first, seconds] of tree) {
    const own = forms().find((f) => f.words === first);
    lines.push(
      `complete -c aenv -n '__aenv_at' -a ${sh(first)} -d ${sh(own?.command.about ?? `Commands of ${first}`)}`,
    );
    for (const second of seconds) {
      const about = forms().find((f) => f.words === `${first} ${second}`)?.command.about ?? "";
      lines.push(`complete -c aenv -n '__aenv_at ${first}' -a ${sh(second)} -d ${sh(about)}`);
    }
  }
  for (const { words, command } of forms()) {
    const when = `-n ${sh(`__aenv_in ${words}`)}`;
    for (const [key, o] of optionsOf(command)) {
      const short = o.short === undefined ? "" : ` -s ${o.short}`;
      const value = o.value === undefined ? "" : ` -x${fishValues(o.complete)}`;
      lines.push(`complete -c aenv ${when} -l ${flagName(key)}${short}${value} -d ${sh(o.about)}`);
    }
    for (const p of Object.values<Positional>(command.positionals))
      if (p.complete === "file") lines.push(`complete -c aenv ${when} -F`);
      else if (p.complete !== undefined) lines.push(`complete -c aenv ${when}${fishValues(p.complete)}`);
  }
  return `${lines.join("\n")}\n`;
}

function fishValues(completion: Completion | undefined): string {
  if (completion === undefined || completion === "file") return "";
  if (completion === "sandbox" || completion === "template" || completion === "snapshot")
    return ` -a '(aenv complete ${completion} 2>/dev/null)'`;
  return ` -a ${sh(completion.join(" "))}`;
}
