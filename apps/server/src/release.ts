/** `--release`: ends everything of a node whose server does not run, and frees what it holds on the host. */
import { rm } from "node:fs/promises";
import { join } from "node:path";
import { AenvError, type Logger, sleep } from "@aenv/base";
import { Cgroups, isAlive, type ProcIdentity, processes, signalExact } from "@aenv/host";
import { Network } from "@aenv/network";
import { State } from "@aenv/state";
import type { ServerConfig } from "./config.ts";
import { onlyServer } from "./only-one.ts";
import { networkOptions } from "./wiring.ts";

/** A daemon may take so long to end in order; then it is killed. Everything it acknowledged is durable either way. */
const DAEMON_STOP_MS = 5000;
/** A killed process is gone within this, or the kernel cannot end it. */
const KILL_MS = 10_000;

/** Processes of this instance: its VMMs and daemons carry a path below its run folder. */
function ofInstance(runRoot: string): (ProcIdentity & { argv: string[] })[] {
  return [...processes()].filter((p) => p.pid !== process.pid && p.argv.some((a) => a.includes(`${runRoot}/`)));
}

async function gone(all: readonly ProcIdentity[], limitMs: number): Promise<boolean> {
  const until = performance.now() + limitMs;
  while (all.some((p) => isAlive(p))) {
    if (performance.now() > until) return false;
    await sleep(20);
  }
  return true;
}

async function killAll(all: readonly ProcIdentity[]): Promise<void> {
  for (const p of all) signalExact(p, "SIGKILL");
  if (await gone(all, KILL_MS)) return;
  const left = all.filter((p) => isAlive(p)).map((p) => p.pid);
  throw new AenvError("INTERNAL", `these processes do not end: ${left.join(" ")}`, {
    hint: "Look at dmesg; reboot if they stay.",
  });
}

/** Order: machines, then what serves them, then what they stood on. Sandboxes are lost; templates stay. */
export async function releaseNode(config: ServerConfig, logger: Logger): Promise<void> {
  const { home, runRoot, instance } = config;
  using _lock = await onlyServer(instance);
  const isDaemon = (p: { argv: string[] }): boolean => p.argv.includes("--socket");
  const machines = ofInstance(runRoot).filter((p) => !isDaemon(p));
  await killAll(machines);
  const daemons = ofInstance(runRoot);
  for (const p of daemons) signalExact(p, "SIGTERM");
  if (!(await gone(daemons, DAEMON_STOP_MS))) await killAll(daemons);
  await new Cgroups().remove(`aenv-${instance}`);
  {
    using state = State.open(join(home, "state.db"));
    const network = await Network.open(await networkOptions(config, state, logger));
    await network.destroy();
  }
  for (const dir of [join(home, "runs"), join(home, "blockd"), runRoot])
    await rm(dir, { recursive: true, force: true });
  logger.info({ machines: machines.length, daemons: daemons.length }, "released");
}
