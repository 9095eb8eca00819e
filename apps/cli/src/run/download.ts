import { createWriteStream } from "node:fs";
import { chmod, lstat, mkdir, rename, rm } from "node:fs/promises";
import { basename, dirname, join, posix } from "node:path";
import { pipeline } from "node:stream/promises";
import { AenvError, errnoOf, randomName } from "@aenv/base";
import type { EntryInfo, GuestClient } from "@aenv/guest";
import { explainLoss, openGuest } from "../access.ts";
import type * as commands from "../commands/files.ts";
import type { Context } from "../context.ts";
import type { Args, Exit } from "../define.ts";
import { EXIT } from "../exit.ts";
import { eachOf } from "../transfer/pool.ts";
import { Progress } from "../transfer/progress.ts";
import { localError } from "../transfer/walk.ts";

interface RemoteFile {
  remote: string;
  local: string;
  size: number;
  mode: number;
}

interface Plan {
  folders: string[];
  files: RemoteFile[];
  skipped: { path: string; why: string }[];
}

/** Deeper than any real tree; a guest cannot lead us on for ever. */
const MAX_DEPTH = 128;
const MAX_ENTRIES = 1_000_000;
/** Nothing a guest says makes a file set-user-id here. */
const MODE_MASK = 0o777;

export async function download(args: Args<typeof commands.download>, context: Context): Promise<Exit> {
  const { out } = context;
  const signal = context.interrupted();
  if (args.local === "-" && out.json)
    throw new AenvError("INVALID_ARGUMENT", "--json and standard output exclude each other", { hint: "Name a file." });
  const guest = await openGuest(context, args.id, args.user);
  try {
    const entry = await guest.stat(args.remote, signal);
    if (args.local === "-") return await toStdout(args, context, guest, entry, signal);
    const root = await destination(args.local, entry, args.remote);
    const plan =
      entry.type === "dir"
        ? await planFolder(guest, entry, root, signal)
        : {
            folders: [],
            skipped: [],
            files: [{ remote: args.remote, local: root, size: entry.size, mode: entry.mode }],
          };
    if (!args.force) await refuseExisting(plan.files);
    return await receive(args, context, guest, plan, root, signal);
  } catch (e) {
    if (signal.aborted) throw signal.reason;
    throw await explainLoss(e, context, args.id);
  }
}

async function toStdout(
  args: Args<typeof commands.download>,
  { out }: Context,
  guest: GuestClient,
  entry: EntryInfo,
  signal: AbortSignal,
): Promise<Exit> {
  if (entry.type === "dir")
    throw new AenvError("INVALID_ARGUMENT", `${args.remote} is a folder`, {
      hint: `A folder goes through a pipe as an archive: aenv exec ${args.id} -- tar c -C ${args.remote} . | tar t`,
    });
  const progress = new Progress(out, entry.size);
  const body = await guest.download(args.remote, userOf(args), signal);
  await pipeline(body, progress.counter(args.remote), out.stdout, { signal, end: false });
  progress.clear();
}

/** Where the copy goes, by the rules of cp. */
async function destination(local: string, entry: EntryInfo, remote: string): Promise<string> {
  const info = await lstatOrNone(local);
  const target = info?.isSymbolicLink() ? await followed(local) : info;
  if (target?.isDirectory() !== true) {
    if (local.endsWith("/"))
      throw new AenvError("NOT_FOUND", `${local} is not a folder here`, { hint: "Make it first, or leave out the /." });
    if (entry.type === "dir" && target !== undefined)
      throw new AenvError("INVALID_ARGUMENT", `${local} is a file; a folder cannot take its place`, {
        hint: "Choose another name.",
      });
    return local;
  }
  const name = safeName(posix.basename(posix.normalize(remote))) ?? safeName(posix.basename(entry.path)) ?? "root";
  return join(local, name);
}

const followed = async (path: string): Promise<{ isDirectory(): boolean } | undefined> =>
  await import("node:fs/promises").then((fs) => fs.stat(path).catch(() => undefined));

async function lstatOrNone(path: string): Promise<Awaited<ReturnType<typeof lstat>> | undefined> {
  try {
    return await lstat(path);
  } catch (e) {
    if (errnoOf(e) === "ENOENT") return undefined;
    throw localError(e, path);
  }
}

/** A name from a guest that cannot lead out of its folder. */
export function safeName(name: string): string | undefined {
  return name === "" || name === "." || name === ".." || /[/\0]/.test(name) || name.length > 255 ? undefined : name;
}

