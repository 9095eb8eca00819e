import * as z from "zod";
import { defineCommand } from "../define.ts";
import { count, flag, sandboxId, seconds, text } from "../values.ts";

const id = { schema: sandboxId, about: "Sandbox id.", complete: "sandbox" } as const;
const fromDisk = (about: string) => ({ schema: flag, about }) as const;

export const pause = defineCommand({
  name: "sandbox pause",
  short: "pause",
  group: "State",
  about: "Pause sandboxes: keep memory, processes and disk, and free the machine",
  details: [
    "A paused sandbox uses no processor and no memory, and has no end. resume or connect goes on where it stopped; its programs do not notice but for the clock.",
  ],
  examples: [
    { run: "aenv pause ID", about: "Until aenv resume ID" },
    { run: "aenv pause ID --disk-only", about: "Smaller; programs end, and resume boots it anew" },
    { run: "aenv pause $(aenv list -q --state running)", about: "All that run" },
  ],
  positionals: {
    ids: {
      ...id,
      schema: z.array(sandboxId).min(1, { error: "is missing" }),
      variadic: true,
      about: "Sandbox ids.",
      label: "ID",
    },
  },
  options: { diskOnly: fromDisk("Keep only the disk: memory and processes are lost.") },
});

export const resume = defineCommand({
  name: "sandbox resume",
  short: "resume",
  group: "State",
  about: "Resume a paused sandbox",
  details: ["One that runs stays as it is; its end is moved on to --timeout from now unless it is later already."],
  examples: [
    { run: "aenv resume ID", about: "For 5 minutes" },
    { run: "aenv resume ID --timeout 2h", about: "For two hours" },
    { run: "aenv resume ID --boot", about: "Boot from its disk, without what was in memory" },
  ],
  positionals: { id },
  options: {
    timeout: { schema: seconds.default(300), value: "TIME", about: "Time until it ends. Default 300." },
    boot: fromDisk("Boot from the disk instead of going on from memory."),
  },
});

export const fork = defineCommand({
  name: "sandbox fork",
  short: "fork",
  group: "State",
  about: "Start copies of a sandbox as it is now",
  details: [
    "The state of the running or paused sandbox is captured once; each child goes on from it, with the same memory, processes and files, and with an id, host name and random numbers of its own. The source goes on as it was.",
    "Exits 0 when every child runs, else as its first failure says. With --atomic there are all children or none.",
  ],
  examples: [
    { run: "aenv fork ID", about: "One copy" },
    { run: "aenv fork ID --count 16 --timeout 1h", about: "Sixteen, for an hour each" },
    {
      run: 'for c in $(aenv fork -q -n 4 ID); do aenv exec $c -- ./try "$c" & done; wait',
      about: "Try four ways at once",
    },
  ],
  positionals: { id },
  options: {
    count: {
      schema: count.default(1),
      value: "N",
      short: "n",
      about: "Children. Default 1; a node allows 16 unless it was told otherwise.",
    },
    timeout: { schema: seconds.default(300), value: "TIME", about: "Time until each child ends. Default 300." },
    atomic: { schema: flag, about: "All or none: where one child fails the others are deleted." },
    quiet: { schema: flag, short: "q", about: "Print ids only." },
  },
});

export const snapshotCreate = defineCommand({
  name: "snapshot create",
  group: "State",
  about: "Keep the state of a sandbox, to start others from it",
  details: [
    "The sandbox goes on as it was. aenv start SNAPSHOT starts a new one from it, with its memory and processes, also when the sandbox is gone. The same name again stands for the new state.",
  ],
  examples: [
    { run: "aenv snapshot create ID prepared", about: "Under a name" },
    { run: "aenv start prepared", about: "A shell in a sandbox that begins there" },
    { run: "snap=$(aenv snapshot create ID)", about: "Without a name: its id" },
  ],
  positionals: {
    id,
    name: { schema: text.optional(), optional: true, about: "Name or name:tag, of a-z, 0-9, - and _." },
  },
  options: {},
});

