/**
 * From a template to a running VM, and to the first output of a command in it, against `podman run` of the same root
 * file system, in turns. Neither side runs while the node makes a new spare.
 */
import { AenvError } from "@aenv/base";
import type { Sandbox } from "@aenv/client";
import { RunningNode } from "./lib/node.ts";
import { Podman } from "./lib/podman.ts";
import { type BenchOptions, type BenchOutcome, ratio, type Series, series, single } from "./lib/series.ts";

const COMMAND = ["/bin/echo", "hello"] as const;

/** Milliseconds from now to the first byte of the command's output. */
async function firstOutput(node: RunningNode, sandbox: Sandbox, signal: AbortSignal): Promise<void> {
  const guest = node.guest(sandbox);
  try {
    for await (const e of await guest.start({ cmd: COMMAND[0], args: [COMMAND[1]] }, signal)) {
      if (e.type === "stdout") return;
    }
    throw new AenvError("GUEST_FAILED", "the command ended without output");
  } finally {
    guest.close();
  }
}

/** The server's resident memory while so many sandboxes do nothing. */
async function withIdle(node: RunningNode, count: number, signal: AbortSignal): Promise<Series> {
  const made: Sandbox[] = [];
  try {
    while (made.length < count) made.push(await node.create(signal));
    await node.poolFull(signal);
    const { residentBytes } = await node.client.node(signal);
    return single(`server memory with ${count} idle sandboxes`, "MiB", residentBytes / 2 ** 20);
  } finally {
    for (const { sandboxID } of made) await node.client.kill(sandboxID, AbortSignal.timeout(30_000));
  }
}

export async function run(o: BenchOptions): Promise<BenchOutcome> {
  const { signal } = o;
  using node = await RunningNode.find();
  await using podman = await Podman.open(node.home, signal);
  const rounds = o.brief ? 5 : 30;
  const seen = { create: [], output: [], kill: [], podman: [], podmanEnd: [] } as Record<string, number[]> & {
    [K in "create" | "output" | "kill" | "podman" | "podmanEnd"]: number[];
  };
  await node.poolFull(signal);
  // Both sides once for their caches.
  await podman.run(COMMAND, signal);
  await node.client.kill((await node.create(signal)).sandboxID, signal);
  for (let round = 0; round < rounds; round++) {
    await node.poolFull(signal);
    const started = performance.now();
    const sandbox = await node.create(signal);
    const created = performance.now();
    try {
      await firstOutput(node, sandbox, signal);
      const output = performance.now();
      seen.create.push(created - started);
      seen.output.push(output - started);
    } finally {
      const before = performance.now();
      await node.client.kill(sandbox.sandboxID, signal);
      seen.kill.push(performance.now() - before);
    }
    await node.poolFull(signal);
    const container = await podman.run(COMMAND, signal);
    seen.podman.push(container.firstOutputMs);
    seen.podmanEnd.push(container.endMs);
    o.log(
      `${round + 1}/${rounds}: created in ${(created - started).toFixed(0)} ms, first output after ${seen.output.at(-1)?.toFixed(0)} ms; podman run ${container.firstOutputMs.toFixed(0)} ms`,
    );
  }
  const idle = await withIdle(node, o.brief ? 3 : 20, signal);
  const output = series("create to first output of a command", "ms", seen.output);
  const container = series("podman run to first output", "ms", seen.podman);
  const { timings } = await node.client.node(signal);
  return {
    results: [
      series("create, client", "ms", seen.create),
      output,
      series("kill, client", "ms", seen.kill),
      container,
      series("podman run to its end", "ms", seen.podmanEnd),
      ratio("create to first output / podman run to first output (less is better)", output, container),
      idle,
      ...timings.filter((t) => t.metric.startsWith("create")).map((t) => ({ ...t, metric: `node: ${t.metric}` })),
    ],
    conditions: {
      ...(await node.conditions(signal)),
      podman: `${await Podman.conditions()}, no cgroup, no network, no overlay`,
      client: "keep-alive HTTP from Node to the API and the edge; podman as a command; command: /bin/echo",
      nodeSeries: "node: series cover the last creates since the server started, not only this run's",
    },
  };
}
