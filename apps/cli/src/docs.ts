/** `node apps/cli/src/docs.ts [--check]` writes docs/cli.md from the command table, or says that it is out of date. */
import { readFileSync, writeFileSync } from "node:fs";
import { fileURLToPath } from "node:url";
import { type Command, flagName, GROUPS, type Option } from "./define.ts";
import { EXIT } from "./exit.ts";
import { operand, otherNames, usageOf } from "./help.ts";
import { COMMANDS, GLOBAL_OPTIONS, invocation } from "./table.ts";

const PATH = fileURLToPath(new URL("../../../docs/cli.md", import.meta.url));

const cell = (text: string): string => text.replaceAll("|", "\\|");

/** Padded, as the formatter of this repository writes tables. */
function table(head: readonly string[], rows: readonly (readonly string[])[]): string[] {
  const cells = [head, ...rows].map((r) => r.map(cell));
  const widths = head.map((_, i) => Math.max(3, ...cells.map((r) => r[i]?.length ?? 0)));
  const line = (r: readonly string[]): string => `| ${r.map((c, i) => c.padEnd(widths[i] ?? 0)).join(" | ")} |`;
  const [first = [], ...rest] = cells;
  return ["", line(first), line(widths.map((w) => "-".repeat(w))), ...rest.map(line)];
}

function optionRow([key, o]: [string, Option]): string[] {
  const short = o.short === undefined ? "" : `\`-${o.short}\`, `;
  return [`${short}\`--${flagName(key)}${o.value === undefined ? "" : ` ${o.value}`}\``, o.about];
}

function section(c: Command): string[] {
  const out = [`### aenv ${invocation(c)}`, "", `${c.about}.`, "", "```", usageOf(c), "```"];
  const others = otherNames(c);
  if (others.length > 0) out.push("", `Also: ${others.map((n) => `\`aenv ${n}\``).join(", ")}.`);
  for (const paragraph of c.details ?? []) out.push("", paragraph);
  out.push("", "```sh", ...c.examples.flatMap((e) => [`# ${e.about}`, e.run]), "```");
  const operands = Object.entries(c.positionals).map(([key, p]) => [`\`${operand(key, p)}\``, p.about]);
  const options = Object.entries(c.options).map(optionRow);
  if (operands.length + options.length > 0) out.push(...table(["Argument", "Meaning"], [...operands, ...options]));
  return [...out, ""];
}

function cliDocs(): string {
  const out = [
    "# The aenv command",
    "",
    "<!-- Made from the command table by `node apps/cli/src/docs.ts`; change apps/cli/src/commands instead. -->",
    "",
    "`npm run up` puts `aenv` on the PATH; `bin/aenv` of the clone works too. Commands are a noun and a verb (`aenv sandbox list`), most have a short form (`aenv list`). `aenv COMMAND --help` shows what is below.",
    "",
    "```sh",
    "aenv start                                  # a shell in a new sandbox",
    "id=$(aenv start -d --timeout 1h)            # one in the background",
    'aenv exec $id -- python3 -c "print(6 * 7)"  # run something',
    "aenv upload $id ./src /work/                # copy a folder into it",
    "aenv delete $id",
    'eval "$(aenv env)"                          # point an E2B SDK at this node',
    "```",
    "",
    "## Settings",
    "",
    "Each setting is taken from the first place that has it:",
    ...table(
      ["Setting", "Option", "Environment", "aenv auth login", "On the node itself"],
      [
        [
          "API",
          "`--api-url`",
          "`AENV_API_URL`, `E2B_API_URL`",
          "`apiUrl`",
          "where the node of `$AENV_HOME` listens, else `http://127.0.0.1:8000`",
        ],
        ["edge", "`--sandbox-url`", "`AENV_SANDBOX_URL`, `E2B_SANDBOX_URL`", "`sandboxUrl`", "the API's URL"],
        [
          "key",
          "`--api-key`",
          "`AENV_API_KEY`, `E2B_API_KEY`",
          "`apiKey`",
          "`$AENV_HOME/auth.json`, which only the node's owner can read",
        ],
      ],
    ),
    "",
    "`aenv auth login` stores its settings in `~/.config/aenv/config.json` (mode 0600; below `XDG_CONFIG_HOME` where that is set).",
    "",
    "## Output",
    "",
    'Results go to standard output, remarks and progress to standard error. Colours and progress bars appear only on a terminal; `NO_COLOR` or `--no-color` turns colours off. With `--json` the result is one JSON value (one per line with `--follow`), in the API\'s own names where it is an object of the API; an error is one line on standard error: `{"error": {"code", "message", "hint", "exitCode", "data"}}`.',
    ...table(
      ["Command", "Shape of --json"],
      [
        ["start", "`Sandbox` of the API; implies `--detach`"],
        [
          "list, info, metrics, template list, template info",
          "`ListedSandbox[]`, `SandboxDetail`, `SandboxMetric[]`, `Template[]`, `TemplateWithBuilds` of the API",
        ],
        ["logs", "`{timestamp, message, level, fields}[]`"],
        ["port-forward", "`{local, remote}` for each port, once it listens; local is `address:port`"],
        ["exec", "`{exitCode, signal, stdout, stderr}`; signal is a name or null"],
        ["timeout", "`{sandboxID, timeout, endAt}`"],
        ["delete", "`{deleted: id[], missing: id[]}`"],
        ["upload", "`{remote, files, bytes, seconds}`"],
        ["download", "`{local, files, bytes, seconds, skipped: {path, why}[]}`"],
        [
          "env",
          "`{E2B_API_KEY, E2B_API_URL, E2B_SANDBOX_URL}`; with `--tls` `{E2B_API_KEY, E2B_DOMAIN, NODE_EXTRA_CA_CERTS?, SSL_CERT_FILE?}`",
        ],
        ["trust", "`{certificate, fingerprint, installed}`; installed is the file's path or null"],
        ["auth show", "`{apiUrl, sandboxUrl, apiKey}`, each `{value, source}`; the key is null or shortened"],
        [
          "doctor",
          "`{ok, home, instance, serverAnswers, checks[], findings[], resources[]}`; a resource is `{kind, name, owner, detail, fix?}`",
        ],
        ["version", "`{aenv, node, apiUrl}`; node is null when it does not answer"],
      ],
    ),
    "",
    "## Exit codes",
    ...table(
      ["Code", "Meaning"],
      Object.values(EXIT).map((e) => [String(e.code), e.about]),
    ),
    "",
    "`exec`, `connect` and `start` (with a shell) end with the exit code of what ran in the sandbox, 128 + n when signal n ended it, 127 when there is no such program.",
    "",
    "## Options of every command",
    ...table(["Option", "Meaning"], Object.entries<Option>(GLOBAL_OPTIONS).map(optionRow)),
    "",
  ];
  for (const group of GROUPS) {
    out.push(`## ${group}`, "");
    for (const c of COMMANDS) if (c.group === group && !c.hidden) out.push(...section(c));
  }
  return `${out.join("\n").trimEnd()}\n`;
}

const text = cliDocs();
if (process.argv.includes("--check")) {
  let before = "";
  try {
    before = readFileSync(PATH, "utf8");
  } catch {
    // Not there yet: out of date.
  }
  if (before !== text) {
    console.error("docs/cli.md is out of date: run node apps/cli/src/docs.ts");
    process.exitCode = 1;
  }
} else writeFileSync(PATH, text);