/** Asks folder by folder: an answer stays small, whatever the size of the tree. */
async function planFolder(guest: GuestClient, top: EntryInfo, root: string, signal: AbortSignal): Promise<Plan> {
  const plan: Plan = { folders: [root], files: [], skipped: [] };
  const waiting = [{ remote: top.path, local: root, depth: 0 }];
  for (let folder = waiting.pop(); folder !== undefined; folder = waiting.pop()) {
    let entries: EntryInfo[];
    try {
      entries = await guest.listDir(folder.remote, 1, signal);
    } catch (e) {
      if (!(e instanceof AenvError) || e.code === "GUEST_FAILED" || signal.aborted) throw e;
      plan.skipped.push({ path: folder.remote, why: e.message });
      continue;
    }
    for (const entry of entries) {
      const name = safeName(entry.name);
      const remote = posix.join(folder.remote, entry.name);
      if (name === undefined) plan.skipped.push({ path: remote, why: "its name cannot be used here" });
      else if (entry.type === "dir" && entry.symlinkTarget !== undefined)
        plan.skipped.push({ path: remote, why: "a link to a folder" });
      else if (entry.type === "dir" && folder.depth >= MAX_DEPTH) plan.skipped.push({ path: remote, why: "too deep" });
      else if (entry.type === "dir") {
        plan.folders.push(join(folder.local, name));
        waiting.push({ remote, local: join(folder.local, name), depth: folder.depth + 1 });
      } else if (entry.type === "file")
        plan.files.push({ remote, local: join(folder.local, name), size: entry.size, mode: entry.mode });
      else plan.skipped.push({ path: remote, why: "neither a file nor a folder" });
    }
    if (plan.files.length + plan.folders.length > MAX_ENTRIES)
      throw new AenvError("TOO_LARGE", `${top.path} holds more than ${MAX_ENTRIES} entries`, {
        hint: "Pack it in the sandbox first (aenv exec ... tar).",
      });
  }
  return plan;
}

async function refuseExisting(files: readonly RemoteFile[]): Promise<void> {
  for (const f of files)
    if ((await lstatOrNone(f.local)) !== undefined)
      throw new AenvError("CONFLICT", `${f.local} exists already`, {
        hint: "Give --force to replace it, or another LOCAL.",
      });
}

const userOf = (args: { user: string | undefined }): { user?: string } =>
  args.user === undefined ? {} : { user: args.user };

async function receive(
  args: Args<typeof commands.download>,
  { out }: Context,
  guest: GuestClient,
  plan: Plan,
  root: string,
  signal: AbortSignal,
): Promise<Exit> {
  const progress = new Progress(
    out,
    plan.files.reduce((sum, f) => sum + f.size, 0),
  );
  try {
    for (const folder of plan.folders) await mkdir(folder, { recursive: true });
    await eachOf(plan.files, args.parallel, signal, async (file, stop) => {
      try {
        await receiveFile(guest, file, userOf(args), progress, stop);
        progress.fileDone();
      } catch (e) {
        // In a folder one file that is gone or forbidden does not stop the others.
        const bearable =
          e instanceof AenvError &&
          (e.code === "NOT_FOUND" || e.code === "PERMISSION_DENIED" || e.code === "INVALID_ARGUMENT");
        if (plan.files.length === 1 || !bearable) throw e;
        plan.skipped.push({ path: file.remote, why: e.message });
      }
    });
  } catch (e) {
    throw e instanceof AenvError ? e : localError(e, root);
  } finally {
    progress.clear();
  }
  for (const s of plan.skipped)
    out.stderr.write(`${out.styleError("yellow", "skipped:")} ${JSON.stringify(s.path)}: ${s.why}\n`);
  if (out.json) out.value({ local: root, ...progress.summary(), skipped: plan.skipped });
  else out.note(`${progress.summaryText()} -> ${root}`);
  return plan.skipped.length === 0 ? EXIT.ok.code : EXIT.failed.code;
}

/** Under another name until it is whole, so a broken download never looks like a file. */
async function receiveFile(
  guest: GuestClient,
  file: RemoteFile,
  user: { user?: string },
  progress: Progress,
  signal: AbortSignal,
): Promise<void> {
  const body = await guest.download(file.remote, user, signal);
  const part = join(dirname(file.local), `.${basename(file.local).slice(0, 200)}.${randomName(6)}.part`);
  try {
    await pipeline(body, progress.counter(file.remote), createWriteStream(part, { flags: "wx", mode: 0o600 }), {
      signal,
    });
    await chmod(part, file.mode === 0 ? 0o644 : file.mode & MODE_MASK);
    await rename(part, file.local);
  } catch (e) {
    body.destroy();
    await rm(part, { force: true });
    if (signal.aborted) throw signal.reason;
    if (errnoOf(e) === "ECONNRESET" || errnoOf(e) === "ERR_STREAM_PREMATURE_CLOSE")
      throw new AenvError("GUEST_FAILED", `${file.remote}: the connection broke`, { cause: e });
    throw localError(e, file.local);
  }
}
