/** Fifty captures of one sandbox, each with as much written as before: what the first, the last and launches from them cost. */
import type { Operation } from "@aenv/client";
import { Writer } from "./lib/dirty.ts";
import { RunningNode } from "./lib/node.ts";
import { mark, MIB, Operations, stoppedMs } from "./lib/operations.ts";
import { type BenchOptions, type BenchOutcome, ratio, type Series, series } from "./lib/series.ts";

const DIRTY_MIB = 4;

interface Chain {
  captures: Operation[];
  /** From the snapshot of every fifth capture. */
  launches: Operation[];
}

/** `moving`: each capture finds other pages written than the one before. */
async function chain(node: RunningNode, moving: boolean, length: number, o: BenchOptions): Promise<Chain> {
  using writer = await Writer.create(node, o.signal);
  const snapshots: string[] = [];
  try {
    const seen: Chain = { captures: [], launches: [] };
    await writer.dirty(DIRTY_MIB * MIB, o.signal);
    snapshots.push((await node.client.snapshot(writer.id, {}, o.signal)).snapshotID);
    const operations = await Operations.open(node.client, o.signal);
    for (let k = 0; k < length; k++) {
      await writer.dirty(DIRTY_MIB * MIB, o.signal, moving ? k * DIRTY_MIB * MIB : 0);
      await operations.next(o.signal);
      const { snapshotID } = await node.client.snapshot(writer.id, {}, o.signal);
      seen.captures.push(await operations.one("snapshot", o.signal));
      snapshots.push(snapshotID);
      if (k % 5 !== 4) continue;
      const child = await node.create(o.signal, snapshotID);
      seen.launches.push(await operations.one("create", o.signal));
      await node.killAll([child.sandboxID]);
    }
    return seen;
  } finally {
    await node.killAll([writer.id]);
    for (const id of snapshots) await node.client.deleteSnapshot(id, AbortSignal.timeout(60_000));
  }
}

function rows(what: string, { captures, launches }: Chain): Series[] {
  const part = Math.min(10, Math.ceil(captures.length / 4));
  const of = (name: string, value: (o: Operation) => number): Series[] => {
    const first = series(`${what}: ${name}, first ${part}`, "ms", captures.slice(0, part).map(value));
    const last = series(`${what}: ${name}, last ${part}`, "ms", captures.slice(-part).map(value));
    return [first, last, ratio(`${what}: ${name}, last / first`, last, first)];
  };
  const half = Math.ceil(launches.length / 2);
  const running = (all: readonly Operation[]): number[] => all.map((x) => mark(x, "running"));
  return [
    ...of("guest stopped", stoppedMs),
    ...of("answered", (x) => x.totalMs),
    series(`${what}: launch from captures of the first half, VM running`, "ms", running(launches.slice(0, half))),
    series(`${what}: launch from captures of the second half, VM running`, "ms", running(launches.slice(half))),
    series(
      `${what}: stored by a capture`,
      "MiB",
      captures.map((x) => (x.counts["stored"] ?? 0) / MIB),
    ),
  ];
}

export async function run(o: BenchOptions): Promise<BenchOutcome> {
  using node = await RunningNode.find();
  await node.poolFull(o.signal);
  const length = o.brief ? 10 : 50;
  const same = await chain(node, false, length, o);
  o.log("the same pages: done");
  const moving = await chain(node, true, length, o);
  return {
    results: [...rows("same pages each time", same), ...rows("other pages each time", moving)],
    conditions: {
      ...(await node.conditions(o.signal)),
      captures: length,
      dirty: `${DIRTY_MIB} MiB before each capture`,
    },
  };
}
