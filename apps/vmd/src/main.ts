/**
 * vmd starts VMMs for the node's server and tells how they ended. It is small, so that fork is cheap, and it outlives
 * the server; VMMs outlive it in turn. Usage: node main.ts --socket PATH --log FILE
 */
import { closeSync, createWriteStream, readdirSync, readFileSync } from "node:fs";
import { rm } from "node:fs/promises";
import { connect } from "node:net";
import { parseArgs } from "node:util";
import { errnoOf, type Logger } from "@aenv/base";
import { Cgroups } from "@aenv/host";
import { Children } from "./children.ts";
import { createVmdServer } from "./server.ts";

/** Exit code when another vmd already serves the socket. */
const ALREADY_RUNNING = 3;
/** Of Linux on x86-64 and arm64. */
const O_CLOEXEC = 0o2000000;

function fileLogger(path: string): Logger {
  const file = createWriteStream(path, { flags: "a", mode: 0o600 });
  file.on("error", () => {});
  const line = (level: string) => (fields: Record<string, unknown>, message: string) =>
    void file.write(`${JSON.stringify({ time: new Date().toISOString(), level, app: "vmd", message, ...fields })}\n`);
  return { debug: () => {}, info: line("info"), warn: line("warn"), error: line("error") };
}

function answers(path: string): Promise<boolean> {
  return new Promise((resolve) => {
    const socket = connect(path);
    socket.once("connect", () => {
      socket.destroy();
      resolve(true);
    });
    socket.once("error", () => resolve(false));
  });
}

/** Descriptors that our starter left open would go on to every VMM; Node's own are all close-on-exec. */
function closeInherited(): void {
  for (const name of readdirSync("/proc/self/fd")) {
    const fd = Number(name);
    if (fd <= 2) continue;
    try {
      const flags = /^flags:\s*(\d+)$/m.exec(readFileSync(`/proc/self/fdinfo/${fd}`, "latin1"))?.[1] ?? "0";
      if ((Number.parseInt(flags, 8) & O_CLOEXEC) === 0) closeSync(fd);
    } catch {
      // The descriptor of the listing itself is closed by now.
    }
  }
}

closeInherited();
const { values } = parseArgs({ options: { socket: { type: "string" }, log: { type: "string" } } });
const { socket, log } = values;
if (socket === undefined || log === undefined) {
  console.error("usage: vmd --socket PATH --log FILE");
  process.exit(2);
}

const logger = fileLogger(log);
const children = new Children(new Cgroups());
children.onExit((e) => logger.info({ run: e.run, pid: e.identity.pid, code: e.code, signal: e.signal }, "ended"));
const server = createVmdServer(children, logger);
process.umask(0o077);

const listen = (): Promise<void> =>
  new Promise((resolve, reject) => {
    server.once("error", reject);
    server.listen(socket, resolve);
  });
try {
  await listen();
} catch (e) {
  if (errnoOf(e) !== "EADDRINUSE") throw e;
  if (await answers(socket)) {
    console.error(`another vmd serves ${socket}`);
    process.exit(ALREADY_RUNNING);
  }
  await rm(socket, { force: true });
  await listen();
}
logger.info({ pid: process.pid, socket }, "listening");

const stop = (): void => {
  server.close();
  process.exit(0);
};
process.on("SIGTERM", stop);
process.on("SIGINT", stop);
process.on("SIGHUP", () => {});
