/**
 * The layer stack against itself: twenty layers and the one they merge to, plain and compressed, both behind blockd and
 * read by fio in turns; what opening a deep stack and sealing a full upper take.
 */
import { closeSync } from "node:fs";
import { mkdtemp, open, readFile, rm } from "node:fs/promises";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { newLayerId } from "@aenv/base";
import { fileSink, type LayerRef, LayerWriter, mergeLayers, mergeStack, openLayer } from "@aenv/block";
import { run as exec } from "@aenv/host";
import { Children } from "./lib/children.ts";
import { versionOf } from "./lib/conditions.ts";
import { BenchBlockd, fio, type Job, MIB } from "./lib/nbd.ts";
import { type BenchOptions, type BenchOutcome, ratio, type Series, series } from "./lib/series.ts";

const DEPTH = 20;
const OPEN_DEPTH = 100;
/** Of the disk, each layer above the base changes so much. */
const CHANGED = 0.05;

const JOBS: readonly Job[] = [
  { name: "4 KiB random read, depth 32", rw: "randread", bs: "4k", depth: 32, unit: "1/s" },
  { name: "1 MiB sequential read, depth 4", rw: "read", bs: "1m", depth: 4, unit: "MiB/s" },
];

/** The same every time. */
function random(seed: number): (below: number) => number {
  let x = seed;
  return (below) => {
    x = (x * 48_271) % 2_147_483_647;
    return x % below;
  };
}

/** Extents of one layer above the base: runs of 4 KiB to 256 KiB, most of them short, as files are written. */
function changes(size: number, seed: number): { at: number; length: number }[] {
  const next = random(seed);
  const out: { at: number; length: number }[] = [];
  let left = size * CHANGED;
  let at = 0;
  const gap = (2 * 40 * 1024) / CHANGED / 4096;
  while (left > 0) {
    at += (1 + next(gap)) * 4096;
    const length = 4096 * (next(4) === 0 ? 1 + next(64) : 1 + next(4));
    if (at + length > size) break;
    out.push({ at, length });
    at += length;
    left -= length;
  }
  return out;
}

class Files {
  readonly dir: string;
  readonly size: number;
  readonly #content: Buffer;

  constructor(dir: string, size: number, content: Buffer) {
    this.dir = dir;
    this.size = size;
    this.#content = content;
  }

