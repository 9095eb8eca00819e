import * as z from "zod";
import { defineCommand } from "../define.ts";
import { flag, seconds, text } from "../values.ts";

const source = { schema: text, about: "Name or id of a template or snapshot.", complete: "template" } as const;
const published = { schema: text, about: "Id of a snapshot in the store (aenv store list)." } as const;
const detach = { schema: flag, short: "d", about: "Do not wait; aenv store transfers tells how far it is." } as const;
const name = { schema: text.optional(), value: "NAME", about: "Name of the template; its own when left out." } as const;

export const publish = defineCommand({
  name: "store publish",
  group: "Store",
  about: "Publish a template or snapshot to the node's store",
  details: [
    "The store is a folder that nodes share or an S3 bucket (AENV_STORE of the node). A snapshot appears in it when all of it is there; what the store has already is not sent again.",
  ],
  examples: [
    { run: "aenv store publish prepared", about: "Waits until it is there; prints its id" },
    { run: "aenv store publish -d base", about: "Goes on in the background, also after a restart of the server" },
  ],
  positionals: { source },
  options: { detach },
});

export const fetch = defineCommand({
  name: "store fetch",
  group: "Store",
  about: "Make a template of this node out of a published snapshot",
  details: [
    "Its memory comes at once. Its disk stays in the store: ranges of it are read when they are needed, and kept in the node's cache.",
  ],
  examples: [
    { run: "aenv store fetch ID", about: "Under its own name" },
    { run: "aenv store fetch ID --name tools", about: "Under another" },
  ],
  positionals: { id: published },
  options: { name, detach },
});

export const storeList = defineCommand({
  name: "store list",
  aliases: ["store ls"],
  group: "Store",
  about: "List what the store holds",
  details: ["ALONE is what no other snapshot of the store has: what deleting it frees."],
  examples: [{ run: "aenv store list", about: "Oldest first" }],
  positionals: {},
  options: { quiet: { schema: flag, short: "q", about: "Print ids only." } },
});

export const storeDelete = defineCommand({
  name: "store delete",
  aliases: ["store rm"],
  group: "Store",
  about: "Remove snapshots from the store",
  details: [
    "Nodes that fetched a snapshot read its disk from the store: delete it there first. aenv store collect frees the space.",
  ],
  examples: [{ run: "aenv store delete ID", about: "After a question" }],
  positionals: {
    ids: {
      schema: z.array(text).min(1, { error: "is missing" }),
      variadic: true,
      about: "Ids of snapshots in the store.",
      label: "ID",
    },
  },
  options: { yes: { schema: flag, short: "y", about: "Do not ask." } },
});

export const collect = defineCommand({
  name: "store collect",
  aliases: ["store gc"],
  group: "Store",
  about: "Delete what no snapshot of the store uses",
  details: [
    "In two runs, so that nothing is deleted under somebody who publishes: one finds what is unused, a later one deletes what still is.",
  ],
  examples: [
    { run: "aenv store collect --dry-run", about: "Only tell" },
    { run: "aenv store collect", about: "From time to time, for example once an hour" },
  ],
  positionals: {},
  options: {
    dryRun: { schema: flag, about: "Change nothing." },
    grace: { schema: seconds.optional(), value: "TIME", about: "Least time between the two runs. Default 1h." },
  },
});

export const transfers = defineCommand({
  name: "store transfers",
  group: "Store",
  about: "Show what is on its way to the store or from it",
  examples: [{ run: "aenv store transfers", about: "The last 200, newest first" }],
  positionals: {},
  options: {},
});

export const exportArchive = defineCommand({
  name: "snapshot export",
  group: "Store",
  about: "Write a template or snapshot to one file",
  details: ["Any node can import it; no store is needed."],
  examples: [
    { run: "aenv snapshot export prepared prepared.tar", about: "To a file" },
    { run: "aenv snapshot export prepared - | ssh other aenv snapshot import -", about: "Straight to another node" },
  ],
  positionals: { source, file: { schema: text, about: "File to write; - is standard output." } },
  options: { force: { schema: flag, short: "f", about: "Replace a file that exists." } },
});

export const importArchive = defineCommand({
  name: "snapshot import",
  group: "Store",
  about: "Make a template out of such a file",
  examples: [{ run: "aenv snapshot import prepared.tar --name tools", about: "Under another name" }],
  positionals: { file: { schema: text, about: "File to read; - is standard input." } },
  options: { name },
});
