import { AenvError } from "@aenv/base";
import type { SnapshotInfo } from "@aenv/client";
import type * as commands from "../commands/state.ts";
import type { Context } from "../context.ts";
import type { Args, Exit } from "../define.ts";
import { EXIT, exitCodeOf } from "../exit.ts";
import { lineageLines } from "../lineage.ts";
import { duration, size } from "../output.ts";
import { confirm } from "../prompt.ts";

const mib = (n: number): string => size(n * 1024 * 1024);
const ago = (iso: string): string => `${duration(Date.now() - Date.parse(iso))} ago`;
/** Captures sent at once: each writes memory to the node's disk. */
const AT_ONCE = 4;

export async function pause(args: Args<typeof commands.pause>, context: Context): Promise<Exit> {
  const { out } = context;
  const client = await context.client();
  const paused: string[] = [];
  const failed: unknown[] = [];
  const queue = new Set(args.ids).values();
  const worker = async (): Promise<void> => {
    for (const id of queue)
      try {
        if (!(await client.pause(id, { memory: !args.diskOnly })))
          throw new AenvError("CONFLICT", `${id} is paused already`, { hint: `aenv resume ${id} resumes it.` });
        paused.push(id);
        if (!out.json) out.line(id);
      } catch (e) {
        failed.push(e);
      }
  };
  await Promise.all(Array.from({ length: AT_ONCE }, worker));
  if (out.json) out.value({ paused });
  if (failed.length > 0) throw failed[0];
}

export async function resume(args: Args<typeof commands.resume>, { out, client }: Context): Promise<Exit> {
  const options = args.boot ? { memory: false } : {};
  const { sandbox, resumed } = await (await client()).connect(args.id, args.timeout, undefined, options);
  if (out.json) return out.value({ ...sandbox, resumed });
  out.line(args.id);
  if (!resumed) out.note(`It was running already; it ends in ${duration(args.timeout * 1000)} or later.`);
}

export async function fork(args: Args<typeof commands.fork>, { out, client }: Context): Promise<Exit> {
  const { id, count, timeout, atomic } = args;
  const results = await (await client()).fork(id, { count, timeout, ...(atomic ? { atomic } : {}) });
  const children = results.map((r, i) => ({
    n: i,
    sandbox: "sandbox" in r ? r.sandbox : undefined,
    error: "error" in r ? r.error : undefined,
  }));
  const failed = children.flatMap((c) => c.error ?? []);
  if (out.json)
    out.value(
      children.map(({ sandbox, error }) =>
        error === undefined ? { sandbox } : { error: { code: error.code, message: error.message } },
      ),
    );
  else if (args.quiet) {
    for (const { sandbox } of children) if (sandbox) out.line(sandbox.sandboxID);
  } else
    out.table(children, [
      { title: "#", cell: (c) => String(c.n), right: true },
      { title: "ID", cell: (c) => c.sandbox?.sandboxID ?? "-" },
      {
        title: "STATE",
        cell: (c) => (c.sandbox ? "running" : "failed"),
        style: (c) => (c.sandbox ? "green" : "red"),
      },
      { title: "ENDS IN", cell: (c) => (c.sandbox ? duration(timeout * 1000) : "-"), right: true },
      ...(failed.length > 0
        ? [{ title: "ERROR", cell: (c: (typeof children)[number]) => c.error?.message ?? "" }]
        : []),
    ]);
  const [first] = failed;
  if (first === undefined) return EXIT.ok.code;
  out.note(`${failed.length} of ${children.length} children could not be started.`);
  return exitCodeOf(first);
}

export async function snapshotCreate(
  args: Args<typeof commands.snapshotCreate>,
  { out, client }: Context,
): Promise<Exit> {
  const made = await (await client()).snapshot(args.id, args.name === undefined ? {} : { name: args.name });
  if (out.json) return out.value(made);
  out.line(made.snapshotID);
}