  async layer(extents: readonly { at: number; length: number }[]): Promise<LayerRef> {
    const id = newLayerId();
    const path = join(this.dir, `${id}.lsmt`);
    const file = await open(path, "w");
    try {
      const writer = new LayerWriter(fileSink(file), { virtualSize: this.size });
      for (const { at, length } of extents) await writer.data(at, this.#content.subarray(at, at + length));
      await writer.finish();
    } finally {
      await file.close();
    }
    return { id, path };
  }

  async merged(layers: readonly LayerRef[], compression?: "lz4" | "zstd"): Promise<LayerRef> {
    const target = { id: newLayerId(), path: join(this.dir, `merged-${compression ?? "plain"}.lsmt`) };
    const paths = layers.map((l) => l.path);
    await mergeLayers(paths, target, { base: true, ...(compression === undefined ? {} : { compression }) });
    return target;
  }
}

/** Programs and their data, as a disk holds them: the content of this Node's executable, again and again. */
async function realContent(size: number): Promise<Buffer> {
  const program = await readFile(process.execPath);
  const out = Buffer.alloc(size);
  for (let at = 0; at < size; at += program.length) program.copy(out, at, 0, Math.min(program.length, size - at));
  return out;
}

/** Opening and merging the indexes, as blockd does it before it serves a disk. */
async function openDeep(files: Files, rounds: number): Promise<Series> {
  const layers: LayerRef[] = [];
  for (let i = 0; i < OPEN_DEPTH; i++) layers.push(await files.layer(changes(files.size, i + 1)));
  const samples: number[] = [];
  for (let round = 0; round < rounds + 1; round++) {
    const started = performance.now();
    const opened = layers.map((l) => openLayer(l.path));
    mergeStack(opened.map((l) => l.extents));
    // The first round also loads the code.
    if (round > 0) samples.push(performance.now() - started);
    for (const l of opened) closeSync(l.fd);
  }
  for (const l of layers) await rm(l.path);
  return series(`open and merge ${OPEN_DEPTH} layers`, "ms", samples);
}

async function seals(server: BenchBlockd, files: Files, rounds: number, signal: AbortSignal): Promise<Series[]> {
  const gib = 1024 * MIB;
  const raw = join(files.dir, "written.raw");
  const samples: number[] = [];
  const file = await open(raw, "w");
  try {
    const piece = await realContent(8 * MIB);
    for (let at = 0; at < gib; at += piece.length) await file.write(piece, 0, piece.length, at);
  } finally {
    await file.close();
  }
  for (let round = 0; round < rounds; round++) {
    const uri = await server.disk(`seal${round}`, [], gib);
    await exec("nbdcopy", ["--flush", "--destination-is-zero", raw, uri], { signal });
    const target = { id: newLayerId(), path: join(files.dir, `sealed${round}.lsmt`) };
    samples.push(await server.seal(`seal${round}`, target));
    await server.close(`seal${round}`);
    await rm(target.path);
  }
  await rm(raw);
  return [series("seal a disk with 1 GiB written", "ms", samples)];
}

export async function run(o: BenchOptions): Promise<BenchOutcome> {
  const size = (o.brief ? 128 : 512) * MIB;
  const roundMs = o.brief ? 800 : 1500;
  const rounds = o.brief ? 1 : 7;
  const dir = await mkdtemp(join(tmpdir(), "aenv-layers-"));
  const results: Series[] = [];
  try {
    await using children = new Children();
    const files = new Files(dir, size, await realContent(size));
    results.push(await openDeep(files, rounds * 3));
    o.log(`opening: ${results.at(-1)?.p50.toFixed(1)} ms`);
    await using server = await BenchBlockd.start(children, dir, o.signal);
    results.push(...(await seals(server, files, o.brief ? 1 : 5, o.signal)));
    o.log(`sealing: ${results.at(-1)?.p50.toFixed(1)} ms`);
    const stack = [await files.layer([{ at: 0, length: size }])];
    for (let i = 1; i < DEPTH; i++) stack.push(await files.layer(changes(size, i)));
    const single = await files.merged(stack);
    const targets = {
      [`${DEPTH} layers`]: await server.disk("stack", stack, size),
      "one layer": await server.disk("single", [single], size),
      lz4: await server.disk("lz4", [await files.merged(stack, "lz4")], size),
      zstd: await server.disk("zstd", [await files.merged(stack, "zstd")], size),
    };
    for (const job of JOBS) {
      const rates = new Map<string, number[]>();
      for (let round = 0; round < rounds; round++) {
        const order = Object.entries(targets);
        for (const [name, uri] of round % 2 === 0 ? order : order.toReversed()) {
          const { rate } = await fio(uri, job, roundMs, o.signal);
          o.log(`${job.name}, ${name}: ${Math.round(rate)} ${job.unit}`);
          rates.set(name, [...(rates.get(name) ?? []), rate]);
        }
      }
      const all = new Map([...rates].map(([n, r]) => [n, series(`${job.name}: ${n}`, job.unit, r)]));
      results.push(...all.values());
      const one = all.get("one layer");
      for (const [name, s] of all) {
        if (one && s !== one) results.push(ratio(`${job.name}: ${name} / one plain layer (more is better)`, s, one));
      }
    }
    const conditions = {
      peers: `the same disk as ${DEPTH} layers, merged to one, and compressed; ${await versionOf("fio", ["--version"])}`,
      disk: `${size / MIB} MiB in the page cache; a full base and ${DEPTH - 1} layers that each change 5 % in runs of 4 to 256 KiB; content: an executable`,
      zfile: "blocks of 4 KiB, each with its sum checked",
      rounds: `${rounds} of ${roundMs} ms, in turns`,
    };
    return { results, conditions };
  } finally {
    await rm(dir, { recursive: true, force: true });
  }
}
