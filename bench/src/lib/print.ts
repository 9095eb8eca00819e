import type { Conditions } from "./conditions.ts";
import type { Series } from "./series.ts";

export interface Report {
  name: string;
  conditions: Conditions;
  results: Series[];
  /** Only in `all`: what could not run, and why. */
  failures?: { name: string; reason: string }[];
}

function digits(n: number): string {
  if (Number.isInteger(n)) return String(n);
  const abs = Math.abs(n);
  return n.toFixed(abs >= 100 ? 0 : abs >= 10 ? 1 : abs >= 1 ? 2 : 3);
}

/** The report as a table for people. */
export function renderTable(report: Report): string {
  const head = ["metric", "unit", "n", "p50", "p95", "p99"];
  const rows = report.results.map((r) => [r.metric, r.unit, String(r.n), digits(r.p50), digits(r.p95), digits(r.p99)]);
  const widths = head.map((h, i) => Math.max(h.length, ...rows.map((r) => r[i]?.length ?? 0)));
  const line = (cells: string[]): string =>
    cells
      .map((c, i) => (i < 2 ? c.padEnd(widths[i] ?? 0) : c.padStart(widths[i] ?? 0)))
      .join("  ")
      .trimEnd();
  return [
    `# ${report.name}`,
    ...Object.entries(report.conditions).map(([k, v]) => `${k}: ${v}`),
    "",
    line(head),
    line(widths.map((w) => "-".repeat(w))),
    ...rows.map(line),
    ...(report.failures ?? []).map((f) => `failed: ${f.name}: ${f.reason}`),
    "",
  ].join("\n");
}
