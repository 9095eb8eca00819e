import { randomBytes } from "node:crypto";
import { readFileSync } from "node:fs";
import { chmod, link, mkdir, readFile, rm } from "node:fs/promises";
import { homedir } from "node:os";
import { join, resolve } from "node:path";
import { AenvError, errnoOf } from "@aenv/base";
import { publishFile } from "./files.ts";

/** What one node is called on its host and where it listens; `config.json` of its data folder. */
export interface NodeConfig {
  /** 4 hex digits in the name of every host resource of this node, so that several nodes can share a host. */
  instance: string;
  /** TCP port of the API and the edge. */
  port: number;
  /** Address to listen on. */
  listen: string;
  /** Sandboxes are reached as `<port>-<id>.<domain>`; may carry a port. Left out of the file: `localhost:<port>`. */
  domain: string;
  /** The operator's certificate (chain) and key, PEM files; left out: of the node's own authority. */
  tls?: { cert: string; key: string };
  /** Answers DNS questions for the domain: `listen` is `address:port`, `answer` the node's addresses. */
  dns?: { listen: string; answer: string[] };
}

/** The node's data folder: AENV_HOME, else /var/lib/aenv for root, else the user's data folder. */
export function aenvHome(env: NodeJS.ProcessEnv = process.env): string {
  const named = env["AENV_HOME"];
  if (named) return resolve(named);
  if (process.getuid?.() === 0) return "/var/lib/aenv";
  return join(env["XDG_DATA_HOME"] ?? join(homedir(), ".local/share"), "aenv");
}

/** Where a node keeps its sockets: short, since a Unix socket's path is at most 108 bytes. */
export const runRoot = (instance: string): string => `/run/aenv-${instance}`;

/** Reads the node's config; undefined where `npm run up` has not made one yet. */
export async function readNodeConfig(home: string): Promise<NodeConfig | undefined> {
  const path = join(home, "config.json");
  let text: string;
  try {
    text = await readFile(path, "utf8");
  } catch (e) {
    if (errnoOf(e) === "ENOENT") return undefined;
    throw AenvError.from(e, `read ${path}`);
  }
  const c = parseJson(text);
  const { instance, port, listen, tls, dns } = c;
  const domain = c["domain"] ?? `localhost:${String(port)}`;
  if (
    typeof instance === "string" &&
    /^[0-9a-f]{4}$/.test(instance) &&
    typeof port === "number" &&
    Number.isInteger(port) &&
    port >= 0 &&
    port < 65_536 &&
    typeof listen === "string" &&
    typeof domain === "string" &&
    (tls === undefined || isTls(tls)) &&
    (dns === undefined || isDns(dns))
  )
    return { instance, port, listen, domain, ...(tls ? { tls } : {}), ...(dns ? { dns } : {}) };
  throw new AenvError("CORRUPT", `${path} is not a valid configuration`, {
    hint: `Correct the file: it needs "instance" (4 hex digits), "port" and "listen"; "domain", "tls": {"cert", "key"} and "dns": {"listen", "answer"} may be left out.`,
  });
}

function isTls(value: unknown): value is NonNullable<NodeConfig["tls"]> {
  const { cert, key } = (value ?? {}) as Record<string, unknown>;
  return typeof cert === "string" && typeof key === "string";
}

function isDns(value: unknown): value is NonNullable<NodeConfig["dns"]> {
  const { listen, answer } = (value ?? {}) as Record<string, unknown>;
  return typeof listen === "string" && Array.isArray(answer) && answer.every((a) => typeof a === "string");
}

/** Where a node keeps the files of its own certificate authority. */
export const tlsFolder = (home: string): string => join(home, "tls");

function parseJson(text: string): Record<string, unknown> {
  try {
    const value: unknown = JSON.parse(text);
    return typeof value === "object" && value !== null ? (value as Record<string, unknown>) : {};
  } catch {
    return {};
  }
}

/** Reads the config, making it at the first call. Two first calls at once agree on one. */
export async function ensureNodeConfig(
  home: string,
  defaults: { port: number; domain?: string; listen?: string },
): Promise<NodeConfig> {
  const known = await readNodeConfig(home);
  if (known) return known;
  await mkdir(home, { recursive: true });
  // Guests' disks and memory are below: nobody but root looks in; VMMs pass through to the files their uid may read.
  await chmod(home, 0o711);
  // Without a domain of the operator's it follows the port.
  const config = {
    instance: randomBytes(2).toString("hex"),
    port: defaults.port,
    listen: defaults.listen ?? "127.0.0.1",
    ...(defaults.domain === undefined ? {} : { domain: defaults.domain }),
  };
  const own = join(home, `config.json.${config.instance}`);
  await publishFile(own, `${JSON.stringify(config, null, 2)}\n`);
  try {
    // link(2) fails when the name exists, so only one of two racers wins.
    await link(own, join(home, "config.json"));
  } catch (e) {
    if (errnoOf(e) !== "EEXIST") throw e;
  } finally {
    await rm(own, { force: true });
  }
  const agreed = await readNodeConfig(home);
  if (!agreed) throw new AenvError("CONFLICT", `${home}/config.json vanished while it was made`);
  return agreed;
}

/** Moves the node to another port, from its next start on. */
export async function setNodePort(home: string, port: number): Promise<void> {
  const path = join(home, "config.json");
  await publishFile(path, `${JSON.stringify({ ...parseJson(await readFile(path, "utf8")), port }, null, 2)}\n`);
}

export interface ServerFile {
  pid: number;
  startTicks: number;
  port: number;
  /** At SIGTERM it may take so long to pause what runs. */
  stopMs: number;
}

/** The running server as it described itself in `server.json`; undefined when there is no such file. */
export function readServerFile(home: string): ServerFile | undefined {
  try {
    const c = parseJson(readFileSync(join(home, "server.json"), "utf8"));
    const { pid, startTicks, port, stopMs } = c;
    if (typeof pid === "number" && typeof startTicks === "number" && typeof port === "number")
      return { pid, startTicks, port, stopMs: typeof stopMs === "number" ? stopMs : 0 };
  } catch (e) {
    if (errnoOf(e) !== "ENOENT") throw e;
  }
  return undefined;
}
