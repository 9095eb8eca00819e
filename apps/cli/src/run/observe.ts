import { setTimeout as wait } from "node:timers/promises";
import { AenvError } from "@aenv/base";
import type { SandboxLogEntry, SandboxMetric } from "@aenv/client";
import type * as commands from "../commands/sandbox.ts";
import type { Context } from "../context.ts";
import type { Args, Exit } from "../define.ts";
import { EXIT, exitCodeOf } from "../exit.ts";
import { printable, size } from "../output.ts";

/** The node samples every 5 s; asking a little more often shows a sample soon after it is taken. */
const POLL_METRICS_MS = 2000;
const POLL_LOGS_MS = 1000;
const LOG_PAGE = 1000;

const time = (iso: string): string => iso.replace("T", " ").replace(/\.\d+/, "").replace("Z", "");
const share = (used: number, total: number): string =>
  total > 0 ? `${size(used)} (${Math.round((used / total) * 100)}%)` : size(used);

const METRIC_WIDTHS = [19, 7, 18, 10, 18] as const;
function metricLine(cells: readonly string[]): string {
  return cells.map((c, i) => (i === 0 ? c.padEnd(METRIC_WIDTHS[0]) : c.padStart(METRIC_WIDTHS[i] ?? 0))).join("  ");
}
const metricCells = (m: SandboxMetric): string[] => [
  time(m.timestamp),
  `${m.cpuUsedPct.toFixed(1)}%`,
  share(m.memUsed, m.memTotal),
  size(m.memCache),
  share(m.diskUsed, m.diskTotal),
];

export async function metrics(args: Args<typeof commands.metrics>, context: Context): Promise<Exit> {
  const { out } = context;
  const signal = args.follow ? context.interrupted() : undefined;
  const client = await context.client();
  const now = Math.floor(Date.now() / 1000);
  const range = args.last === undefined ? {} : { start: now - args.last };
  const samples = await client.metrics(args.id, range, signal);
  const shown = args.last === undefined ? samples.slice(-1) : samples;
  if (!args.follow && out.json) return out.value(shown);
  if (!args.follow && shown.length === 0) {
    out.note("No samples yet: the node takes one every few seconds. --follow waits for them.");
    return;
  }
  if (!out.json) out.line(out.style("bold", metricLine(["TIME (UTC)", "CPU", "MEMORY", "CACHE", "DISK"])));
  const print = (m: SandboxMetric): void => (out.json ? out.event(m) : out.line(metricLine(metricCells(m))));
  for (const m of shown) print(m);
  if (signal === undefined) return;
  let last = shown.at(-1)?.timestampUnix ?? now - 1;
  return await follow(context, signal, POLL_METRICS_MS, async () => {
    for (const m of await client.metrics(args.id, { start: last + 1 }, signal)) {
      if (m.timestampUnix <= last) continue;
      last = m.timestampUnix;
      print(m);
    }
  });
}

const LEVELS = ["debug", "info", "warn", "error"] as const;

export async function logs(args: Args<typeof commands.logs>, context: Context): Promise<Exit> {
  const { out } = context;
  const following = args.follow ? context.interrupted() : undefined;
  const client = await context.client();
  const lowest = LEVELS.indexOf(args.level ?? "debug");
  const wanted = (e: SandboxLogEntry): boolean =>
    LEVELS.indexOf(e.level) >= lowest &&
    (args.search === undefined || e.message.includes(args.search) || JSON.stringify(e.fields).includes(args.search));
  const read = entryReader((start, signal) => client.logs(args.id, { start, limit: LOG_PAGE }, signal));
  if (!args.follow && out.json) {
    const all: SandboxLogEntry[] = [];
    for (let page = await read(); page.length > 0; page = await read()) all.push(...page.filter(wanted));
    return out.value(all);
  }
  const print = (e: SandboxLogEntry): void => {
    if (!wanted(e)) return;
    if (out.json) return out.event(e);
    const style = e.level === "error" ? "red" : e.level === "warn" ? "yellow" : "dim";
    const fields = Object.entries(e.fields).map(([k, v]) => `${k}=${v}`);
    const text = printable([e.message, ...fields].join(" "));
    out.line(`${out.style("dim", time(e.timestamp))} ${out.style(style, e.level.padEnd(5))} ${text}`);
  };
  const drain = async (signal?: AbortSignal): Promise<void> => {
    for (let page = await read(signal); page.length > 0; page = await read(signal)) for (const e of page) print(e);
  };
  if (following === undefined) return await drain();
  return await follow(context, following, POLL_LOGS_MS, () => drain(following));
}

/**
 * Gives the entries that were not given before, page by page. A page starts at the time of the last entry, which
 * others may share, so those of that very time are remembered.
 */
export function entryReader(
  fetch: (start: number | undefined, signal?: AbortSignal) => Promise<SandboxLogEntry[]>,
): (signal?: AbortSignal) => Promise<SandboxLogEntry[]> {
  let start: number | undefined;
  let seen = new Map<string, number>();
  return async (signal) => {
    const left = new Map(seen);
    const fresh = (await fetch(start, signal)).filter((e) => {
      const key = JSON.stringify([e.timestamp, e.level, e.message, e.fields]);
      const n = left.get(key) ?? 0;
      if (n > 0) left.set(key, n - 1);
      return n === 0;
    });
    for (const e of fresh) {
      const at = Date.parse(e.timestamp);
      if (at !== start) {
        start = at;
        seen = new Map();
      }
      const key = JSON.stringify([e.timestamp, e.level, e.message, e.fields]);
      seen.set(key, (seen.get(key) ?? 0) + 1);
    }
    return fresh;
  };
}

/** Until the sandbox is gone, which is a good end, or until Ctrl-C. */
async function follow(
  context: Context,
  signal: AbortSignal,
  everyMs: number,
  poll: () => Promise<void>,
): Promise<Exit> {
  try {
    for (;;) {
      await poll();
      await wait(everyMs, undefined, { signal });
    }
  } catch (e) {
    if (signal.aborted) return exitCodeOf(AenvError.from(signal.reason, "follow"));
    if (e instanceof AenvError && e.code === "NOT_FOUND") {
      context.out.note("The sandbox has ended.");
      return EXIT.ok.code;
    }
    throw e;
  }
}
