import { createReadStream } from "node:fs";
import { access, constants, stat } from "node:fs/promises";
import { posix } from "node:path";
import { pipeline } from "node:stream";
import { AenvError } from "@aenv/base";
import type { EntryInfo, GuestClient } from "@aenv/guest";
import { explainLoss, openGuest } from "../access.ts";
import type * as commands from "../commands/files.ts";
import type { Context } from "../context.ts";
import type { Args, Exit } from "../define.ts";
import { EXIT } from "../exit.ts";
import { eachOf } from "../transfer/pool.ts";
import { Progress } from "../transfer/progress.ts";
import { lastName, type LocalFile, type LocalTree, localError, walkLocal } from "../transfer/walk.ts";

/** What the agent gives new files and folders. */
const FILE_MODE = 0o644;
const FOLDER_MODE = 0o755;
const READ_CHUNK = 256 * 1024;
/** Paths of one chmod: far below what a guest's kernel takes as arguments. */
const CHMOD_PATHS = 200;

export async function upload(args: Args<typeof commands.upload>, context: Context): Promise<Exit> {
  const plan = await planUpload(args.local);
  const signal = context.interrupted();
  const guest = await openGuest(context, args.id, args.user);
  try {
    return await send(args, context, guest, plan, signal);
  } catch (e) {
    if (signal.aborted) throw signal.reason;
    throw await explainLoss(e, context, args.id);
  }
}

type Plan =
  | { kind: "stdin" }
  | { kind: "file"; name: string; file: LocalFile; sized: boolean }
  | { kind: "folder"; name: string; tree: LocalTree; mode: number };

/** Looks at everything that is to be sent before the sandbox is asked for anything. */
async function planUpload(local: string): Promise<Plan> {
  if (local === "-") {
    if (process.stdin.isTTY)
      throw new AenvError("INVALID_ARGUMENT", "Standard input is a terminal", {
        hint: "Pipe something in, or name a file.",
      });
    return { kind: "stdin" };
  }
  try {
    const info = await stat(local);
    const name = await lastName(local);
    const mode = info.mode & 0o7777;
    if (info.isDirectory()) return { kind: "folder", name, tree: await walkLocal(local), mode };
    await access(local, constants.R_OK);
    // A named pipe or a device is read to its end; its size says nothing.
    return {
      kind: "file",
      name,
      sized: info.isFile(),
      file: { path: local, relative: "", size: info.size, mode: info.isFile() ? mode : FILE_MODE },
    };
  } catch (e) {
    throw localError(e, local);
  }
}

async function send(
  args: Args<typeof commands.upload>,
  { out }: Context,
  guest: GuestClient,
  plan: Plan,
  signal: AbortSignal,
): Promise<Exit> {
  const user = args.user === undefined ? {} : { user: args.user };
  const target = await targetOf(guest, plan, args.remote, signal);
  const modes = new Modes();
  if (plan.kind === "stdin") {
    const progress = new Progress(out, undefined);
    const body = pipeline(process.stdin, progress.counter(target), () => {});
    const written = await guest.upload(target, body, user, signal);
    progress.fileDone();
    return report(out, progress, written.path);
  }
  const skipped = plan.kind === "folder" ? plan.tree.skipped : [];
  const files = plan.kind === "folder" ? plan.tree.files : [plan.file];
  const sized = plan.kind === "folder" || plan.sized;
  const progress = new Progress(out, sized ? files.reduce((sum, f) => sum + f.size, 0) : undefined);
  try {
    if (plan.kind === "folder") {
      if (files.length === 0 && plan.tree.folders.length === 0) await makeFolder(guest, target, signal);
      modes.folder(target, plan.mode);
      for (const f of plan.tree.folders) {
        if (f.empty) await makeFolder(guest, posix.join(target, f.relative), signal);
        modes.folder(posix.join(target, f.relative), f.mode);
      }
    }
    await eachOf(files, args.parallel, signal, async (file, stop) => {
      const to = file.relative === "" ? target : posix.join(target, file.relative);
      await sendFile(guest, file, sized, to, user, progress, stop);
      modes.file(to, file.mode);
      progress.fileDone();
    });
  } finally {
    progress.clear();
  }
  for (const s of skipped) out.stderr.write(`${out.styleError("yellow", "skipped:")} ${s.path}: ${s.why}\n`);
  await modes.apply(guest, args.user, signal, (why) => out.note(`${out.styleError("yellow", "note:")} ${why}`));
  report(out, progress, target);
  return skipped.length === 0 ? EXIT.ok.code : EXIT.failed.code;
}

