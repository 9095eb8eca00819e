/** A snapshot of a sandbox that goes on: how long its guest stands still and when the caller has the answer, by what it wrote. */
import type { Operation } from "@aenv/client";
import { Writer } from "./lib/dirty.ts";
import { RunningNode } from "./lib/node.ts";
import { MIB, Operations, stoppedMs } from "./lib/operations.ts";
import { type BenchOptions, type BenchOutcome, type Series, series } from "./lib/series.ts";

const SIZES_MIB = [1, 4, 16, 64, 256] as const;
const CONCURRENCY_MIB = 16;

function rows(what: string, all: readonly Operation[]): Series[] {
  return [
    series(`${what}: guest stopped`, "ms", all.map(stoppedMs)),
    series(
      `${what}: answered`,
      "ms",
      all.map((o) => o.totalMs),
    ),
    series(
      `${what}: stored`,
      "MiB",
      all.map((o) => (o.counts["stored"] ?? 0) / MIB),
    ),
  ];
}

async function bySize(node: RunningNode, o: BenchOptions): Promise<Series[]> {
  const results: Series[] = [];
  for (const size of SIZES_MIB) {
    using writer = await Writer.create(node, o.signal);
    try {
      await node.poolFull(o.signal);
      // The first one also holds what the guest did since its launch.
      await writer.dirty(size * MIB, o.signal);
      await node.client.deleteSnapshot((await node.client.snapshot(writer.id, {}, o.signal)).snapshotID, o.signal);
      const operations = await Operations.open(node.client, o.signal);
      const seen: Operation[] = [];
      for (let round = 0; round < (o.brief ? 3 : size > 64 ? 5 : 10); round++) {
        await writer.dirty(size * MIB, o.signal);
        const { snapshotID } = await node.client.snapshot(writer.id, {}, o.signal);
        seen.push(await operations.one("snapshot", o.signal));
        await node.client.deleteSnapshot(snapshotID, o.signal);
      }
      results.push(...rows(`${size} MiB dirty`, seen));
      o.log(`${size} MiB: stopped ${seen.map((s) => stoppedMs(s).toFixed(1)).join(" ")} ms`);
    } finally {
      await node.killAll([writer.id]);
    }
  }
  return results;
}

async function atOnce(node: RunningNode, count: number, o: BenchOptions): Promise<Series[]> {
  const writers: Writer[] = [];
  try {
    while (writers.length < count) writers.push(await Writer.create(node, o.signal));
    await node.poolFull(o.signal);
    const operations = await Operations.open(node.client, o.signal);
    const seen: Operation[] = [];
    for (let round = 0; round < (o.brief ? 2 : 4); round++) {
      for (const w of writers) await w.dirty(CONCURRENCY_MIB * MIB, o.signal);
      const taken = await Promise.all(writers.map((w) => node.client.snapshot(w.id, {}, o.signal)));
      const all = await operations.next(o.signal);
      // The first round holds the guests' start.
      if (round > 0) seen.push(...all.filter((s) => s.op === "snapshot"));
      for (const { snapshotID } of taken) await node.client.deleteSnapshot(snapshotID, o.signal);
    }
    o.log(`${count} at once: stopped ${seen.map((s) => stoppedMs(s).toFixed(0)).join(" ")} ms`);
    return rows(`${count} at once, ${CONCURRENCY_MIB} MiB each`, seen);
  } finally {
    for (const w of writers) w[Symbol.dispose]();
    await node.killAll(writers.map((w) => w.id));
  }
}

export async function run(o: BenchOptions): Promise<BenchOutcome> {
  using node = await RunningNode.find();
  await node.poolFull(o.signal);
  const results = await bySize(node, o);
  for (const count of o.brief ? [4] : [4, 16]) results.push(...(await atOnce(node, count, o)));
  return {
    results,
    conditions: {
      ...(await node.conditions(o.signal)),
      dirty: "one byte changed in each page of a file in memory, in the guest; the same pages each round",
      answered: "from the request in the node to the snapshot durable on the disk",
    },
  };
}
