import { defineCommand } from "../define.ts";
import { count, flag, sandboxId, text } from "../values.ts";

const id = { schema: sandboxId, about: "Sandbox id.", complete: "sandbox" } as const;
const user = {
  schema: text.optional(),
  value: "NAME",
  short: "u",
  about: "User who owns the files and whose rights count.",
} as const;
const parallel = {
  schema: count.default(4),
  value: "N",
  short: "p",
  about: "Files at a time in folders. Default 4.",
} as const;

export const upload = defineCommand({
  name: "sandbox upload",
  short: "upload",
  group: "Files",
  about: "Copy a file or folder into a sandbox",
  details: [
    "As with cp -r: an existing folder as REMOTE (or one written with a / at its end) receives the copy inside, else the copy gets the name REMOTE. A relative REMOTE starts at the user's home, where files go when it is left out. Permissions are kept, symbolic links are followed.",
    "With - as LOCAL standard input is stored. Data is streamed: size is no matter.",
  ],
  examples: [
    { run: "aenv upload ID data.csv", about: "To the home folder" },
    { run: "aenv upload ID ./src /work/", about: "A folder, to /work/src" },
    { run: "pg_dump db | aenv upload ID - /tmp/db.sql", about: "From a pipe" },
  ],
  positionals: {
    id,
    local: { schema: text, about: "File or folder here; - is standard input.", complete: "file" },
    remote: { schema: text.optional(), about: "Where in the sandbox.", optional: true },
  },
  options: { user, parallel },
});

export const download = defineCommand({
  name: "sandbox download",
  short: "download",
  group: "Files",
  about: "Copy a file or folder out of a sandbox",
  details: [
    "As with cp -r: an existing folder as LOCAL (the current one when left out) receives the copy inside, else the copy gets the name LOCAL. With - the file goes to standard output. Existing files are only replaced with --force. A file appears under its name when it is complete.",
  ],
  examples: [
    { run: "aenv download ID result.json", about: "From the home folder to here" },
    { run: "aenv download ID /var/log ./logs", about: "A folder under another name" },
    { run: "aenv download ID /tmp/a.tar - | tar t", about: "Into a pipe" },
  ],
  positionals: {
    id,
    remote: { schema: text, about: "File or folder in the sandbox." },
    local: { schema: text.default("."), about: "Where here; - is standard output.", optional: true, complete: "file" },
  },
  options: { user, parallel, force: { schema: flag, short: "f", about: "Replace existing files." } },
});
