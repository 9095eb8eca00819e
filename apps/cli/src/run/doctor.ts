import { existsSync } from "node:fs";
import { AenvError, sleep } from "@aenv/base";
import type { DoctorReport } from "@aenv/client";
import { aenvHome, isAlive, readNodeConfig, readServerFile } from "@aenv/host";
import type * as commands from "../commands/node.ts";
import type { Context } from "../context.ts";
import type { Args, Exit } from "../define.ts";
import { type Judged, judge } from "../doctor/judge.ts";
import { type Scan, scanHost } from "../doctor/scan.ts";
import { EXIT } from "../exit.ts";

interface Check {
  name: string;
  ok: boolean;
  detail: string;
  fix?: string | undefined;
}

export async function doctor(args: Args<typeof commands.doctor>, context: Context): Promise<Exit> {
  const { out } = context;
  const home = aenvHome({ ...context.env });
  const config = await readNodeConfig(home);
  const look = async (): Promise<Look> => {
    const { checks, report } = await askServer(context, home);
    const scan = await scanHost({ home, instance: config?.instance });
    const judged = judge(scan.things, { home, instance: config?.instance, report });
    return { checks, report, scan, judged, findings: judged.filter((j) => j.owner === null) };
  };
  let last = await look();
  // A node makes and frees machines all the time: what is gone or owned a moment later was no leak.
  for (let i = 1; i < LOOKS && last.findings.length > 0; i++) {
    await sleep(BETWEEN_LOOKS_MS);
    const before = new Set(last.findings.map((f) => `${f.kind} ${f.name}`));
    const next = await look();
    last = { ...next, findings: next.findings.filter((f) => before.has(`${f.kind} ${f.name}`)) };
  }
  const { checks, report, scan, judged, findings } = last;
  if (config === undefined)
    checks.push({ name: "data folder", ok: true, detail: `${home} holds no node; only leftovers are looked for` });
  const unseen = [...new Set(scan.unseen)];
  if (unseen.length > 0)
    checks.push({
      name: "rights",
      ok: false,
      detail: `may not look at ${unseen.slice(0, 3).join(", ")}${unseen.length > 3 ? " and more" : ""}`,
      fix: "Run aenv doctor as root.",
    });
  const ok = findings.length === 0 && checks.every((c) => c.ok);
  if (out.json)
    out.value({
      ok,
      home,
      instance: config?.instance ?? null,
      serverAnswers: report !== undefined,
      checks,
      findings,
      resources: judged,
    });
  else print(context, checks, judged, findings, args.all);
  return ok ? EXIT.ok.code : EXIT.failed.code;
}

interface Look {
  checks: Check[];
  report: DoctorReport | undefined;
  scan: Scan;
  judged: Judged[];
  findings: Judged[];
}

const LOOKS = 3;
const BETWEEN_LOOKS_MS = 400;

/** The server's own view. That it does not answer is a finding of its own, with what to do. */
async function askServer(
  context: Context,
  home: string,
): Promise<{ checks: Check[]; report: DoctorReport | undefined }> {
  const url = context.settings().apiUrl.value;
  try {
    const report = await (await context.client()).doctor();
    const checks: Check[] = [{ name: "server", ok: true, detail: `answers at ${url}` }];
    return { checks: [...checks, ...report.checks], report };
  } catch (e) {
    if (!(e instanceof AenvError)) throw e;
    return { checks: [{ name: "server", ok: false, detail: e.message, fix: serverFix(e, home) }], report: undefined };
  }
}

function serverFix(e: AenvError, home: string): string {
  if (e.code === "UNAUTHENTICATED" && !existsSync(home)) return `There is no node in ${home}: npm run up makes one.`;
  if (e.code !== "UNAVAILABLE" && e.code !== "DEADLINE") return e.hint;
  const server = readServerFile(home);
  const log = `${home}/log/server.log`;
  if (server === undefined) return "Start the node with npm run up. Sandboxes that still run are taken over by it.";
  return isAlive(server)
    ? `Its process ${server.pid} lives but does not answer on port ${server.port}: read ${log}, then npm run down and npm run up.`
    : `Its process ${server.pid} has ended: read the end of ${log}, then start it with npm run up. Sandboxes that still run are taken over by it.`;
}

function print(
  { out }: Context,
  checks: readonly Check[],
  judged: readonly Judged[],
  findings: readonly Judged[],
  all: boolean,
): void {
  for (const c of checks) {
    out.line(`${c.ok ? out.style("green", "ok  ") : out.style("red", "FAIL")} ${c.name}: ${c.detail}`);
    if (!c.ok && c.fix) out.line(`     ${c.fix}`);
  }
  if (all && judged.length > 0) {
    out.line();
    out.table(
      [...judged].sort((a, b) => a.kind.localeCompare(b.kind) || a.name.localeCompare(b.name)),
      [
        { title: "KIND", cell: (j) => j.kind },
        { title: "NAME", cell: (j) => j.name },
        { title: "OWNER", cell: (j) => j.owner ?? "nobody", style: (j) => (j.owner === null ? "red" : undefined) },
        { title: "", cell: (j) => j.detail.slice(0, 60) },
      ],
    );
    out.line();
  }
  for (const f of findings) {
    out.line(
      `${out.style("red", "FAIL")} ${f.kind} ${f.name} has no owner${f.detail === "" ? "" : ` (${f.detail.slice(0, 80)})`}`,
    );
    if (f.fix) out.line(`     ${f.fix}`);
  }
  const kinds = new Map<string, number>();
  for (const j of judged) kinds.set(j.kind, (kinds.get(j.kind) ?? 0) + 1);
  const seen = [...kinds].map(([kind, n]) => `${n} ${kind}`).join(", ");
  const bad = findings.length + checks.filter((c) => !c.ok).length;
  out.line(
    `${bad === 0 ? out.style("green", "ok  ") : out.style("red", "FAIL")} ${judged.length} resources looked at${seen === "" ? "" : ` (${seen})`}; ${bad} finding${bad === 1 ? "" : "s"}`,
  );
}
