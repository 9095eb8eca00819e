import { rm } from "node:fs/promises";
import { join } from "node:path";
import { AenvError, deadline, type Logger } from "@aenv/base";
import { claimUids, procIdentity, publishFile } from "@aenv/host";
import { readConfig, type ServerConfig, USAGE } from "./config.ts";
import { openLogger } from "./log.ts";
import { onlyServer } from "./only-one.ts";
import { releaseNode } from "./release.ts";
import { type Node, openNode } from "./wiring.ts";

/** How long open work may take at the end; then the process goes. */
const STOP_DEADLINE_MS = 10_000;

async function writeServerFile(config: ServerConfig, port: number): Promise<() => Promise<void>> {
  const path = join(config.home, "server.json");
  const { sandboxes, deadlineMs } = config.stop;
  const stopMs = sandboxes === "pause" ? deadlineMs : 0;
  await publishFile(path, `${JSON.stringify({ ...procIdentity(process.pid), port, stopMs })}\n`);
  return () => rm(path, { force: true });
}

function printUsage(): void {
  console.log(USAGE);
}

const STOP_SIGNALS = ["SIGTERM", "SIGINT", "SIGUSR2"] as const;

/** Every sandbox is paused as far as the deadline allows; what is left goes on in its VM. A second signal ends the wait. */
async function pauseAll({ engine }: Node, { stop }: ServerConfig, logger: Logger): Promise<void> {
  const { running } = engine.count();
  const from = performance.now();
  logger.info({ running, deadlineMs: stop.deadlineMs }, "stopping: what runs is paused within the deadline");
  const hurry = new AbortController();
  for (const name of STOP_SIGNALS)
    process.once(name, () => hurry.abort(new AenvError("UNAVAILABLE", `the server got ${name} again`)));
  const { paused, left } = await engine.pauseAll(deadline(stop.deadlineMs, hurry.signal));
  const ms = Math.round(performance.now() - from);
  if (left.length === 0) logger.info({ paused, ms }, "all sandboxes are paused");
  else logger.error({ paused, left: left.map((l) => l.sandboxId), ms }, "sandboxes that were not paused in time go on");
}

/**
 * Runs until SIGTERM or SIGINT, which pause what runs unless the node is told to keep it (AENV_ON_STOP), or until SIGUSR2,
 * which leaves the virtual machines running for the next server.
 */
export async function serve(argv: readonly string[]): Promise<void> {
  if (argv.includes("--help")) return printUsage();
  const config = await readConfig(argv, process.env);
  const logger = openLogger(config.logLevel);
  if (config.release) return releaseNode(config, logger);
  const stopping = new AbortController();
  const stopped = new Promise<string>((resolve) => {
    for (const name of STOP_SIGNALS) process.once(name, () => resolve(name));
  });
  void stopped.then(() => stopping.abort(new DOMException("the server is being stopped", "AbortError")));
  process.on("SIGHUP", () => {});
  process.on("unhandledRejection", (e) => logger.error({ err: e }, "unhandled rejection"));

  using _lock = await onlyServer(config.instance);
  config.uidBase = await claimUids(config, { wanted: config.uidWanted });
  await using node = await openNode(config, logger, stopping.signal);
  const url = await node.app.listen({ host: config.listen, port: config.port });
  const port = Number(new URL(url).port);
  // The system chose the port, so only now the domain is known.
  config.domain = config.domain.replace(/:0$/, `:${port}`);
  const removeServerFile = await writeServerFile(config, port);
  logger.info({ url, home: config.home, ms: Math.round(performance.now()) }, "the node takes requests");
  const signal = await stopped;
  if (signal !== "SIGUSR2" && config.stop.sandboxes === "pause") await pauseAll(node, config, logger);
  else logger.info({ signal }, "stopping; sandboxes go on");
  setTimeout(() => {
    logger.error({ ms: STOP_DEADLINE_MS }, "open work did not end in time");
    process.exit(1);
  }, STOP_DEADLINE_MS).unref();
  await removeServerFile();
}
