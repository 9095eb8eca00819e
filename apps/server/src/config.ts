import { parseArgs } from "node:util";
import { AenvError, type Bytes, mib } from "@aenv/base";
import { MAX_FORKS } from "@aenv/contract";
import { aenvHome, ensureNodeConfig, type NodeConfig, runRoot } from "@aenv/host";

export interface ServerConfig extends NodeConfig {
  home: string;
  runRoot: string;
  /** Sandboxes, spares and builds together have at most so many network slots. */
  slots: number;
  /** The lowest of the uids that VMMs run as. */
  uidBase: number;
  /** What the operator chose; without it the node claims a range of its own. */
  uidWanted: number | undefined;
  /** Most children of one fork. */
  forkLimit: number;
  /** Memory of all spares together; undefined: the engine's own choice. */
  poolMB: number | undefined;
  /** With less of the data folder's disk left than this, no sandbox, snapshot or template is made. */
  diskReserveBytes: Bytes;
  /** Where snapshots are published. */
  store: string | undefined;
  /** Bound of the cache of layers that are in stores. */
  cacheMiB: number;
  /** Private ranges that sandboxes may reach, and ranges that none may. */
  egress: { open: string[]; deny: string[] };
  /** Resolvers of sandboxes; empty: those of the host. */
  resolvers: string[];
  /** Of each sandbox, towards the internet. */
  limits: { connections?: number; bytesPerSecond?: number };
  /** At SIGTERM: what becomes of the sandboxes, and how long pausing them may take. */
  stop: { sandboxes: "pause" | "keep"; deadlineMs: number };
  /** Free the host instead of serving. */
  release: boolean;
  accel: "auto" | "kvm" | "tcg";
  logLevel: "debug" | "info" | "warn" | "error";
}

export const USAGE = `usage: node apps/server/src/main.ts [--home DIR] [--port N] [--listen ADDRESS] [--domain NAME] [--release]

  --home     data folder (default: $AENV_HOME, else /var/lib/aenv)
  --port     TCP port of API and edge; 0 lets the system choose (default: that of config.json, else 8000)
  --listen   address to listen on (default: that of config.json, else 127.0.0.1)
  --domain   sandboxes are <port>-<id>.NAME (default: that of config.json, else localhost:<port>)
  --release  end every sandbox and daemon of the node, free what it holds on the host, and exit

Environment: AENV_SLOTS (most VMs at once, default 256), AENV_UID_BASE (default: a range that no other node of the host has), AENV_FORK_LIMIT (most children of one fork, default 16),
             AENV_POOL_MB (memory for virtual machines kept ready; 0: none; default a quarter of the memory, 4096 at most),
             AENV_DISK_RESERVE (MiB of the data folder's disk below which nothing new is made, default 512),
             AENV_ON_STOP (pause, keep: what SIGTERM does to sandboxes; SIGUSR2 always keeps them running for the next server),
             AENV_STOP_DEADLINE (seconds that pausing them may take, default 60),
             AENV_STORE (folder that nodes share, or s3://BUCKET/PREFIX?endpoint=URL, for snapshots that are published),
             AENV_CACHE_MB (bound of the disk cache of layers that are in object stores, default 10240),
             AENV_ACCEL (auto, kvm, tcg), AENV_LOG_LEVEL (info),
AENV_EGRESS_OPEN (private ranges that sandboxes may reach, CIDRs with commas between), AENV_EGRESS_DENY (ranges that no sandbox may reach),
AENV_DNS (addresses of the resolvers that sandboxes ask, commas between; default: those of the host),
AENV_SANDBOX_CONNECTIONS (most connections of each to the internet, default 1024), AENV_SANDBOX_MBIT (most Mbit/s of each, each way; default none).`;

const DEFAULT_PORT = 8000;
const DEFAULT_SLOTS = 256;
const DEFAULT_UID_BASE = 200_000;
const MAX_UID_BASE = 2 ** 31 - 4096;
const DEFAULT_FORK_LIMIT = 16;
const MAX_POOL_MB = 1 << 20;
const DEFAULT_DISK_RESERVE_MIB = 512;
const DEFAULT_STOP_DEADLINE_S = 60;
const DEFAULT_CACHE_MIB = 10_240;

function integer(name: string, text: string | undefined, fallback: number, min: number, max: number): number {
  if (text === undefined || text === "") return fallback;
  const n = Number(text);
  if (!Number.isInteger(n) || n < min || n > max)
    throw new AenvError("INVALID_ARGUMENT", `${name} must be a whole number from ${min} to ${max}, not ${text}`);
  return n;
}

