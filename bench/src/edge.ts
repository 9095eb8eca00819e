/**
 * The edge against nginx as a plain reverse proxy, both in front of the same upstream, in turns. The edge is one Node
 * process; nginx runs once with one worker (the same number of cores) and once with one worker per core.
 */
import { mkdtemp, rm, truncate, writeFile } from "node:fs/promises";
import { availableParallelism, tmpdir } from "node:os";
import { join } from "node:path";
import { AenvError } from "@aenv/base";
import { run as exec } from "@aenv/host";
import { Children, freePort, residentMiB, waitForPort } from "./lib/children.ts";
import { versionOf } from "./lib/conditions.ts";
import { type BenchOptions, type BenchOutcome, ratio, type Series, series, single } from "./lib/series.ts";
import { wrk, type WrkResult } from "./lib/wrk.ts";

const DOMAIN = "bench.test";
/** Port 1 stands for the upstream of the request benchmark, see lib/edge-server.ts. */
const HOST = `1-ibench.${DOMAIN}`;
const CONNECTIONS = [1, 64, 512] as const;
const BODY_BYTES = 1024;

function nginxConfig(dir: string, workers: number, http: string): string {
  return `daemon off; user root; worker_processes ${workers}; pid ${dir}/nginx.pid; error_log stderr error;
worker_rlimit_nofile 8192;
events { worker_connections 4096; }
http {
  access_log off; keepalive_requests 1000000000; client_max_body_size 0;
  client_body_temp_path ${dir}/body; proxy_temp_path ${dir}/proxy; fastcgi_temp_path ${dir}/f; uwsgi_temp_path ${dir}/u; scgi_temp_path ${dir}/s;
  ${http}
}
`;
}

/** Nothing is spooled: like the edge, it forwards as it comes. */
function proxyConfig(port: number, upstream: number): string {
  return `upstream guest { server 127.0.0.1:${upstream}; keepalive 1024; keepalive_requests 1000000000; }
  server { listen 127.0.0.1:${port} backlog=4096; location / {
    proxy_pass http://guest; proxy_http_version 1.1; proxy_set_header Connection ""; proxy_set_header Host $http_host;
    proxy_buffering off; proxy_request_buffering off; proxy_read_timeout 1h;
  } }`;
}

class Bed {
  readonly children = new Children();
  readonly dir: string;
  readonly signal: AbortSignal;
  #n = 0;

  constructor(dir: string, signal: AbortSignal) {
    this.dir = dir;
    this.signal = signal;
  }

  async nginx(workers: number, http: (port: number) => string): Promise<number> {
    const port = await freePort();
    const home = `${this.dir}/nginx${this.#n++}`;
    const conf = `${home}.conf`;
    await exec("mkdir", [home]);
    await writeFile(conf, nginxConfig(home, workers, http(port)));
    this.children.start("/usr/sbin/nginx", ["-e", "stderr", "-p", home, "-c", conf]);
    await waitForPort(port, this.signal);
    return port;
  }
}

/** One figure per percentile: the median over the rounds. */
function overRounds(metric: string, rounds: readonly WrkResult[]): Series {
  const mid = (key: "p50" | "p95" | "p99"): number =>
    series(
      "",
      "",
      rounds.map((r) => r.latency[key]),
    ).p50;
  const n = rounds.reduce((sum, r) => sum + r.latency.n, 0);
  return { metric, unit: "ms", n, p50: mid("p50"), p95: mid("p95"), p99: mid("p99") };
}

async function requests(bed: Bed, o: BenchOptions): Promise<Series[]> {
  const body = "x".repeat(BODY_BYTES);
  const upstream = await bed.nginx(
    1,
    (port) => `server { listen 127.0.0.1:${port} backlog=4096; location / { return 200 "${body}"; } }`,
  );
  const cores = availableParallelism();
  const edge = await bed.children.startServer(join(import.meta.dirname, "lib/edge-server.ts"), [
    DOMAIN,
    String(upstream),
  ]);
  const ports = {
    direct: upstream,
    edge: edge.port,
    nginx1: await bed.nginx(1, (port) => proxyConfig(port, upstream)),
    [`nginx${cores}`]: await bed.nginx(cores, (port) => proxyConfig(port, upstream)),
  };
  const seconds = o.brief ? 2 : 8;
  const rounds = o.brief ? 1 : 3;
  const results: Series[] = [];
  for (const connections of CONNECTIONS) {
    const seen = new Map<string, WrkResult[]>(Object.keys(ports).map((k) => [k, []]));
    for (let round = 0; round < rounds; round++) {
      for (const [name, port] of Object.entries(ports)) {
        const r = await wrk(bed.dir, { port, path: "/", host: HOST, connections, seconds, signal: o.signal });
        if (r.errors > 0)
          throw new AenvError("INTERNAL", `${name} failed ${r.errors} requests at ${connections} connections`);
        o.log(
          `c=${connections} ${name}: ${Math.round(r.requestsPerSecond)} requests/s, p99 ${r.latency.p99.toFixed(2)} ms`,
        );
        seen.get(name)?.push(r);
      }
    }
    const rates = new Map<string, Series>();
    const times = new Map<string, Series>();
    for (const [name, list] of seen) {
      rates.set(
        name,
        series(
          `${name} rate, c=${connections}`,
          "1/s",
          list.map((r) => r.requestsPerSecond),
        ),
      );
      times.set(name, overRounds(`${name} latency, c=${connections}`, list));
    }
    results.push(...rates.values(), ...times.values());
    const [ourRate, ourTime, direct] = [rates.get("edge"), times.get("edge"), times.get("direct")];
    if (!ourRate || !ourTime || !direct) throw new AenvError("INTERNAL", "no round was run");
    for (const name of rates.keys()) {
      if (!name.startsWith("nginx")) continue;
      results.push(ratio(`rate edge / ${name} (more is better), c=${connections}`, ourRate, rates.get(name) as Series));
      results.push(
        ratio(`latency edge / ${name} (less is better), c=${connections}`, ourTime, times.get(name) as Series),
      );
    }
    if (connections === 1) results.push(single("added latency of the edge, c=1", "ms", ourTime.p50 - direct.p50));
  }
  return results;
}

