import * as z from "zod";
import { defineCommand } from "../define.ts";
import { count, flag, forward, pairs, sandboxId, seconds, text } from "../values.ts";

const id = { schema: sandboxId, about: "Sandbox id.", complete: "sandbox" } as const;
const user = { schema: text.optional(), value: "NAME", about: "User in the sandbox.", short: "u" } as const;

export const start = defineCommand({
  name: "sandbox start",
  short: "start",
  aliases: ["sandbox create"],
  group: "Sandboxes",
  about: "Create a sandbox and open a shell in it",
  details: [
    "The sandbox stays when the shell ends, until its time is over, unless --rm is given. While a shell is open its end is moved on, so it does not end under your hands.",
    "At the end of its time it is deleted, or with --auto-pause paused.",
    "With --detach the id is printed and nothing is attached; --json implies it.",
  ],
  examples: [
    { run: "aenv start", about: "A shell in a new sandbox of the template base" },
    { run: "id=$(aenv start -d --timeout 1h)", about: "Create one for an hour and keep its id" },
    { run: "aenv start base --rm --env DEBUG=1", about: "Throw it away when the shell ends" },
    { run: "aenv start -d --auto-pause --auto-resume", about: "Pause it when its time is over, wake it by traffic" },
  ],
  positionals: {
    template: {
      schema: text.default("base"),
      about: "Template or snapshot: name, id or name:tag; base when left out.",
      optional: true,
      complete: "template",
    },
  },
  options: {
    detach: { schema: flag, short: "d", about: "Print the id instead of opening a shell." },
    rm: { schema: flag, about: "Delete the sandbox when the shell ends." },
    timeout: {
      schema: seconds.default(300),
      value: "TIME",
      about: "Time until it ends: seconds, or 90s, 15m, 2h. Default 300.",
    },
    env: { schema: pairs, value: "KEY=VALUE", short: "e", repeat: true, about: "Variable for every process in it." },
    metadata: {
      schema: pairs,
      value: "KEY=VALUE",
      short: "m",
      repeat: true,
      about: "Label to find it by (list --metadata).",
    },
    autoPause: { schema: flag, about: "Pause it at the end of its time instead of deleting it." },
    autoResume: {
      schema: flag,
      about: "While it is paused, a request to one of its ports resumes it. With --auto-pause.",
    },
    name: { schema: text.optional(), value: "NAME", about: "Short for --metadata name=NAME; list shows it." },
    internet: {
      schema: z.enum(["on", "off"]).default("on"),
      value: "on|off",
      complete: ["on", "off"],
      about: "Whether it may reach the internet. Default on.",
    },
    user,
  },
  exit: "remote",
});

export const connect = defineCommand({
  name: "sandbox connect",
  short: "connect",
  group: "Sandboxes",
  about: "Open a shell in a running sandbox",
  details: [
    "A paused sandbox is resumed first. The exit code is the shell's. Leave with exit or Ctrl-D; Enter ~ . leaves a shell that does not answer.",
  ],
  examples: [
    { run: "aenv connect ID", about: "A login shell" },
    { run: "aenv connect ID --user root", about: "As root" },
  ],
  positionals: { id },
  options: {
    user,
    cwd: { schema: text.optional(), value: "DIR", short: "w", about: "Folder to start in." },
    timeout: { schema: seconds.default(300), value: "TIME", about: "End no earlier than this from now. Default 300." },
  },
  exit: "remote",
});

export const exec = defineCommand({
  name: "sandbox exec",
  short: "exec",
  group: "Sandboxes",
  about: "Run a command in a sandbox",
  details: [
    "The command gets its arguments as they are, without a shell in between; use sh -c for pipes and variables. Standard input is passed on unless it is a terminal. The exit code is the command's, 128+n when signal n ended it.",
    "Ctrl-C and SIGTERM go to the command's process group. There is no time limit unless --timeout sets one.",
  ],
  examples: [
    { run: "aenv exec ID -- python3 -c 'print(1)'", about: "Run Python" },
    { run: "tar c src | aenv exec ID -- tar x -C /work", about: "Pass standard input" },
    { run: "aenv exec ID -- sh -c 'echo $HOME | wc -c'", about: "Use a shell for pipes" },
    { run: "aenv exec -t ID -- top", about: "A program that wants a terminal" },
  ],
  positionals: {
    id,
    command: {
      schema: z.array(z.string()).min(1, { error: "is missing; write it after --" }),
      about: "Command and its arguments.",
      variadic: true,
      label: "CMD",
    },
  },
  options: {
    tty: { schema: flag, short: "t", about: "Give the command a terminal." },
    noStdin: { schema: flag, short: "n", about: "Do not pass standard input." },
    user,
    cwd: { schema: text.optional(), value: "DIR", short: "w", about: "Folder to run in." },
    env: { schema: pairs, value: "KEY=VALUE", short: "e", repeat: true, about: "Variable for the command." },
    timeout: {
      schema: seconds.default(0),
      value: "TIME",
      about: "Kill the command after this; exit code 124. Default 0: never.",
    },
  },
  exit: "remote",
});

