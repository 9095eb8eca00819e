import { AenvError } from "@aenv/base";
import type { ListedSandbox, SandboxDetail } from "@aenv/client";
import type * as commands from "../commands/sandbox.ts";
import type { Context } from "../context.ts";
import type { Args, Exit } from "../define.ts";
import { EXIT } from "../exit.ts";
import { duration, size } from "../output.ts";
import { confirm } from "../prompt.ts";

interface Filter {
  state?: ("running" | "paused")[] | undefined;
  metadata?: Record<string, string> | undefined;
  template?: string | undefined;
}

async function matching(context: Context, filter: Filter, limit = Number.POSITIVE_INFINITY): Promise<ListedSandbox[]> {
  const client = await context.client();
  const found: ListedSandbox[] = [];
  const { state, metadata, template } = filter;
  for await (const s of client.list({ state, metadata, template, pageSize: Math.min(limit, 100) })) {
    found.push(s);
    if (found.length >= limit) break;
  }
  return found;
}

const labels = (metadata: Record<string, string> | undefined): string =>
  Object.entries(metadata ?? {})
    .filter(([k]) => k !== "name")
    .map(([k, v]) => `${k}=${v}`)
    .join(" ");
const mib = (n: number): string => size(n * 1024 * 1024);

export async function list(args: Args<typeof commands.list>, context: Context): Promise<Exit> {
  const { out } = context;
  const found = await matching(context, args, args.limit);
  if (out.json) return out.value(found);
  if (args.quiet) {
    for (const s of found) out.line(s.sandboxID);
    return;
  }
  if (found.length === 0) return out.note("No sandboxes. aenv start creates one.");
  const now = Date.now();
  const named = found.some((s) => s.metadata?.["name"] !== undefined);
  const labelled = found.some((s) => labels(s.metadata) !== "");
  out.table(found, [
    { title: "ID", cell: (s) => s.sandboxID },
    ...(named ? [{ title: "NAME", cell: (s: ListedSandbox) => s.metadata?.["name"] ?? "" }] : []),
    { title: "TEMPLATE", cell: (s) => s.alias ?? s.templateID },
    { title: "STATE", cell: (s) => s.state, style: (s) => (s.state === "running" ? "green" : "yellow") },
    { title: "AGE", cell: (s) => duration(now - Date.parse(s.startedAt)), right: true },
    { title: "ENDS IN", cell: (s) => (s.state === "running" ? duration(Date.parse(s.endAt) - now) : "-"), right: true },
    { title: "CPU", cell: (s) => String(s.cpuCount), right: true },
    { title: "MEMORY", cell: (s) => mib(s.memoryMB), right: true },
    ...(labelled ? [{ title: "METADATA", cell: (s: ListedSandbox) => labels(s.metadata) }] : []),
  ]);
}

export async function info(args: Args<typeof commands.info>, { out, client }: Context): Promise<Exit> {
  const s = await (await client()).get(args.id);
  if (out.json) return out.value(s);
  const now = Date.now();
  const name = s.metadata?.["name"];
  out.record([
    ["Id", s.sandboxID],
    ...(name === undefined ? [] : [["Name", name] as const]),
    ["Template", s.alias === undefined ? s.templateID : `${s.alias} (${s.templateID})`],
    ["State", s.state],
    ["Started", `${s.startedAt}  (${duration(now - Date.parse(s.startedAt))} ago)`],
    ["Ends", endOf(s, now)],
    ["Size", `${s.cpuCount} vCPU, ${mib(s.memoryMB)} memory, ${mib(s.diskSizeMB)} disk`],
    ["Internet", s.allowInternetAccess === false ? "off" : "on"],
    ["Agent", s.envdVersion],
    ...(s.domain ? [["Host", `<port>-${s.sandboxID}.${s.domain}`] as const] : []),
    ...Object.entries(s.metadata ?? {})
      .filter(([k]) => k !== "name")
      .map(([k, v]) => ["Metadata", `${k}=${v}`] as const),
  ]);
}

function endOf(s: SandboxDetail, now: number): string {
  if (s.state === "paused") return `not while it is paused${s.lifecycle?.autoResume ? "; traffic resumes it" : ""}`;
  const then = s.lifecycle?.onTimeout === "pause" ? "paused" : "deleted";
  const woken = then === "paused" && s.lifecycle?.autoResume ? ", until traffic resumes it" : "";
  return `${s.endAt}  (${then} in ${duration(Date.parse(s.endAt) - now)}${woken})`;
}

export async function timeout(args: Args<typeof commands.timeout>, { out, client }: Context): Promise<Exit> {
  await (await client()).setTimeout(args.id, args.seconds);
  const endAt = new Date(Date.now() + args.seconds * 1000).toISOString();
  if (out.json) return out.value({ sandboxID: args.id, timeout: args.seconds, endAt });
  out.note(args.seconds === 0 ? `${args.id} ends now.` : `${args.id} ends in ${duration(args.seconds * 1000)}.`);
}

/** Deletions sent at once: each waits for a virtual machine to be gone. */
const AT_ONCE = 8;

export async function remove(args: Args<typeof commands.remove>, context: Context): Promise<Exit> {
  const { out } = context;
  const filtered = args.state !== undefined || args.metadata !== undefined || args.template !== undefined;
  if (args.all ? args.ids.length > 0 : args.ids.length === 0 || filtered)
    throw new AenvError("INVALID_ARGUMENT", "Name the sandboxes, or give --all with or without filters", {
      hint: "As in aenv delete ID, or aenv delete --all --metadata team=red.",
    });
  const client = await context.client();
  const ids = args.all ? (await matching(context, args)).map((s) => s.sandboxID) : [...new Set(args.ids)];
  if (args.all && ids.length > 0 && !args.yes) {
    if (
      !(await confirm(
        `Delete ${ids.length === 1 ? "1 sandbox and its" : `${ids.length} sandboxes and their`} data?`,
        "--yes",
      ))
    ) {
      out.note("Nothing was deleted.");
      return EXIT.failed.code;
    }
  }
  const deleted: string[] = [];
  const missing: string[] = [];
  const failed: unknown[] = [];
  const queue = ids.values();
  const worker = async (): Promise<void> => {
    for (const id of queue) {
      try {
        ((await client.kill(id)) ? deleted : missing).push(id);
      } catch (e) {
        failed.push(e);
      }
    }
  };
  await Promise.all(Array.from({ length: AT_ONCE }, worker));
  if (out.json) out.value({ deleted, missing });
  else for (const id of deleted) out.line(id);
  if (failed.length > 0) throw failed[0];
  // What --all found and somebody else deleted meanwhile is gone, as asked.
  if (missing.length > 0 && !args.all)
    throw new AenvError("NOT_FOUND", `There is no sandbox ${missing.join(", ")}`, { data: { missing } });
  if (args.all && ids.length === 0) out.note("No sandboxes to delete.");
}
