/**
 * blockd: serves the disks of a node over NBD, one Unix socket per disk, and is told what to do over its control socket.
 * `node apps/blockd/src/main.ts --socket PATH --state DIR --log FILE [--workers N] [--cache DIR] [--cache-mib N]`
 * The cache holds pieces of layers that are in stores (default: STATE/cache, 10240 MiB).
 */
import { createHash } from "node:crypto";
import { chmodSync, mkdirSync, realpathSync, rmSync } from "node:fs";
import { createServer, type Server } from "node:net";
import { dirname, join } from "node:path";
import { parseArgs } from "node:util";
import { messageOf } from "@aenv/base";
import pino from "pino";
import { controlServer } from "./control.ts";
import { BlockService } from "./service.ts";

const { values } = parseArgs({
  options: {
    socket: { type: "string" },
    state: { type: "string" },
    log: { type: "string" },
    workers: { type: "string" },
    cache: { type: "string" },
    "cache-mib": { type: "string", default: "10240" },
    "load-ms": { type: "string" },
  },
});
const { socket, state, log } = values;
if (socket === undefined || state === undefined || log === undefined) {
  console.error("usage: blockd --socket PATH --state DIR --log FILE [--workers N] [--cache DIR] [--cache-mib N]");
  process.exit(64);
}

// The folder of the control socket is on the way to the disks' sockets, which other users open.
mkdirSync(dirname(socket), { recursive: true, mode: 0o755 });
process.umask(0o077);
mkdirSync(dirname(log), { recursive: true });
mkdirSync(state, { recursive: true, mode: 0o700 });
const destination = pino.destination({ dest: log, sync: true, append: true, maxLength: 1024 * 1024 });
// Guests can fill the host's disk: that may cost lines of the log, never the disks.
destination.on("error", () => {});
const logger = pino({ name: "blockd" }, destination);

function listen(server: Server, path: string): Promise<void> {
  return new Promise((resolve, reject) => {
    server.once("error", reject);
    server.listen(path, () => {
      server.off("error", reject);
      resolve();
    });
  });
}

// Two processes on one state folder would ruin the disks. The kernel drops an abstract socket with its process.
const lock = createServer((s) => s.destroy());
try {
  await listen(lock, `\0aenv-blockd-${createHash("sha256").update(realpathSync(state)).digest("hex").slice(0, 32)}`);
} catch (e) {
  console.error(`another blockd serves ${state}: ${messageOf(e)}`);
  process.exit(75);
}

const socketDir = join(dirname(socket), ".blockd");
rmSync(socketDir, { recursive: true, force: true });
mkdirSync(socketDir, { recursive: true, mode: 0o700 });

const service = new BlockService({
  stateDir: state,
  socketDir,
  logger,
  cache: {
    dir: values.cache ?? join(state, "cache"),
    bytes: Number(values["cache-mib"]) * 2 ** 20,
    ...(values["load-ms"] === undefined ? {} : { loadMs: Number(values["load-ms"]) }),
  },
  ...(values.workers === undefined ? {} : { workers: Number(values.workers) }),
  onCrash(e) {
    // The files are consistent at any moment; a new process opens all disks again.
    logger.fatal({ error: e.stack ?? e.message }, "a disk worker crashed");
    process.exit(70);
  },
});
await service.recover();

const control = controlServer(service, logger);
rmSync(socket, { force: true });
await listen(control, socket);
chmodSync(socket, 0o600);
logger.info({ socket }, "blockd is ready");

let stopping = false;
async function stop(): Promise<void> {
  if (stopping) return;
  stopping = true;
  control.close();
  control.closeIdleConnections();
  try {
    await service.stop();
    logger.info({}, "blockd ended");
    process.exit(0);
  } catch (e) {
    logger.error({ error: messageOf(e) }, "blockd ended with an error");
    process.exit(1);
  }
}
process.on("SIGTERM", () => void stop());
process.on("SIGINT", () => void stop());
