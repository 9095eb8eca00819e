/** Children of a running sandbox: when they run, how long their source stands still, and what an idle child costs. */
import { readFileSync } from "node:fs";
import { AenvError, sleep } from "@aenv/base";
import type { Operation } from "@aenv/client";
import { Writer } from "./lib/dirty.ts";
import { RunningNode } from "./lib/node.ts";
import { mark, MIB, Operations, stoppedMs } from "./lib/operations.ts";
import { type BenchOptions, type BenchOutcome, type Series, series } from "./lib/series.ts";

const CHILDREN = 16;
const DIRTY_MIB = 16;
/** What a guest does right after its launch is not what it costs idle. */
const IDLE_MS = 3000;

/** Memory of a VMM that no other process shares, MiB. */
function privateMiB(pid: number): number {
  const text = readFileSync(`/proc/${pid}/smaps_rollup`, "utf8");
  let kib = 0;
  for (const [, n] of text.matchAll(/^Private_(?:Clean|Dirty):\s+(\d+) kB$/gm)) kib += Number(n);
  return kib / 1024;
}

async function privateOf(node: RunningNode, ids: readonly string[], signal: AbortSignal): Promise<number[]> {
  const { resources } = await node.client.doctor(signal);
  return ids.map((id) => {
    const vmm = resources.find((r) => r.kind === "process" && r.owner === `sandbox ${id}`);
    if (!vmm) throw new AenvError("INTERNAL", `the node knows no process of ${id}`);
    return privateMiB(Number(vmm.name));
  });
}

async function forked(node: RunningNode, id: string, count: number, signal: AbortSignal): Promise<string[]> {
  const results = await node.client.fork(id, { count, timeout: 600 }, signal);
  return results.map((r) => {
    if ("error" in r) throw r.error;
    return r.sandbox.sandboxID;
  });
}

interface Round {
  fork: Operation;
  children: Operation[];
}

const runningAt = ({ fork, children }: Round): number[] =>
  children.map((c) => c.startedAt + mark(c, "running") - fork.startedAt);

async function rounds(node: RunningNode, writer: Writer, o: BenchOptions): Promise<Round[]> {
  const operations = await Operations.open(node.client, o.signal);
  const seen: Round[] = [];
  for (let i = 0; i < (o.brief ? 2 : 6); i++) {
    await writer.dirty(DIRTY_MIB * MIB, o.signal);
    await node.poolFull(o.signal);
    await operations.next(o.signal);
    const children = await forked(node, writer.id, CHILDREN, o.signal);
    const all = await operations.next(o.signal);
    const fork = all.find((x) => x.op === "fork");
    if (!fork) throw new AenvError("INTERNAL", "the node tells of no fork");
    const round = { fork, children: all.filter((x) => x.op === "child") };
    // The first one also holds what the guest did since its launch.
    if (i > 0) seen.push(round);
    o.log(
      `all run after ${Math.max(...runningAt(round)).toFixed(0)} ms, source stopped ${stoppedMs(fork).toFixed(1)} ms`,
    );
    await node.killAll(children);
  }
  return seen;
}

/** Private memory of idle children, against the delta they were launched with and against a child without one. */
async function memory(node: RunningNode, writer: Writer, o: BenchOptions): Promise<Series[]> {
  const plain = await node.create(o.signal);
  const made: string[] = [plain.sandboxID];
  try {
    const operations = await Operations.open(node.client, o.signal);
    const without = await forked(node, plain.sandboxID, 3, o.signal);
    made.push(...without);
    await writer.dirty(DIRTY_MIB * MIB, o.signal);
    const deltas = await forked(node, writer.id, 3, o.signal);
    made.push(...deltas);
    const injected = (await operations.next(o.signal))
      .filter((x) => x.op === "child")
      .map((x) => x.counts["injected"] ?? 0);
    await sleep(IDLE_MS, o.signal);
    const [floor, extra] = [await privateOf(node, without, o.signal), await privateOf(node, deltas, o.signal)];
    return [
      series("private memory of an idle child of a fresh sandbox (the VMM's floor)", "MiB", floor),
      series(`private memory of an idle child, source with ${DIRTY_MIB} MiB dirty`, "MiB", extra),
      series(
        "delta that such a child was given",
        "MiB",
        injected.slice(3).map((n) => n / MIB),
      ),
    ];
  } finally {
    await node.killAll(made);
  }
}

export async function run(o: BenchOptions): Promise<BenchOutcome> {
  using node = await RunningNode.find();
  await node.poolFull(o.signal);
  using writer = await Writer.create(node, o.signal);
  try {
    const seen = await rounds(node, writer, o);
    const sources = seen.flatMap((r) => r.children.map((c) => c.source ?? ""));
    const results = [
      series(
        "source stopped",
        "ms",
        seen.map((r) => stoppedMs(r.fork)),
      ),
      series(
        `request to all ${CHILDREN} VMs running`,
        "ms",
        seen.map((r) => Math.max(...runningAt(r))),
      ),
      series(
        "request to the first VM running",
        "ms",
        seen.map((r) => Math.min(...runningAt(r))),
      ),
      series(
        `request to all ${CHILDREN} agents answered`,
        "ms",
        seen.map((r) => r.fork.totalMs),
      ),
      ...(await memory(node, writer, o)),
    ];
    return {
      results,
      conditions: {
        ...(await node.conditions(o.signal)),
        children: CHILDREN,
        dirty: `${DIRTY_MIB} MiB: one byte changed in each page of a file in memory`,
        waitingVmms: `${sources.filter((s) => s === "prepared").length} of ${sources.length} children`,
      },
    };
  } finally {
    await node.killAll([writer.id]);
  }
}