function report(out: Context["out"], progress: Progress, remote: string): void {
  progress.clear();
  if (out.json) out.value({ remote, ...progress.summary() });
  else out.note(`${progress.summaryText()} -> ${remote}`);
}

/** Where the copy goes, by the rules of cp. */
async function targetOf(
  guest: GuestClient,
  plan: Plan,
  remote: string | undefined,
  signal: AbortSignal,
): Promise<string> {
  if (remote === undefined) {
    if (plan.kind === "stdin")
      throw new AenvError("INVALID_ARGUMENT", "Standard input has no name", { hint: "Write REMOTE too." });
    return plan.name;
  }
  const existing = await statOrNone(guest, remote, signal);
  const into = remote.endsWith("/") || existing?.type === "dir";
  if (into && plan.kind === "stdin")
    throw new AenvError("INVALID_ARGUMENT", `${remote} is a folder in the sandbox`, { hint: "Write a file's name." });
  if (plan.kind === "folder" && existing?.type === "file")
    throw new AenvError("INVALID_ARGUMENT", `${remote} is a file in the sandbox; a folder cannot take its place`, {
      hint: "Choose another name.",
    });
  return into && plan.kind !== "stdin" ? posix.join(remote, plan.name) : remote;
}

export async function statOrNone(
  guest: GuestClient,
  path: string,
  signal: AbortSignal,
): Promise<EntryInfo | undefined> {
  try {
    return await guest.stat(path, signal);
  } catch (e) {
    if (e instanceof AenvError && e.code === "NOT_FOUND") return undefined;
    throw e;
  }
}

async function makeFolder(guest: GuestClient, path: string, signal: AbortSignal): Promise<void> {
  try {
    await guest.makeDir(path, signal);
  } catch (e) {
    if (!(e instanceof AenvError && e.code === "CONFLICT")) throw e;
  }
}

async function sendFile(
  guest: GuestClient,
  file: LocalFile,
  sized: boolean,
  to: string,
  user: { user?: string },
  progress: Progress,
  signal: AbortSignal,
): Promise<void> {
  if (sized && file.size === 0) {
    await guest.upload(to, Buffer.alloc(0), user, signal);
    return;
  }
  const source = createReadStream(file.path, {
    highWaterMark: READ_CHUNK,
    ...(sized ? { end: file.size - 1 } : {}),
  });
  let failure: unknown;
  const body = pipeline(source, progress.counter(file.path), (e) => {
    failure = e ?? undefined;
  });
  try {
    await guest.upload(to, body, sized ? { ...user, size: file.size } : user, signal);
  } catch (e) {
    if (failure !== undefined && !signal.aborted && "path" in Object(failure)) throw localError(failure, file.path);
    throw e;
  } finally {
    source.destroy();
  }
}

/** Permissions that differ from what the agent gives; set at the end, with few commands. */
class Modes {
  readonly #paths = new Map<number, string[]>();

  file(path: string, mode: number): void {
    if (mode !== FILE_MODE) this.#add(path, mode);
  }

  folder(path: string, mode: number): void {
    if (mode !== FOLDER_MODE) this.#add(path, mode);
  }

  #add(path: string, mode: number): void {
    const paths = this.#paths.get(mode);
    if (paths) paths.push(path);
    else this.#paths.set(mode, [path]);
  }

  async apply(
    guest: GuestClient,
    user: string | undefined,
    signal: AbortSignal,
    warn: (why: string) => void,
  ): Promise<void> {
    for (const [mode, paths] of this.#paths)
      for (let at = 0; at < paths.length; at += CHMOD_PATHS) {
        const args = [mode.toString(8).padStart(4, "0"), "--", ...paths.slice(at, at + CHMOD_PATHS)];
        const spec = { cmd: "chmod", args, ...(user === undefined ? {} : { user }) };
        try {
          const { exitCode, stderr } = await guest.exec(spec, signal);
          if (exitCode !== 0) return warn(`some permissions were not kept: ${stderr.trim().split("\n")[0] ?? ""}`);
        } catch (e) {
          if (signal.aborted || !(e instanceof AenvError)) throw e;
          return warn(`permissions were not kept: ${e.message}`);
        }
      }
  }
}
