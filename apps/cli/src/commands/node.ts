import * as z from "zod";
import { defineCommand } from "../define.ts";
import { flag, text } from "../values.ts";

const SHELLS = ["bash", "zsh", "fish"] as const;

export const authShow = defineCommand({
  name: "auth show",
  aliases: ["auth"],
  group: "Node and set-up",
  about: "Show the node and key in use, and where they come from",
  details: [
    "Each setting is taken from the first of: its option, AENV_API_URL / AENV_SANDBOX_URL / AENV_API_KEY, the same names with E2B_, the file of aenv auth login, and $AENV_HOME/auth.json (which only the node's owner can read).",
  ],
  examples: [
    { run: "aenv auth show", about: "The key is shortened" },
    { run: "aenv auth show --reveal", about: "The whole key" },
  ],
  positionals: {},
  options: { reveal: { schema: flag, about: "Print the whole key." } },
});

export const authLogin = defineCommand({
  name: "auth login",
  group: "Node and set-up",
  about: "Save the node's URL and a key",
  details: [
    "They are checked against the node and stored in ~/.config/aenv/config.json (readable by you only). The key is asked for when it is not given, or read from standard input when that is not a terminal.",
  ],
  examples: [
    { run: "aenv auth login --api-url http://node:8000", about: "Asks for the key" },
    { run: "aenv auth login --api-url http://node:8000 < key.txt", about: "The key never appears on a command line" },
  ],
  positionals: {},
  options: { unchecked: { schema: flag, about: "Save without asking the node." } },
});

export const authLogout = defineCommand({
  name: "auth logout",
  group: "Node and set-up",
  about: "Forget the saved URL and key",
  examples: [{ run: "aenv auth logout", about: "Deletes ~/.config/aenv/config.json" }],
  positionals: {},
  options: {},
});

export const env = defineCommand({
  name: "env",
  group: "Node and set-up",
  about: "Print what to export to use this node from an SDK",
  details: [
    "Without --tls the SDKs send everything to one base URL by plain HTTP, which needs neither DNS nor certificates. With --tls they use E2B_DOMAIN: https and a host name for each sandbox, as the names of sandbox ports (getHost) have it; these names must lead to the node. The node's own authority, where it has one, is named to Node (NODE_EXTRA_CA_CERTS) and Python (SSL_CERT_FILE).",
  ],
  examples: [
    { run: 'eval "$(aenv env)"', about: "In bash, zsh, sh" },
    { run: "aenv env --shell fish | source", about: "In fish" },
    { run: 'eval "$(aenv env --tls)"', about: "Everything by https, with a host name for each sandbox" },
    { run: "aenv env --json", about: "As an object" },
  ],
  positionals: {},
  options: {
    shell: {
      schema: z.enum(["sh", "fish"]).default("sh"),
      value: "SHELL",
      complete: ["sh", "fish"],
      about: "sh or fish. Default sh.",
    },
    tls: { schema: flag, about: "For https and a host name for each sandbox." },
  },
});

export const trust = defineCommand({
  name: "trust",
  group: "Node and set-up",
  about: "Print or install the certificate of the node's own authority",
  details: [
    "A node without a certificate of the operator's speaks TLS with one of its own authority, made at its first start. Clients reach it by https once they trust that authority. aenv trust prints its certificate (PEM); --install adds it to the authorities of this machine, which curl, Python and Go use. Node programs read NODE_EXTRA_CA_CERTS instead, and browsers have lists of their own.",
    "Over plain HTTP anybody on the way could put in another certificate: compare the fingerprint with what aenv trust says on the node itself.",
  ],
  examples: [
    { run: "aenv trust > agentenv.crt", about: "To a file" },
    { run: "sudo aenv trust --install", about: "This machine trusts the node" },
    { run: "sudo aenv trust --remove", about: "And no more" },
  ],
  positionals: {},
  options: {
    install: { schema: flag, about: "Add it to this machine's authorities; needs root." },
    remove: { schema: flag, about: "Take it out again; needs root." },
  },
});

export const doctor = defineCommand({
  name: "doctor",
  group: "Node and set-up",
  about: "Check the node and look for anything left behind on this host",
  details: [
    "Asks the node what it owns, then looks at this host itself: processes, network namespaces, interfaces, firewall tables, mounts, cgroups and files that carry AgentENV's names must all have an owner. Exits 0 only when nothing is wrong. Run it on the node as root to see everything.",
  ],
  examples: [
    { run: "aenv doctor", about: "Findings and what to do" },
    { run: "aenv doctor --all", about: "Every resource with its owner" },
  ],
  positionals: {},
  options: { all: { schema: flag, short: "a", about: "List every resource, not only findings." } },
});

export const completion = defineCommand({
  name: "completion",
  group: "Node and set-up",
  about: "Print a completion script",
  examples: [
    { run: 'eval "$(aenv completion bash)"', about: "In ~/.bashrc" },
    { run: 'eval "$(aenv completion zsh)"', about: "In ~/.zshrc, after compinit" },
    { run: "aenv completion fish > ~/.config/fish/completions/aenv.fish", about: "Once" },
  ],
  positionals: {
    shell: { schema: z.enum(SHELLS, { error: "is bash, zsh or fish" }), about: "bash, zsh or fish.", complete: SHELLS },
  },
  options: {},
});

/** Called by the completion scripts. */
export const complete = defineCommand({
  name: "complete",
  group: "Node and set-up",
  about: "Print values for completion, one per line",
  examples: [],
  positionals: {
    kind: { schema: z.enum(["sandbox", "template", "snapshot"]), about: "sandbox, template or snapshot." },
  },
  options: {},
  hidden: true,
});

export const version = defineCommand({
  name: "version",
  group: "Node and set-up",
  about: "Print the versions of aenv and of the node",
  examples: [{ run: "aenv version", about: "The node's is left out when it cannot be reached" }],
  positionals: {},
  options: { client: { schema: flag, about: "Only aenv's own; asks no node." } },
});

export const help = defineCommand({
  name: "help",
  group: "Node and set-up",
  about: "Explain a command",
  examples: [{ run: "aenv help exec", about: "Same as aenv exec --help" }],
  positionals: {
    command: { schema: z.array(text), variadic: true, optional: true, about: "The command's words.", label: "COMMAND" },
  },
  options: {},
});
