/**
 * Disks whose layers are in S3 (versitygw on loopback), together larger than the node's cache: read for the first time,
 * and again from the cache, against the same layer as a file.
 */
import { mkdtemp, open, rm, stat } from "node:fs/promises";
import { randomBytes } from "node:crypto";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { AenvError, newLayerId } from "@aenv/base";
import { importRaw, type LayerRef, openStore, SnapshotRepository, writeStub } from "@aenv/block";
import { S3Server } from "@aenv/block/testing";
import { run as exec } from "@aenv/host";
import { Children } from "./lib/children.ts";
import { versionOf } from "./lib/conditions.ts";
import { BenchBlockd, fio, type Job, MIB } from "./lib/nbd.ts";
import { type BenchOptions, type BenchOutcome, ratio, type Series, series, single } from "./lib/series.ts";

const CACHE_MIB = 256;
const SEQUENTIAL: Job = { name: "1 MiB sequential read, depth 4", rw: "read", bs: "1m", depth: 4, unit: "MiB/s" };
const RANDOM: Job = { name: "4 KiB random read, depth 32", rw: "randread", bs: "4k", depth: 32, unit: "1/s" };

/** Half of it compresses, as programs do. */
async function rawDisk(path: string, size: number): Promise<void> {
  const file = await open(path, "w");
  try {
    for (let at = 0; at < size; at += 8 * MIB) {
      const piece = Buffer.alloc(8 * MIB);
      for (let p = 0; p < piece.length; p += 4096) randomBytes(2048).copy(piece, p);
      await file.write(piece, 0, piece.length, at);
    }
  } finally {
    await file.close();
  }
}

interface Disk {
  raw: string;
  stub: LayerRef;
  local: LayerRef;
}

class Bed {
  readonly dir: string;
  readonly address: string;
  readonly #repository: SnapshotRepository;

  constructor(dir: string, address: string, repository: SnapshotRepository) {
    this.dir = dir;
    this.address = address;
    this.#repository = repository;
  }

  async disk(name: string, size: number, signal: AbortSignal): Promise<Disk & { publishMs: number; bytes: number }> {
    const raw = join(this.dir, `${name}.raw`);
    await rawDisk(raw, size);
    const local = { id: newLayerId(), path: join(this.dir, `${name}.lsmt`) };
    await importRaw(raw, local);
    const started = performance.now();
    const files = [{ name: "layer", path: local.path, encoding: "zfile" as const }];
    const scratch = join(this.dir, "scratch");
    const { blobs } = await this.#repository.publish({ id: name, record: {}, files, scratch, signal });
    const publishMs = performance.now() - started;
    const blob = blobs[0];
    if (!blob) throw new AenvError("INTERNAL", "nothing was published");
    const stub = { id: newLayerId(), path: join(this.dir, `${name}.stub`) };
    await writeStub(stub.path, { store: this.address, ...blob });
    return { raw, stub, local, publishMs, bytes: blob.bytes };
  }
}

export async function run(o: BenchOptions): Promise<BenchOutcome> {
  const { signal } = o;
  const [count, size] = o.brief ? [3, 256 * MIB] : [4, 640 * MIB];
  const rounds = o.brief ? 1 : 5;
  const roundMs = o.brief ? 800 : 1500;
  const dir = await mkdtemp(join(tmpdir(), "aenv-remote-"));
  try {
    await using server = await S3Server.start();
    await using children = new Children();
    const address = server.address("bench");
    using store = await openStore(address);
    const bed = new Bed(dir, address, new SnapshotRepository(store));
    await using blockd = await BenchBlockd.start(children, dir, signal, ["--cache-mib", String(CACHE_MIB)]);
    const results: Series[] = [];
    const publishes: number[] = [];
    const firsts: number[] = [];
    let stored = 0;
    for (let i = 0; i < count; i++) {
      const disk = await bed.disk(`d${i}`, size, signal);
      stored += disk.bytes;
      publishes.push(size / MIB / (disk.publishMs / 1000));
      const uri = await blockd.disk(`d${i}`, [disk.stub], size);
      const started = performance.now();
      // All of it, compared with what it should be.
      await exec("qemu-img", ["compare", "-f", "raw", "-F", "raw", disk.raw, uri], { signal });
      firsts.push(size / MIB / ((performance.now() - started) / 1000));
      await blockd.close(`d${i}`);
      const cache = (await stat(join(dir, "state/cache/slots.data"))).size;
      if (cache > CACHE_MIB * MIB) throw new AenvError("INTERNAL", `the cache has ${cache} bytes`);
      o.log(`disk ${i}: first read at ${firsts.at(-1)?.toFixed(0)} MiB/s, right; cache ${cache / MIB} MiB`);
      await rm(disk.raw);
      await rm(disk.local.path);
    }
    results.push(series("publish: compress, sum and send", "MiB/s", publishes));
    results.push(series("first read of everything, compared (qemu-img compare)", "MiB/s", firsts));
    const small = await bed.disk("small", 128 * MIB, signal);
    const far = await blockd.disk("far", [small.stub], 128 * MIB);
    await exec("qemu-img", ["compare", "-f", "raw", "-F", "raw", small.raw, far], { signal });
    // From here on the cache serves alone.
    await server.down();
    const near = await blockd.disk("near", [small.local], 128 * MIB);
    for (const job of [SEQUENTIAL, RANDOM]) {
      const seen = { far: [] as number[], near: [] as number[] };
      for (let round = 0; round < rounds; round++) {
        seen.far.push((await fio(far, job, roundMs, signal)).rate);
        seen.near.push((await fio(near, job, roundMs, signal)).rate);
      }
      const cached = series(`${job.name}: cached, store gone`, job.unit, seen.far);
      const local = series(`${job.name}: local layer, plain`, job.unit, seen.near);
      results.push(cached, local, ratio(`${job.name}: cached / local (more is better)`, cached, local));
    }
    results.push(single("stored, of all disks", "MiB", stored / MIB));
    return {
      results,
      conditions: {
        peers: `versitygw v1.8.0 on loopback; ${await versionOf("fio", ["--version"])}`,
        disks: `${count} of ${size / MIB} MiB, half of it random, layers in lz4 ZFiles; cache bound ${CACHE_MIB} MiB`,
        rounds: `${rounds} of ${roundMs} ms, in turns`,
      },
    };
  } finally {
    await rm(dir, { recursive: true, force: true });
  }
}