const list = (text = ""): string[] => text.split(",").flatMap((part) => part.trim() || []);

function oneOf<T extends string>(name: string, text: string | undefined, values: readonly [T, ...T[]]): T {
  const found = values.find((v) => v === text);
  if (text === undefined || text === "") return values[0];
  if (found === undefined) throw new AenvError("INVALID_ARGUMENT", `${name} must be one of ${values.join(", ")}`);
  return found;
}

const BYTES_OF_MBIT = 125_000;

function limits(env: NodeJS.ProcessEnv): ServerConfig["limits"] {
  const connections = integer("AENV_SANDBOX_CONNECTIONS", env["AENV_SANDBOX_CONNECTIONS"], 0, 1, 65_535);
  const mbit = integer("AENV_SANDBOX_MBIT", env["AENV_SANDBOX_MBIT"], 0, 1, 1_000_000);
  return {
    ...(connections === 0 ? {} : { connections }),
    ...(mbit === 0 ? {} : { bytesPerSecond: mbit * BYTES_OF_MBIT }),
  };
}

/** From the command line, the environment and `config.json` of the data folder, which is made where it is missing. */
export async function readConfig(argv: readonly string[], env: NodeJS.ProcessEnv): Promise<ServerConfig> {
  const { values } = parseArgs({
    args: [...argv],
    options: {
      home: { type: "string" },
      port: { type: "string" },
      listen: { type: "string" },
      domain: { type: "string" },
      release: { type: "boolean", default: false },
    },
  });
  const home = values.home === undefined ? aenvHome(env) : aenvHome({ ...env, AENV_HOME: values.home });
  const port = integer("--port", values.port, DEFAULT_PORT, 0, 65_535);
  const stored = await ensureNodeConfig(home, {
    port,
    ...(values.listen === undefined ? {} : { listen: values.listen }),
    ...(values.domain === undefined ? {} : { domain: values.domain }),
  });
  const uidText = env["AENV_UID_BASE"] ?? "";
  const uidWanted = uidText === "" ? undefined : integer("AENV_UID_BASE", uidText, 0, 10_000, MAX_UID_BASE);
  return {
    ...stored,
    ...(values.port === undefined ? {} : { port }),
    ...(values.listen === undefined ? {} : { listen: values.listen }),
    // A domain that only follows the port follows this one.
    ...(stored.domain === `localhost:${stored.port}` && values.port !== undefined
      ? { domain: `localhost:${port}` }
      : {}),
    ...(values.domain === undefined ? {} : { domain: values.domain }),
    home,
    release: values.release,
    runRoot: runRoot(stored.instance),
    slots: integer("AENV_SLOTS", env["AENV_SLOTS"], DEFAULT_SLOTS, 1, 4096),
    uidBase: uidWanted ?? DEFAULT_UID_BASE,
    uidWanted,
    forkLimit: integer("AENV_FORK_LIMIT", env["AENV_FORK_LIMIT"], DEFAULT_FORK_LIMIT, 1, MAX_FORKS),
    poolMB:
      (env["AENV_POOL_MB"] ?? "") === "" ? undefined : integer("AENV_POOL_MB", env["AENV_POOL_MB"], 0, 0, MAX_POOL_MB),
    store: env["AENV_STORE"] === "" ? undefined : env["AENV_STORE"],
    cacheMiB: integer("AENV_CACHE_MB", env["AENV_CACHE_MB"], DEFAULT_CACHE_MIB, 16, 2 ** 24),
    diskReserveBytes: mib(integer("AENV_DISK_RESERVE", env["AENV_DISK_RESERVE"], DEFAULT_DISK_RESERVE_MIB, 0, 2 ** 24)),
    egress: { open: list(env["AENV_EGRESS_OPEN"]), deny: list(env["AENV_EGRESS_DENY"]) },
    resolvers: list(env["AENV_DNS"]),
    limits: limits(env),
    stop: {
      sandboxes: oneOf("AENV_ON_STOP", env["AENV_ON_STOP"], ["pause", "keep"]),
      deadlineMs:
        integer("AENV_STOP_DEADLINE", env["AENV_STOP_DEADLINE"], DEFAULT_STOP_DEADLINE_S, 1, 24 * 60 * 60) * 1000,
    },
    accel: oneOf("AENV_ACCEL", env["AENV_ACCEL"], ["auto", "kvm", "tcg"]),
    logLevel: oneOf("AENV_LOG_LEVEL", env["AENV_LOG_LEVEL"], ["info", "debug", "warn", "error"]),
  };
}
