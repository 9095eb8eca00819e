/**
 * blockd against qemu-storage-daemon, in turns, by fio's NBD client over a Unix socket. Reads: both serve the very same
 * file (a layer whose data is one run). Writes: each has a file of its own on the same file system, written before.
 */
import { mkdtemp, open, rm } from "node:fs/promises";
import { availableParallelism, tmpdir } from "node:os";
import { join } from "node:path";
import { randomBytes } from "node:crypto";
import { AenvError, newLayerId, sleep } from "@aenv/base";
import { importRaw } from "@aenv/block";
import { run as exec } from "@aenv/host";
import { Children } from "./lib/children.ts";
import { versionOf } from "./lib/conditions.ts";
import { BenchBlockd, fio, type FioResult, type Job, MIB, nbdUri as uri, RAMP_MS } from "./lib/nbd.ts";
import { type BenchOptions, type BenchOutcome, ratio, type Series, series, single } from "./lib/series.ts";

/** Where a layer's data starts. */
const LAYER_DATA_OFFSET = 4096;

const JOBS: readonly Job[] = [
  { name: "4 KiB random read, depth 32", rw: "randread", bs: "4k", depth: 32, unit: "1/s" },
  { name: "4 KiB random read, depth 1", rw: "randread", bs: "4k", depth: 1, unit: "1/s" },
  { name: "4 KiB random write, depth 32", rw: "randwrite", bs: "4k", depth: 32, unit: "1/s" },
  { name: "4 KiB random write, depth 1", rw: "randwrite", bs: "4k", depth: 1, unit: "1/s" },
  { name: "1 MiB sequential read, depth 4", rw: "read", bs: "1m", depth: 4, unit: "MiB/s" },
  { name: "1 MiB sequential write, depth 4", rw: "write", bs: "1m", depth: 4, unit: "MiB/s" },
];

interface Peer {
  name: "blockd" | "qsd";
  read: string;
  write: string;
}

async function randomFile(path: string, size: number): Promise<void> {
  const block = randomBytes(8 * MIB);
  const file = await open(path, "w");
  for (let at = 0; at < size; at += block.length) {
    block.writeUInt32LE(at / MIB, 0);
    await file.write(block, 0, Math.min(block.length, size - at));
  }
  await file.close();
}

async function startQsd(
  children: Children,
  dir: string,
  layer: string,
  size: number,
  raw: string,
  o: BenchOptions,
): Promise<Peer> {
  const socket = join(dir, "qsd.sock");
  children.start("qemu-storage-daemon", [
    "--blockdev",
    `driver=file,node-name=f1,filename=${layer},read-only=on`,
    "--blockdev",
    `driver=raw,node-name=r,file=f1,offset=${LAYER_DATA_OFFSET},size=${size},read-only=on`,
    "--blockdev",
    `driver=file,node-name=f2,filename=${raw}`,
    "--blockdev",
    "driver=raw,node-name=w,file=f2",
    "--nbd-server",
    `addr.type=unix,addr.path=${socket},max-connections=16`,
    "--export",
    "type=nbd,id=e1,node-name=r,name=r",
    "--export",
    "type=nbd,id=e2,node-name=w,name=w,writable=on",
  ]);
  for (let i = 0; i < 200; i++) {
    const up = await exec("nbdinfo", ["--size", uri(socket, "w")], { signal: o.signal }).then(
      () => true,
      () => false,
    );
    if (up) return { name: "qsd", read: uri(socket, "r"), write: uri(socket, "w") };
    await sleep(25, o.signal);
  }
  throw new AenvError("UNAVAILABLE", "qemu-storage-daemon did not start");
}

/** Seconds to write `size` bytes in order to a disk that holds nothing yet. */
async function fill(peer: Peer, raw: string, o: BenchOptions): Promise<number> {
  const started = performance.now();
  await exec("nbdcopy", ["--flush", "--destination-is-zero", raw, peer.write], { signal: o.signal });
  return (performance.now() - started) / 1000;
}

export async function run(o: BenchOptions): Promise<BenchOutcome> {
  const size = (o.brief ? 256 : 1024) * MIB;
  const roundMs = o.brief ? 1000 : 1200;
  const rounds = o.brief ? 1 : 5;
  const dir = await mkdtemp(join(tmpdir(), "aenv-nbd-"));
  const results: Series[] = [];
  try {
    await using children = new Children();
    const raw = join(dir, "data.raw");
    await randomFile(raw, size);
    const layer = { id: newLayerId(), path: join(dir, "data.lsmt") };
    await importRaw(raw, layer);
    await using server = await BenchBlockd.start(children, dir, o.signal);
    const blockd: Peer = {
      name: "blockd",
      read: await server.disk("read", [layer], size),
      write: await server.disk("write", [], size),
    };
    results.push(single("fill an empty disk in order", "MiB/s", size / MIB / (await fill(blockd, raw, o))));
    const peers = [blockd, await startQsd(children, dir, layer.path, size, raw, o)];
    for (const job of JOBS) {
      const seen = new Map<string, FioResult[]>(peers.map((p) => [p.name, []]));
      for (let round = 0; round < rounds; round++) {
        // The order changes so that neither always runs on the warmer machine.
        for (const peer of round % 2 === 0 ? peers : peers.toReversed()) {
          const r = await fio(job.rw.endsWith("read") ? peer.read : peer.write, job, roundMs, o.signal);
          o.log(`${job.name}, ${peer.name}: ${Math.round(r.rate)} ${job.unit}, p99 ${r.p99.toFixed(2)} ms`);
          seen.get(peer.name)?.push(r);
        }
      }
      results.push(...compare(job, seen));
    }
    const conditions = {
      peers: `${await versionOf("qemu-storage-daemon", ["--version"])}; ${await versionOf("fio", ["--version"])}`,
      "disk size": `${size / MIB} MiB, in the page cache`,
      rounds: `${rounds} of ${roundMs} ms each after ${RAMP_MS} ms of warming, in turns; percentiles are over rounds for rates, of requests (median round) for latencies`,
      workers: availableParallelism(),
    };
    return { results, conditions };
  } finally {
    await rm(dir, { recursive: true, force: true });
  }
}

function compare(job: Job, seen: ReadonlyMap<string, readonly FioResult[]>): Series[] {
  const out: Series[] = [];
  const rates = new Map<string, Series>();
  for (const [name, list] of seen) {
    const mid = (key: "p50" | "p95" | "p99"): number =>
      series(
        "",
        "",
        list.map((r) => r[key]),
      ).p50;
    const rate = series(
      `${job.name}: ${name}`,
      job.unit,
      list.map((r) => r.rate),
    );
    rates.set(name, rate);
    out.push(rate);
    out.push({
      metric: `${job.name}: ${name} latency`,
      unit: "ms",
      n: list.length,
      p50: mid("p50"),
      p95: mid("p95"),
      p99: mid("p99"),
    });
  }
  const [ours, theirs] = [rates.get("blockd"), rates.get("qsd")];
  if (!ours || !theirs) throw new AenvError("INTERNAL", "no round was run");
  out.push(ratio(`${job.name}: blockd / qsd (more is better)`, ours, theirs));
  return out;
}