async function curl(args: readonly string[], signal: AbortSignal): Promise<number> {
  const report = "%{http_code} %{time_total}";
  const { stdout } = await exec("curl", ["-sS", "-o", "/dev/null", "-w", report, ...args], { signal });
  const [status, seconds] = stdout.split(" ");
  if (status !== "200") throw new AenvError("INTERNAL", `curl got status ${status}`);
  return Number(seconds);
}

async function streams(bed: Bed, o: BenchOptions): Promise<Series[]> {
  const bytes = (o.brief ? 256 : 1024) * 2 ** 20;
  const rounds = o.brief ? 1 : 5;
  const file = join(bed.dir, "upload");
  await writeFile(file, "");
  await truncate(file, bytes);
  const upstream = await bed.children.startServer(join(import.meta.dirname, "lib/stream-server.ts"), []);
  const edge = await bed.children.startServer(join(import.meta.dirname, "lib/edge-server.ts"), [
    DOMAIN,
    String(upstream.port),
  ]);
  const nginx = await bed.nginx(1, (port) => proxyConfig(port, upstream.port));
  const ports = { direct: upstream.port, edge: edge.port, nginx1: nginx };
  const results: Series[] = [];
  // Warm: code is compiled and the heap has grown to its working size.
  for (let i = 0; i < 3; i++) await curl(["-H", `Host: ${HOST}`, `http://127.0.0.1:${edge.port}/${2 ** 26}`], o.signal);
  const before = residentMiB(edge.pid);
  let most = before.now;
  for (const way of ["down", "up"] as const) {
    const seen: Record<keyof typeof ports, number[]> = { direct: [], edge: [], nginx1: [] };
    for (let round = 0; round < rounds; round++) {
      for (const [name, port] of Object.entries(ports)) {
        const url = `http://127.0.0.1:${port}/${bytes}`;
        const args = way === "down" ? [] : ["-T", file, "-H", "Expect:"];
        const watch = setInterval(() => {
          most = Math.max(most, residentMiB(edge.pid).now);
        }, 20);
        try {
          const seconds = await curl([...args, "-H", `Host: ${HOST}`, url], o.signal);
          seen[name as keyof typeof ports].push(bytes / 2 ** 20 / seconds);
        } finally {
          clearInterval(watch);
        }
      }
    }
    const label = `${bytes / 2 ** 20} MiB ${way}`;
    const [direct, ours, theirs] = [
      series(`direct ${label}`, "MiB/s", seen.direct),
      series(`edge ${label}`, "MiB/s", seen.edge),
      series(`nginx1 ${label}`, "MiB/s", seen.nginx1),
    ];
    results.push(direct, ours, theirs, ratio(`${label} edge / nginx1 (more is better)`, ours, theirs));
  }
  results.push(
    single("edge memory before the streams", "MiB", before.now),
    single("edge memory at most during the streams", "MiB", most),
  );
  return results;
}

export async function run(o: BenchOptions): Promise<BenchOutcome> {
  const dir = await mkdtemp(join(tmpdir(), "aenv-bench-edge-"));
  const bed = new Bed(dir, o.signal);
  try {
    const results = [...(await requests(bed, o)), ...(await streams(bed, o))];
    const conditions = {
      nginx: await versionOf("/usr/sbin/nginx", ["-v"]),
      loadGenerator: `wrk, 1 thread, ${BODY_BYTES} byte bodies, keep-alive; curl for streams`,
      upstream: "nginx, 1 worker, for requests; a Node server for streams",
      edge: "1 Node process; nginxN: plain reverse proxy with N workers, keep-alive to the upstream, no buffering",
    };
    return { results, conditions };
  } finally {
    await bed.children[Symbol.asyncDispose]();
    await rm(dir, { recursive: true, force: true });
  }
}
