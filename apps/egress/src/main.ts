/**
 * egress: the node's gateway for sandboxes whose rules name domains, a proxy or transforms. It outlives the server, so
 * that their connections do. Usage: node main.ts --socket PATH --state DIR --uid N --log FILE
 */
import { mkdirSync, readFileSync, rmSync, writeFileSync } from "node:fs";
import { createServer } from "node:net";
import { join } from "node:path";
import { createSecureContext, getCACertificates } from "node:tls";
import { parseArgs } from "node:util";
import { EgressGateway, listenDns, Names, obey, systemLookup, Transformer } from "@aenv/egress";
import { issue } from "@aenv/names";
import pino from "pino";
import { choosePorts, type Ports, reenter, TRANSPARENT_FD } from "./listener.ts";

const { values } = parseArgs({
  options: {
    socket: { type: "string" },
    state: { type: "string" },
    uid: { type: "string" },
    log: { type: "string" },
  },
});
const { socket, state, log } = values;
const uid = Number(values.uid);
if (socket === undefined || state === undefined || log === undefined || !Number.isInteger(uid) || uid < 1) {
  console.error("usage: egress --socket PATH --state DIR --uid N --log FILE");
  process.exit(64);
}

// Slots name the ports in their rules: a gateway that comes back has the same.
const portsFile = join(state, "ports.json");
mkdirSync(state, { recursive: true, mode: 0o700 });
const known = ((): Ports | undefined => {
  try {
    return JSON.parse(readFileSync(portsFile, "utf8")) as Ports;
  } catch {
    return undefined;
  }
})();
const ports = known ?? (await choosePorts());
if (!known) writeFileSync(portsFile, `${JSON.stringify(ports)}\n`);
reenter(ports.tcpPort);

const destination = pino.destination({ dest: log, sync: true, append: true, maxLength: 1024 * 1024 });
// Guests can fill the host's disk: that may cost lines of the log, nothing else.
destination.on("error", () => {});
const logger = pino({ name: "egress", level: process.env["AENV_LOG_LEVEL"] ?? "info" }, destination);
const now = (): number => performance.now();
const transformer = new Transformer({
  issue: (authority, name) => issue(authority, [name], Date.now()),
  logger,
  now,
});
const gateway = new EgressGateway({ names: new Names(systemLookup(), now), transformer, logger, now });

const transparent = createServer({ allowHalfOpen: true, pauseOnConnect: true, noDelay: true }, (s) => {
  void gateway.serve(s);
});
await new Promise<void>((resolve) => transparent.listen({ fd: TRANSPARENT_FD }, resolve));
await listenDns(gateway, ports.dnsPort);
const control = createServer((s) => obey(s, gateway, { ...ports, uid }));
rmSync(socket, { force: true });
process.umask(0o077);
await new Promise<void>((resolve) => control.listen(socket, resolve));

// Node reads the files of authorities when it first needs them, and then it may not any more.
getCACertificates("default");
createSecureContext();

// Everything that needs root is open; guests' bytes are read without it.
process.setgroups?.([]);
process.setgid?.(uid);
process.setuid?.(uid);
logger.info({ ...ports, uid }, "the egress gateway is ready");

process.on("SIGTERM", () => process.exit(0));
process.on("SIGINT", () => process.exit(0));
process.on("SIGHUP", () => {});
