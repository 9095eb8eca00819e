import { availableParallelism, totalmem } from "node:os";
import { type Bytes, bytes } from "@aenv/base";
import type { Operation } from "./types.ts";

/** Spares of one template: never fewer than `low` while it is hot, never more than `high`. */
export interface Watermarks {
  hot: { low: number; high: number };
  prepared: { low: number; high: number };
}

export interface EngineConfig {
  /** Data folder (AENV_HOME). */
  home: string;
  /** 4 hex digits, see the names table. */
  instance: string;
  /** Three characters of `[a-z0-9]` that every sandbox id of this node begins with. */
  node: string;
  /** Where sockets live; default /run/aenv-<instance>. */
  runRoot: string;
  /** Reported to clients and recorded in snapshots: what the guest's agent can do. */
  envdVersion: string;
  /** Group of every memory file; VMMs get it, nobody else. */
  memoryGid: number;
  maxTimeoutMs: number;
  /** Sandboxes alive at once; more is RATE_LIMITED. */
  maxSandboxes: number;
  /** Children of one fork. */
  maxForks: number;
  /** A guest whose agent has not taken its identity by then has failed. */
  initDeadlineMs: number;
  /** The same for a hot spare, which has answered before: it is given up soon, since another launch can replace it. */
  hotInitDeadlineMs: number;
  /** Launches for callers that run at once; more of them only slow each other down. */
  launchConcurrency: number;
  pool: {
    /** Template names kept warm though nobody used them lately. */
    pinned: readonly string[];
    watermarks: Watermarks;
    /** Overrides by template name. */
    perTemplate: Readonly<Record<string, Watermarks>>;
    /** Of all spares together, by the two estimates below. */
    memoryBudgetBytes: Bytes;
    hotCostBytes: Bytes;
    preparedCostBytes: Bytes;
    /** Spares made at once in the background. */
    refillConcurrency: number;
    /** A template nobody created from for so long loses its spares (pinned ones keep `low`). */
    idleMs: number;
  };
  /** Copied aside of a guest that goes on after its capture; what it wrote beyond that is written while it stands still. */
  captureBufferBytes: Bytes;
  compaction: {
    /** So many deltas of about the same size become one. */
    fan: number;
    /** All flat memory files together; beyond it no more are made of deltas. */
    maxFlatBytes: Bytes;
  };
  /** How long a sandbox runs that was resumed by traffic. */
  trafficTimeoutMs: number;
  /** With less of the data folder's disk left than this, no sandbox, snapshot or template is made. */
  diskReserveBytes: Bytes;
  /** Where snapshots are published, as `openStore` takes it; undefined: nowhere. */
  store: string | undefined;
  /** Sandboxes that the node pauses by itself at once: at the end of their time, and when it stops. */
  pauseConcurrency: number;
  /** Network slots kept ready, so that no launch waits for one. */
  readySlots: number;
  metrics: { intervalMs: number; concurrency: number; keepMs: number; keepRows: number };
  /** What a create, pause, snapshot, ... cost, one call each. */
  onOperation?: (operation: Operation) => void;
}

export type EngineConfigInput = Pick<EngineConfig, "home" | "instance"> & {
  [K in keyof Omit<EngineConfig, "home" | "instance" | "pool" | "metrics" | "compaction">]?: EngineConfig[K];
} & {
  pool?: Partial<EngineConfig["pool"]>;
  compaction?: Partial<EngineConfig["compaction"]>;
  metrics?: Partial<EngineConfig["metrics"]>;
};

/** POST /init takes 0.25 s with a cold translation cache, and 16 children of a fork share two cores; this is for a loaded machine. */
const INIT_DEADLINE_MS = 40_000;
const HOT_INIT_DEADLINE_MS = 3000;
const GIB = 1024 ** 3;
const DAY_MS = 24 * 60 * 60 * 1000;

export function engineConfig(given: EngineConfigInput): EngineConfig {
  const cores = availableParallelism();
  return {
    runRoot: `/run/aenv-${given.instance}`,
    node: "loc",
    envdVersion: "0.6.13",
    memoryGid: 199_999,
    maxTimeoutMs: 30 * DAY_MS,
    maxSandboxes: 1000,
    maxForks: 16,
    initDeadlineMs: INIT_DEADLINE_MS,
    hotInitDeadlineMs: HOT_INIT_DEADLINE_MS,
    captureBufferBytes: bytes(128 * 1024 ** 2),
    trafficTimeoutMs: 5 * 60_000,
    diskReserveBytes: bytes(512 * 1024 ** 2),
    store: undefined,
    pauseConcurrency: 8,
    readySlots: 8,
    launchConcurrency: Math.max(2, cores),
    ...given,
    pool: {
      pinned: ["base"],
      watermarks: { hot: { low: 1, high: 4 }, prepared: { low: 1, high: 2 } },
      // Waiting VMMs of a template also serve resumes, forks and snapshots of its sandboxes.
      perTemplate: { base: { hot: { low: 2, high: 8 }, prepared: { low: 2, high: 16 } } },
      memoryBudgetBytes: bytes(Math.floor(Math.min(totalmem() / 4, 4 * GIB))),
      hotCostBytes: bytes(100 * 1024 ** 2),
      preparedCostBytes: bytes(30 * 1024 ** 2),
      refillConcurrency: Math.max(1, Math.floor(cores / 2)),
      idleMs: 10 * 60_000,
      ...given.pool,
    },
    compaction: { fan: 8, maxFlatBytes: bytes(32 * GIB), ...given.compaction },
    metrics: { intervalMs: 5000, concurrency: 2, keepMs: DAY_MS, keepRows: 200_000, ...given.metrics },
  };
}
