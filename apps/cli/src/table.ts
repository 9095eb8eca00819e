import * as files from "./commands/files.ts";
import * as network from "./commands/network.ts";
import * as node from "./commands/node.ts";
import * as sandbox from "./commands/sandbox.ts";
import * as state from "./commands/state.ts";
import * as store from "./commands/store.ts";
import * as template from "./commands/template.ts";
import { bind, type Command, type Option } from "./define.ts";
import { flag, text } from "./values.ts";

/** Every command, in the order of help and documentation. */
export const COMMANDS: readonly Command[] = [
  bind(sandbox.start, async () => (await import("./run/start.ts")).start),
  bind(sandbox.connect, async () => (await import("./run/start.ts")).connect),
  bind(sandbox.exec, async () => (await import("./run/exec.ts")).exec),
  bind(sandbox.list, async () => (await import("./run/sandboxes.ts")).list),
  bind(sandbox.info, async () => (await import("./run/sandboxes.ts")).info),
  bind(sandbox.timeout, async () => (await import("./run/sandboxes.ts")).timeout),
  bind(sandbox.metrics, async () => (await import("./run/observe.ts")).metrics),
  bind(sandbox.logs, async () => (await import("./run/observe.ts")).logs),
  bind(sandbox.portForward, async () => (await import("./run/port-forward.ts")).portForward),
  bind(sandbox.remove, async () => (await import("./run/sandboxes.ts")).remove),
  bind(network.networkSet, async () => (await import("./run/network.ts")).set),
  bind(network.networkShow, async () => (await import("./run/network.ts")).show),
  bind(state.pause, async () => (await import("./run/state.ts")).pause),
  bind(state.resume, async () => (await import("./run/state.ts")).resume),
  bind(state.fork, async () => (await import("./run/state.ts")).fork),
  bind(state.snapshotCreate, async () => (await import("./run/state.ts")).snapshotCreate),
  bind(state.snapshotList, async () => (await import("./run/state.ts")).snapshotList),
  bind(state.snapshotDelete, async () => (await import("./run/state.ts")).snapshotDelete),
  bind(state.checkpointCreate, async () => (await import("./run/state.ts")).checkpointCreate),
  bind(state.checkpointList, async () => (await import("./run/state.ts")).checkpointList),
  bind(state.rewind, async () => (await import("./run/state.ts")).rewind),
  bind(state.lineage, async () => (await import("./run/state.ts")).lineage),
  bind(files.upload, async () => (await import("./run/upload.ts")).upload),
  bind(files.download, async () => (await import("./run/download.ts")).download),
  bind(template.templateList, async () => (await import("./run/templates.ts")).list),
  bind(template.templateInfo, async () => (await import("./run/templates.ts")).info),
  bind(template.templateDelete, async () => (await import("./run/templates.ts")).remove),
  bind(store.publish, async () => (await import("./run/store.ts")).publish),
  bind(store.fetch, async () => (await import("./run/store.ts")).fetch),
  bind(store.storeList, async () => (await import("./run/store.ts")).list),
  bind(store.storeDelete, async () => (await import("./run/store.ts")).remove),
  bind(store.collect, async () => (await import("./run/store.ts")).collect),
  bind(store.transfers, async () => (await import("./run/store.ts")).transfers),
  bind(store.exportArchive, async () => (await import("./run/store.ts")).exportArchive),
  bind(store.importArchive, async () => (await import("./run/store.ts")).importArchive),
  bind(node.authShow, async () => (await import("./run/auth.ts")).show),
  bind(node.authLogin, async () => (await import("./run/auth.ts")).login),
  bind(node.authLogout, async () => (await import("./run/auth.ts")).logout),
  bind(node.env, async () => (await import("./run/auth.ts")).env),
  bind(node.trust, async () => (await import("./run/trust.ts")).trust),
  bind(node.doctor, async () => (await import("./run/doctor.ts")).doctor),
  bind(node.completion, async () => (await import("./run/completion.ts")).completion),
  bind(node.complete, async () => (await import("./run/completion.ts")).complete),
  bind(node.version, async () => (await import("./run/version.ts")).version),
  bind(node.help, async () => (await import("./run/help.ts")).help),
];

/** Understood by every command, before or after its name. */
export const GLOBAL_OPTIONS = {
  json: { schema: flag, about: "Print JSON; its shape is stable." },
  apiUrl: { schema: text.optional(), value: "URL", about: "The node's API." },
  sandboxUrl: { schema: text.optional(), value: "URL", about: "The node's edge; the API URL when left out." },
  apiKey: {
    schema: text.optional(),
    value: "KEY",
    about: "API key; other users of this host can see it in the process list.",
  },
  verbose: { schema: flag, short: "v", about: "Show the cause of an error." },
  noColor: { schema: flag, about: "No colours; NO_COLOR does the same." },
  help: { schema: flag, short: "h", about: "Explain the command." },
} as const satisfies Record<string, Option>;

/** The way people write it: the short form where there is one. */
export const invocation = (c: Command): string => c.short ?? c.name;
