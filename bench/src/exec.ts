/** A trivial command in a running sandbox, through the edge, against `podman exec` in a container of the same files, in turns. */
import { AenvError } from "@aenv/base";
import { RunningNode } from "./lib/node.ts";
import { Podman } from "./lib/podman.ts";
import { type BenchOptions, type BenchOutcome, ratio, series, single } from "./lib/series.ts";

const COMMAND = ["/bin/echo", "hello"] as const;
/** The first calls in a VM under emulation translate code; they are shown on their own. */
const WARM = 5;

export async function run(o: BenchOptions): Promise<BenchOutcome> {
  const { signal } = o;
  using node = await RunningNode.find();
  await using podman = await Podman.open(node.home, signal);
  await node.poolFull(signal);
  const sandbox = await node.create(signal);
  const guest = node.guest(sandbox);
  try {
    await node.poolFull(signal);
    const container = await podman.start(signal);
    const ours = async (): Promise<number> => {
      const started = performance.now();
      const r = await guest.exec({ cmd: COMMAND[0], args: [COMMAND[1]] }, signal);
      if (r.exitCode !== 0 || r.stdout !== "hello\n") throw new AenvError("INTERNAL", `the command gave ${r.status}`);
      return performance.now() - started;
    };
    const theirs = async (): Promise<number> => (await podman.exec(container, COMMAND, signal)).endMs;
    const first = await ours();
    for (let i = 0; i < WARM; i++) {
      await ours();
      await theirs();
    }
    const seen: { ours: number[]; theirs: number[]; health: number[] } = { ours: [], theirs: [], health: [] };
    for (let i = 0; i < (o.brief ? 20 : 100); i++) {
      seen.ours.push(await ours());
      seen.theirs.push(await theirs());
      const started = performance.now();
      await guest.health(signal);
      seen.health.push(performance.now() - started);
    }
    const exec = series("exec of a command, to its end", "ms", seen.ours);
    const podmanExec = series("podman exec, to its end", "ms", seen.theirs);
    return {
      results: [
        exec,
        single("first exec in the sandbox", "ms", first),
        series("GET /health of the guest through the edge", "ms", seen.health),
        podmanExec,
        ratio("exec / podman exec (less is better)", exec, podmanExec),
      ],
      conditions: {
        ...(await node.conditions(signal)),
        podman: `${await Podman.conditions()}, no cgroup, no network`,
        client: "keep-alive HTTP from Node through the edge; podman as a command; command: /bin/echo",
      },
    };
  } finally {
    guest.close();
    await node.client.kill(sandbox.sandboxID, AbortSignal.timeout(10_000));
  }
}
