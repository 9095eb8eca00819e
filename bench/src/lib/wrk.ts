import { writeFile } from "node:fs/promises";
import { join } from "node:path";
import { AenvError } from "@aenv/base";
import { run } from "@aenv/host";
import type { Series } from "./series.ts";

export interface WrkResult {
  requestsPerSecond: number;
  /** Milliseconds. */
  latency: Series;
  errors: number;
}

const SCRIPT = `done = function(summary, latency, requests)
  local e = summary.errors
  io.write(string.format('{"requests":%d,"us":%d,"p50":%d,"p95":%d,"p99":%d,"errors":%d}',
    summary.requests, summary.duration, latency:percentile(50), latency:percentile(95), latency:percentile(99),
    e.connect + e.read + e.write + e.status + e.timeout), "\\n")
end
`;

/** One round of Debian's wrk, with one thread so that the rest of the machine is left to the servers. */
export async function wrk(
  dir: string,
  o: { port: number; path: string; host: string; connections: number; seconds: number; signal: AbortSignal },
): Promise<WrkResult> {
  const script = join(dir, "report.lua");
  await writeFile(script, SCRIPT);
  const url = `http://127.0.0.1:${o.port}${o.path}`;
  const args = ["-t1", `-c${o.connections}`, `-d${o.seconds}s`, "-H", `Host: ${o.host}`, "-s", script, url];
  const { stdout } = await run("wrk", args, { signal: o.signal });
  const line = stdout.split("\n").find((l) => l.startsWith("{"));
  if (!line) throw new AenvError("INTERNAL", `wrk printed no report: ${stdout.slice(0, 500)}`);
  const r = JSON.parse(line) as Record<"requests" | "us" | "p50" | "p95" | "p99" | "errors", number>;
  const latency = { metric: "", unit: "ms", n: r.requests, p50: r.p50 / 1000, p95: r.p95 / 1000, p99: r.p99 / 1000 };
  return { requestsPerSecond: r.requests / (r.us / 1e6), latency, errors: r.errors };
}