export const list = defineCommand({
  name: "sandbox list",
  short: "list",
  aliases: ["ls", "sandbox ls"],
  group: "Sandboxes",
  about: "List sandboxes, newest first",
  examples: [
    { run: "aenv list", about: "Running and paused ones" },
    { run: "aenv list --state running --metadata team=red", about: "Only some" },
    { run: "aenv list --json | jq -r '.[].sandboxID'", about: "For scripts" },
    { run: "aenv list -q", about: "Ids only" },
  ],
  positionals: {},
  options: {
    state: {
      schema: z.array(z.enum(["running", "paused"])).optional(),
      value: "STATE",
      short: "s",
      repeat: true,
      complete: ["running", "paused"],
      about: "running or paused; may be repeated.",
    },
    metadata: {
      schema: pairs,
      value: "KEY=VALUE",
      short: "m",
      repeat: true,
      about: "Only with this label; may be repeated.",
    },
    template: { schema: text.optional(), value: "TEMPLATE", complete: "template", about: "Only of this template." },
    limit: { schema: count.optional(), value: "N", short: "n", about: "At most N; all when left out." },
    quiet: { schema: flag, short: "q", about: "Print ids only." },
  },
});

export const info = defineCommand({
  name: "sandbox info",
  short: "info",
  group: "Sandboxes",
  about: "Show one sandbox",
  examples: [
    { run: "aenv info ID", about: "State, times, size, labels" },
    { run: "aenv info ID --json", about: "Everything the API answers, its access token included" },
  ],
  positionals: { id },
  options: {},
});

export const timeout = defineCommand({
  name: "sandbox timeout",
  short: "timeout",
  group: "Sandboxes",
  about: "Set when a sandbox ends, counted from now",
  examples: [
    { run: "aenv timeout ID 3600", about: "In one hour" },
    { run: "aenv timeout ID 2h", about: "In two hours" },
    { run: "aenv timeout ID 0", about: "Now" },
  ],
  positionals: { id, seconds: { schema: seconds, about: "Seconds, or 90s, 15m, 2h, 1d." } },
  options: {},
});

export const metrics = defineCommand({
  name: "sandbox metrics",
  short: "metrics",
  group: "Sandboxes",
  about: "Show processor, memory and disk use",
  examples: [
    { run: "aenv metrics ID", about: "The newest sample" },
    { run: "aenv metrics ID --follow", about: "Each new sample until Ctrl-C (exit code 130)" },
    { run: "aenv metrics ID --last 10m --json", about: "Samples of ten minutes" },
  ],
  positionals: { id },
  options: {
    follow: { schema: flag, short: "f", about: "Print each new sample." },
    last: { schema: seconds.optional(), value: "TIME", about: "All samples of this time instead of the newest." },
  },
});

export const logs = defineCommand({
  name: "sandbox logs",
  short: "logs",
  group: "Sandboxes",
  about: "Show what happened to a sandbox",
  examples: [
    { run: "aenv logs ID", about: "All entries the node keeps" },
    { run: "aenv logs ID --follow --level warn", about: "Warnings and errors, new ones as they come" },
  ],
  positionals: { id },
  options: {
    follow: { schema: flag, short: "f", about: "Print new entries as they come." },
    level: {
      schema: z.enum(["debug", "info", "warn", "error"]).optional(),
      value: "LEVEL",
      complete: ["debug", "info", "warn", "error"],
      about: "This level and above.",
    },
    search: { schema: text.optional(), value: "TEXT", about: "Only entries with this text." },
  },
});

export const portForward = defineCommand({
  name: "sandbox port-forward",
  short: "port-forward",
  group: "Sandboxes",
  about: "Reach ports of a sandbox at ports of this machine",
  details: [
    "Any protocol over TCP, through the node's API address; works for every port of the sandbox but that of its agent. PORT takes the same port here, LOCAL:PORT another one, :PORT a free one. It goes on until Ctrl-C; a connection to a port on which nothing listens in the sandbox is closed, others go on.",
  ],
  examples: [
    { run: "aenv port-forward ID 8080", about: "The sandbox's port 8080 at 127.0.0.1:8080" },
    { run: "aenv port-forward ID 15432:5432 :6379", about: "Two ports, the second at a free one" },
  ],
  positionals: {
    id,
    ports: {
      schema: z.array(forward).min(1, { error: "is missing" }),
      variadic: true,
      about: "Ports to forward.",
      label: "[LOCAL:]PORT",
    },
  },
  options: {
    address: { schema: text.default("127.0.0.1"), value: "ADDRESS", about: "Where to listen. Default 127.0.0.1." },
  },
});

export const remove = defineCommand({
  name: "sandbox delete",
  short: "delete",
  aliases: ["rm", "sandbox rm", "sandbox kill"],
  group: "Sandboxes",
  about: "End sandboxes and delete their data",
  examples: [
    { run: "aenv delete ID1 ID2", about: "Two of them" },
    { run: "aenv delete --all --metadata team=red", about: "All with a label, after a question" },
    { run: "aenv delete --all --yes", about: "All, without a question" },
  ],
  positionals: {
    ids: { ...id, schema: z.array(sandboxId), variadic: true, optional: true, about: "Sandbox ids.", label: "ID" },
  },
  options: {
    all: { schema: flag, about: "All sandboxes (that match the filters)." },
    state: list.options.state,
    metadata: list.options.metadata,
    template: list.options.template,
    yes: { schema: flag, short: "y", about: "Do not ask." },
  },
});