export async function snapshotList(args: Args<typeof commands.snapshotList>, { out, client }: Context): Promise<Exit> {
  const limit = args.limit ?? Number.POSITIVE_INFINITY;
  const found: SnapshotInfo[] = [];
  const filter = { sandboxID: args.sandbox, name: args.name, pageSize: Math.min(limit, 100) };
  for await (const s of (await client()).snapshots(filter)) {
    found.push(s);
    if (found.length >= limit) break;
  }
  if (out.json) return out.value(found);
  if (args.quiet) {
    for (const s of found) out.line(s.snapshotID);
    return;
  }
  if (found.length === 0) return out.note("No snapshots. aenv snapshot create ID makes one.");
  out.table(found, [
    { title: "SNAPSHOT", cell: (s) => s.snapshotID },
    { title: "SANDBOX", cell: (s) => s.sandboxID },
    { title: "CPU", cell: (s) => String(s.cpuCount), right: true },
    { title: "MEMORY", cell: (s) => mib(s.memoryMB), right: true },
    { title: "DISK", cell: (s) => mib(s.diskSizeMB), right: true },
    { title: "CREATED", cell: (s) => ago(s.createdAt), right: true },
  ]);
}

export async function snapshotDelete(
  args: Args<typeof commands.snapshotDelete>,
  { out, client }: Context,
): Promise<Exit> {
  const api = await client();
  const names = [...new Set(args.snapshots)];
  if (!args.yes && !(await confirm(`Delete ${names.join(", ")}?`, "--yes"))) {
    out.note("Nothing was deleted.");
    return EXIT.failed.code;
  }
  const deleted: string[] = [];
  const missing: string[] = [];
  for (const name of names) {
    const gone = await api.deleteSnapshot(name);
    (gone ? deleted : missing).push(name);
    if (gone && !out.json) out.line(name);
  }
  if (out.json) out.value({ deleted, missing });
  if (missing.length > 0)
    throw new AenvError("NOT_FOUND", `There is no snapshot ${missing.join(", ")}`, {
      data: { missing },
      hint: "aenv snapshot list shows what there is.",
    });
}

export async function checkpointCreate(
  args: Args<typeof commands.checkpointCreate>,
  { out, client }: Context,
): Promise<Exit> {
  const made = await (await client()).checkpoint(args.id, args.name === undefined ? {} : { name: args.name });
  if (out.json) return out.value(made);
  out.line(made.checkpointID);
}

export async function checkpointList(
  args: Args<typeof commands.checkpointList>,
  { out, client }: Context,
): Promise<Exit> {
  const found = await (await client()).checkpoints(args.id);
  if (out.json) return out.value(found);
  if (args.quiet) {
    for (const c of found) out.line(c.checkpointID);
    return;
  }
  if (found.length === 0) return out.note(`No checkpoints. aenv checkpoint create ${args.id} makes one.`);
  out.table(found, [
    { title: "CHECKPOINT", cell: (c) => c.checkpointID },
    { title: "NAME", cell: (c) => c.name ?? "" },
    { title: "OWN SIZE", cell: (c) => size(c.ownBytes), right: true },
    { title: "CREATED", cell: (c) => ago(c.createdAt), right: true },
  ]);
}

export async function rewind(args: Args<typeof commands.rewind>, { out, client }: Context): Promise<Exit> {
  const sandbox = await rewound(await client(), args);
  if (out.json) return out.value(sandbox);
  out.line(args.id);
}

async function rewound(
  client: Awaited<ReturnType<Context["client"]>>,
  { id, checkpoint, timeout }: Args<typeof commands.rewind>,
): Promise<unknown> {
  try {
    return await client.rewind(id, checkpoint, { timeout });
  } catch (e) {
    if (e instanceof AenvError && e.code === "NOT_FOUND")
      throw new AenvError("NOT_FOUND", e.message, {
        cause: e,
        data: e.data,
        hint: `aenv checkpoint list ${id} shows where it can go back to.`,
      });
    throw e;
  }
}

export async function lineage(args: Args<typeof commands.lineage>, { out, client }: Context): Promise<Exit> {
  const tree = await (await client()).lineage(args.id);
  if (out.json) return out.value(tree);
  for (const line of lineageLines(tree, Date.now(), (style, t) => out.style(style, t))) out.line(line);
}
