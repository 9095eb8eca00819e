import { rm } from "node:fs/promises";
import { join } from "node:path";
import { claimUids, procIdentity, publishFile } from "@aenv/host";
import { readConfig, type ServerConfig, USAGE } from "./config.ts";
import { openLogger } from "./log.ts";
import { onlyServer } from "./only-one.ts";
import { releaseNode } from "./release.ts";
import { openNode } from "./wiring.ts";

/** How long open work may take at the end; then the process goes. */
const STOP_DEADLINE_MS = 10_000;

async function writeServerFile(config: ServerConfig, port: number): Promise<() => Promise<void>> {
  const path = join(config.home, "server.json");
  await publishFile(path, `${JSON.stringify({ ...procIdentity(process.pid), port })}\n`);
  return () => rm(path, { force: true });
}

function printUsage(): void {
  console.log(USAGE);
}

/** Runs until SIGTERM or SIGINT, which leave the virtual machines running for the next server. */
export async function serve(argv: readonly string[]): Promise<void> {
  if (argv.includes("--help")) return printUsage();
  const config = await readConfig(argv, process.env);
  const logger = openLogger(config.logLevel);
  if (config.release) return releaseNode(config, logger);
  const stopping = new AbortController();
  const stopped = new Promise<string>((resolve) => {
    for (const name of ["SIGTERM", "SIGINT"] as const) process.once(name, () => resolve(name));
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
  logger.info({ signal }, "stopping; sandboxes go on");
  setTimeout(() => {
    logger.error({ ms: STOP_DEADLINE_MS }, "open work did not end in time");
    process.exit(1);
  }, STOP_DEADLINE_MS).unref();
  await removeServerFile();
}
