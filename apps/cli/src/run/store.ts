import { createReadStream, createWriteStream } from "node:fs";
import { rename, rm, stat } from "node:fs/promises";
import { AenvError, ERROR_CODES, type ErrorCode, errnoOf, randomName, sleep } from "@aenv/base";
import type { AenvClient, Transfer } from "@aenv/client";
import type * as commands from "../commands/store.ts";
import type { Context } from "../context.ts";
import type { Args, Exit } from "../define.ts";
import { EXIT } from "../exit.ts";
import { duration, size } from "../output.ts";
import { confirm } from "../prompt.ts";

const POLL_MS = 200;
const ago = (iso: string): string => `${duration(Date.now() - Date.parse(iso))} ago`;

export async function publish(args: Args<typeof commands.publish>, context: Context): Promise<Exit> {
  const signal = context.interrupted();
  const api = await context.client();
  const done = await followed(await api.store.publish(args.source, signal), api, args.detach, context, signal);
  if (context.out.json) return context.out.value(done);
  context.out.line(args.detach ? done.transferID : done.snapshotID);
}

export async function fetch(args: Args<typeof commands.fetch>, context: Context): Promise<Exit> {
  const signal = context.interrupted();
  const api = await context.client();
  const done = await followed(await api.store.fetch(args.id, args.name, signal), api, args.detach, context, signal);
  if (context.out.json) return context.out.value(done);
  context.out.line(args.detach ? done.transferID : (done.templateID ?? ""));
}

/** Waits for the end of a transfer; throws as it failed. Interrupted, it goes on in the node. */
async function followed(
  started: Transfer,
  api: AenvClient,
  detach: boolean,
  { out }: Context,
  signal: AbortSignal,
): Promise<Transfer> {
  if (detach) return started;
  let t = started;
  let told = "";
  while (t.state !== "done") {
    if (t.state === "failed") {
      const code = t.error?.code ?? "";
      const known = Object.hasOwn(ERROR_CODES, code) ? (code as ErrorCode) : "INTERNAL";
      throw new AenvError(known, t.error?.message ?? "The transfer failed", { hint: "" });
    }
    if (t.state === "queued" && t.error && t.error.message !== told) {
      told = t.error.message;
      out.note(`${told} Trying again.`);
    }
    await sleep(POLL_MS, signal);
    t = await api.store.transfer(t.transferID, signal);
  }
  return t;
}

export async function list(args: Args<typeof commands.storeList>, { out, client }: Context): Promise<Exit> {
  const found = await (await client()).store.list();
  if (out.json) return out.value(found);
  if (args.quiet) {
    for (const s of found) out.line(s.snapshotID);
    return;
  }
  if (found.length === 0) return out.note("The store is empty. aenv store publish NAME puts something there.");
  out.table(found, [
    { title: "ID", cell: (s) => s.snapshotID },
    { title: "NAME", cell: (s) => s.name },
    { title: "SIZE", cell: (s) => size(s.bytes), right: true },
    { title: "ALONE", cell: (s) => size(s.aloneBytes), right: true },
    { title: "HERE", cell: (s) => (s.here ? "yes" : "no") },
    { title: "PUBLISHED", cell: (s) => ago(s.publishedAt), right: true },
  ]);
}

export async function remove(args: Args<typeof commands.storeDelete>, { out, client }: Context): Promise<Exit> {
  const api = await client();
  if (!args.yes && !(await confirm(`Delete ${args.ids.join(", ")} from the store?`, "--yes"))) {
    out.note("Nothing was deleted.");
    return EXIT.failed.code;
  }
  for (const id of args.ids) {
    await api.store.remove(id);
    if (!out.json) out.line(id);
  }
  if (out.json) out.value({ deleted: args.ids });
}

export async function collect(args: Args<typeof commands.collect>, { out, client }: Context): Promise<Exit> {
  const done = await (await client()).store.collect({ dryRun: args.dryRun, graceSeconds: args.grace });
  if (out.json) return out.value(done);
  const of = (o: { count: number; bytes: number }): string => `${o.count} objects, ${size(o.bytes)}`;
  out.record([
    ["In use", of(done.kept)],
    ["Unused, kept for now", of(done.doomed)],
    [args.dryRun ? "Would be deleted" : "Deleted", of(done.deleted)],
    ["Uploads that were cut off", String(done.swept)],
  ]);
}

export async function transfers(_: Args<typeof commands.transfers>, { out, client }: Context): Promise<Exit> {
  const found = await (await client()).store.transfers();
  if (out.json) return out.value(found);
  if (found.length === 0) return out.note("Nothing was published or fetched.");
  out.table(found, [
    { title: "ID", cell: (t) => t.transferID },
    { title: "WHAT", cell: (t) => t.kind },
    { title: "SNAPSHOT", cell: (t) => t.snapshotID },
    {
      title: "STATE",
      cell: (t) => t.state,
      style: (t) => (t.state === "failed" ? "red" : t.state === "done" ? "green" : "yellow"),
    },
    { title: "SIZE", cell: (t) => `${size(t.doneBytes)} / ${size(t.totalBytes)}`, right: true },
    { title: "STARTED", cell: (t) => ago(t.startedAt), right: true },
    { title: "ERROR", cell: (t) => t.error?.message ?? "" },
  ]);
}

export async function exportArchive(args: Args<typeof commands.exportArchive>, context: Context): Promise<Exit> {
  const { out } = context;
  const signal = context.interrupted();
  const toStdout = args.file === "-";
  if (toStdout && out.json)
    throw new AenvError("INVALID_ARGUMENT", "--json and standard output exclude each other", { hint: "Name a file." });
  const { store } = await context.client();
  if (toStdout) return await store.exportTo(args.source, process.stdout, signal);
  if (!args.force && (await exists(args.file)))
    throw new AenvError("CONFLICT", `${args.file} exists already`, { hint: "Name another file, or give --force." });
  const temp = `${args.file}.part-${randomName(8)}`;
  try {
    await store.exportTo(args.source, createWriteStream(temp, { flags: "wx" }), signal);
    await rename(temp, args.file);
  } catch (e) {
    await rm(temp, { force: true });
    throw e;
  }
  const { size: bytes } = await stat(args.file);
  if (out.json) out.value({ file: args.file, bytes });
  else out.note(`${args.file}: ${size(bytes)}`);
}

export async function importArchive(args: Args<typeof commands.importArchive>, context: Context): Promise<Exit> {
  const { out } = context;
  const signal = context.interrupted();
  const { store } = await context.client();
  if (args.file !== "-" && !(await exists(args.file)))
    throw new AenvError("NOT_FOUND", `there is no ${args.file}`, { hint: "" });
  const from = args.file === "-" ? process.stdin : createReadStream(args.file);
  const template = await store.importFrom(from, args.name, signal);
  if (out.json) return out.value(template);
  out.line(template.names[0] ?? template.templateID);
}

async function exists(path: string): Promise<boolean> {
  return await stat(path).then(
    () => true,
    (e: unknown) => {
      if (errnoOf(e) === "ENOENT") return false;
      throw AenvError.from(e, path);
    },
  );
}
