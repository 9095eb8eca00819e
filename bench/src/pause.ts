/** Pause and resume, by what the guest wrote since it was launched. */
import type { Operation } from "@aenv/client";
import { Writer } from "./lib/dirty.ts";
import { RunningNode } from "./lib/node.ts";
import { mark, MIB, Operations } from "./lib/operations.ts";
import { type BenchOptions, type BenchOutcome, type Series, series } from "./lib/series.ts";

const SIZES_MIB = [1, 4, 16, 64, 256] as const;

interface Round {
  pause: Operation;
  resume: Operation;
}

async function round(node: RunningNode, writer: Writer, operations: Operations, o: BenchOptions): Promise<Round> {
  await node.client.pause(writer.id, {}, o.signal);
  const pause = await operations.one("pause", o.signal);
  await node.client.connect(writer.id, 600, o.signal);
  writer.reconnect();
  return { pause, resume: await operations.one("resume", o.signal) };
}

function rows(size: number, all: readonly Round[]): Series[] {
  const of = (what: string, unit: string, value: (r: Round) => number): Series =>
    series(`${size} MiB dirty: ${what}`, unit, all.map(value));
  return [
    of("pause, request to the guest stopped for good", "ms", (r) => mark(r.pause, "ended")),
    of("pause, answered", "ms", (r) => r.pause.totalMs),
    of("pause, stored", "MiB", (r) => (r.pause.counts["stored"] ?? 0) / MIB),
    of("resume, VM running", "ms", (r) => mark(r.resume, "running")),
    of("resume, answered", "ms", (r) => r.resume.totalMs),
  ];
}

export async function run(o: BenchOptions): Promise<BenchOutcome> {
  using node = await RunningNode.find();
  await node.poolFull(o.signal);
  const results: Series[] = [];
  const sources = new Set<string>();
  for (const size of SIZES_MIB) {
    using writer = await Writer.create(node, o.signal);
    try {
      const operations = await Operations.open(node.client, o.signal);
      const seen: Round[] = [];
      for (let i = 0; i < (o.brief ? 2 : 6); i++) {
        await writer.dirty(size * MIB, o.signal);
        await node.poolFull(o.signal);
        await operations.next(o.signal);
        seen.push(await round(node, writer, operations, o));
      }
      for (const r of seen) sources.add(r.resume.source ?? "");
      results.push(...rows(size, seen));
      o.log(`${size} MiB: paused in ${seen.map((r) => mark(r.pause, "ended").toFixed(0)).join(" ")} ms`);
    } finally {
      await node.killAll([writer.id]);
    }
  }
  return {
    results,
    conditions: {
      ...(await node.conditions(o.signal)),
      dirty: "one byte changed in each page of a file in memory, in the guest; the same pages each round",
      resumedFrom: [...sources].join(", "),
    },
  };
}
