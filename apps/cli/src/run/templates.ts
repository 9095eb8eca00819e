import type * as commands from "../commands/template.ts";
import type { Context } from "../context.ts";
import type { Args, Exit } from "../define.ts";
import { EXIT } from "../exit.ts";
import { duration, size } from "../output.ts";
import { confirm } from "../prompt.ts";

const mib = (n: number): string => size(n * 1024 * 1024);

export async function list(args: Args<typeof commands.templateList>, { out, client }: Context): Promise<Exit> {
  const found = await (await client()).templates();
  if (out.json) return out.value(found);
  if (args.quiet) {
    for (const t of found) out.line(t.templateID);
    return;
  }
  if (found.length === 0) return out.note("No templates. npm run up makes the template base.");
  out.table(found, [
    { title: "NAME", cell: (t) => t.names[0] ?? t.aliases[0] ?? "" },
    { title: "ID", cell: (t) => t.templateID },
    {
      title: "STATUS",
      cell: (t) => t.buildStatus,
      style: (t) => (t.buildStatus === "ready" ? "green" : t.buildStatus === "error" ? "red" : "yellow"),
    },
    { title: "CPU", cell: (t) => String(t.cpuCount), right: true },
    { title: "MEMORY", cell: (t) => mib(t.memoryMB), right: true },
    { title: "DISK", cell: (t) => mib(t.diskSizeMB), right: true },
    { title: "STARTED", cell: (t) => String(t.spawnCount), right: true },
    { title: "UPDATED", cell: (t) => `${duration(Date.now() - Date.parse(t.updatedAt))} ago`, right: true },
  ]);
}

export async function info(args: Args<typeof commands.templateInfo>, { out, client }: Context): Promise<Exit> {
  const t = await (await client()).template(args.template);
  if (out.json) return out.value(t);
  out.record([
    ["Id", t.templateID],
    ["Names", [...new Set([...t.names, ...t.aliases])].join(", ")],
    ["Created", t.createdAt],
    ["Updated", t.updatedAt],
    ["Started", `${t.spawnCount} times${t.lastSpawnedAt ? `, last ${t.lastSpawnedAt}` : ""}`],
  ]);
  if (t.builds.length === 0) return;
  out.line();
  out.table(t.builds, [
    { title: "BUILD", cell: (b) => b.buildID },
    { title: "STATUS", cell: (b) => b.status },
    { title: "CPU", cell: (b) => String(b.cpuCount), right: true },
    { title: "MEMORY", cell: (b) => mib(b.memoryMB), right: true },
    { title: "FINISHED", cell: (b) => b.finishedAt ?? "" },
  ]);
}

export async function remove(args: Args<typeof commands.templateDelete>, { out, client }: Context): Promise<Exit> {
  const api = await client();
  if (!args.yes && !(await confirm(`Delete ${args.templates.join(", ")}?`, "--yes"))) {
    out.note("Nothing was deleted.");
    return EXIT.failed.code;
  }
  const deleted: string[] = [];
  for (const name of args.templates) {
    await api.deleteTemplate(name);
    deleted.push(name);
    if (!out.json) out.line(name);
  }
  if (out.json) out.value({ deleted });
}