export const snapshotList = defineCommand({
  name: "snapshot list",
  aliases: ["snapshot ls", "snapshots"],
  group: "State",
  about: "List snapshots, newest first",
  examples: [
    { run: "aenv snapshot list", about: "All" },
    { run: "aenv snapshot list --sandbox ID", about: "Those of one sandbox, which may be gone" },
  ],
  positionals: {},
  options: {
    sandbox: { schema: sandboxId.optional(), value: "ID", complete: "sandbox", about: "Only of this sandbox." },
    name: { schema: text.optional(), value: "NAME", about: "Only with this name." },
    limit: { schema: count.optional(), value: "N", short: "n", about: "At most N; all when left out." },
    quiet: { schema: flag, short: "q", about: "Print ids only." },
  },
});

export const snapshotDelete = defineCommand({
  name: "snapshot delete",
  aliases: ["snapshot rm"],
  group: "State",
  about: "Delete snapshots",
  details: ["Sandboxes that were started from them go on."],
  examples: [
    { run: "aenv snapshot delete prepared", about: "By name or id, after a question" },
    { run: "aenv snapshot delete $(aenv snapshot list -q --sandbox ID) --yes", about: "All of a sandbox, without one" },
  ],
  positionals: {
    snapshots: {
      schema: z.array(text).min(1, { error: "is missing" }),
      variadic: true,
      about: "Names or ids.",
      complete: "snapshot",
      label: "SNAPSHOT",
    },
  },
  options: { yes: { schema: flag, short: "y", about: "Do not ask." } },
});

export const checkpointCreate = defineCommand({
  name: "checkpoint create",
  group: "State",
  about: "Keep the state of a sandbox, to take it back there",
  details: [
    "The sandbox goes on as it was. A checkpoint belongs to its sandbox and is deleted with it; aenv snapshot create keeps a state for other sandboxes.",
  ],
  examples: [
    { run: "aenv checkpoint create ID before-tests", about: "Under a name" },
    { run: "aenv rewind ID before-tests", about: "Back to it, any number of times" },
  ],
  positionals: {
    id,
    name: { schema: text.optional(), optional: true, about: "Name; its id serves without one." },
  },
  options: {},
});

export const checkpointList = defineCommand({
  name: "checkpoint list",
  aliases: ["checkpoint ls", "checkpoints"],
  group: "State",
  about: "List the checkpoints of a sandbox, oldest first",
  examples: [{ run: "aenv checkpoint list ID", about: "With what deleting the sandbox would free" }],
  positionals: { id },
  options: { quiet: { schema: flag, short: "q", about: "Print ids only." } },
});

export const rewind = defineCommand({
  name: "sandbox rewind",
  short: "rewind",
  group: "State",
  about: "Take a sandbox back to a checkpoint",
  details: [
    "In place: memory, processes and disk are as they were at the checkpoint, id and end stay. What it did since is lost, and its connections end. A paused sandbox runs afterwards.",
  ],
  examples: [{ run: "aenv rewind ID before-tests", about: "By name or id (aenv checkpoint list ID)" }],
  positionals: { id, checkpoint: { schema: text, about: "Name or id of the checkpoint." } },
  options: {
    timeout: { schema: seconds.optional(), value: "TIME", about: "End no earlier than this from now." },
  },
});

export const lineage = defineCommand({
  name: "sandbox lineage",
  short: "lineage",
  group: "State",
  about: "Show the tree of states that a sandbox belongs to",
  details: [
    "From its template down: what was captured, when and why, and which sandboxes went on from there. Own is what deleting a state would free; shared is what others need, too.",
  ],
  examples: [
    { run: "aenv lineage ID", about: "As a tree" },
    { run: "aenv lineage ID --json", about: "As a list of nodes, each after its parent" },
  ],
  positionals: { id },
  options: {},
});
