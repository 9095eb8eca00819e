/** From a snapshot to a running VM: with a waiting VMM and without, by guest size, by how many at once, beside how many siblings. */
import type { Operation } from "@aenv/client";
import { Writer } from "./lib/dirty.ts";
import { RunningNode } from "./lib/node.ts";
import { mark, MIB, Operations, stoppedMs } from "./lib/operations.ts";
import { OwnNode } from "./lib/own-node.ts";
import { type BenchOptions, type BenchOutcome, type Series, series } from "./lib/series.ts";

const GUEST_MIB = [256, 1024, 4096] as const;
const SIBLINGS = [0, 1, 4, 16, 64] as const;
const AT_ONCE = [1, 4, 16] as const;
const DIRTY_MIB = 16;

const running = (all: readonly Operation[]): number[] => all.map((x) => mark(x, "running"));

/** `count` sandboxes of the template at once, which are killed again. */
async function launches(
  node: RunningNode,
  count: number,
  operations: Operations,
  signal: AbortSignal,
): Promise<Operation[]> {
  await operations.next(signal);
  const made = await Promise.all(Array.from({ length: count }, () => node.create(signal)));
  await node.killAll(made.map((s) => s.sandboxID));
  return (await operations.next(signal)).filter((x) => x.op === "create");
}

async function withoutPool(o: BenchOptions): Promise<Series[]> {
  await using own = await OwnNode.start({ spares: false }, o.signal);
  const { node } = own;
  const operations = await Operations.open(node.client, o.signal);
  const results: Series[] = [];
  await launches(node, 1, operations, o.signal);
  for (const count of o.brief ? [1, 4] : AT_ONCE) {
    const seen: Operation[] = [];
    for (let i = 0; i < (o.brief ? 3 : count === 1 ? 20 : 3); i++)
      seen.push(...(await launches(node, count, operations, o.signal)));
    results.push(series(`without a pool, ${count} at once: VM running`, "ms", running(seen)));
    o.log(
      `without a pool, ${count} at once: ${running(seen)
        .map((ms) => ms.toFixed(0))
        .join(" ")} ms`,
    );
  }
  const live: string[] = [];
  for (const siblings of o.brief ? SIBLINGS.filter((n) => n <= 4) : SIBLINGS) {
    while (live.length < siblings) live.push((await node.create(o.signal)).sandboxID);
    const seen: Operation[] = [];
    for (let i = 0; i < (o.brief ? 2 : 7); i++) seen.push(...(await launches(node, 1, operations, o.signal)));
    results.push(series(`without a pool, beside ${siblings} live siblings: VM running`, "ms", running(seen)));
  }
  return results;
}

/** Resumes of a paused sandbox, one after the other, with the pool full before each. */
async function fromPool(o: BenchOptions): Promise<Series[]> {
  using node = await RunningNode.find();
  await node.poolFull(o.signal);
  using writer = await Writer.create(node, o.signal);
  try {
    const seen: Operation[] = [];
    for (let i = 0; i < (o.brief ? 3 : 20); i++) {
      await node.client.pause(writer.id, {}, o.signal);
      await node.poolFull(o.signal);
      const operations = await Operations.open(node.client, o.signal);
      await node.client.connect(writer.id, 600, o.signal);
      seen.push(await operations.one("resume", o.signal));
    }
    const ready = seen.filter((x) => x.source === "prepared");
    if (ready.length === 0) return [];
    return [
      series("from a waiting VMM: VM running", "ms", running(ready)),
      series(
        "from a waiting VMM: delta injected",
        "MiB",
        ready.map((x) => (x.counts["injected"] ?? 0) / MIB),
      ),
    ];
  } finally {
    await node.killAll([writer.id]);
  }
}

async function byGuestSize(memoryMiB: number, o: BenchOptions): Promise<Series[]> {
  await using own = await OwnNode.start({ memoryMiB, spares: false }, o.signal);
  const { node } = own;
  const operations = await Operations.open(node.client, o.signal);
  const seen: Operation[] = [];
  for (let i = 0; i < (o.brief ? 2 : 8); i++) seen.push(...(await launches(node, 1, operations, o.signal)));
  using writer = await Writer.create(node, o.signal);
  const captures: Operation[] = [];
  for (let i = 0; i < (o.brief ? 2 : 6); i++) {
    await writer.dirty(DIRTY_MIB * MIB, o.signal);
    await operations.next(o.signal);
    await node.client.snapshot(writer.id, {}, o.signal);
    const taken = await operations.one("snapshot", o.signal);
    // The first one also holds what the guest did since its launch.
    if (i > 0) captures.push(taken);
  }
  const what = `guest of ${memoryMiB} MiB`;
  return [
    series(`${what}, without a pool: VM running`, "ms", running(seen)),
    series(`${what}, snapshot with ${DIRTY_MIB} MiB dirty: guest stopped`, "ms", captures.map(stoppedMs)),
    series(
      `${what}, snapshot with ${DIRTY_MIB} MiB dirty: answered`,
      "ms",
      captures.map((x) => x.totalMs),
    ),
  ];
}

export async function run(o: BenchOptions): Promise<BenchOutcome> {
  const results = await fromPool(o);
  results.push(...(await withoutPool(o)));
  for (const memoryMiB of o.brief ? [256] : GUEST_MIB) results.push(...(await byGuestSize(memoryMiB, o)));
  using node = await RunningNode.find();
  return {
    results,
    conditions: {
      ...(await node.conditions(o.signal)),
      running: "from the request in the node until the VM was told to go on; its agent answers later",
    },
  };
}
