import type { RunId } from "@aenv/base";
import type { ProcIdentity } from "@aenv/host";

export interface SpawnSpec {
  run: RunId;
  /** argv[0] is an absolute path. */
  argv: string[];
  /** The whole environment. */
  env: Record<string, string>;
  cwd: string;
  uid: number;
  gid: number;
  /** Supplementary groups; none by default. */
  groups?: number[];
  /** Name under /run/netns. */
  netns?: string;
  /** Existing control group, relative to the root of the hierarchy. */
  cgroup?: string;
  /** stderr, appended; stdout too unless it has its own file. Opened by the spawner: `uid` needs no right to it. */
  logPath: string;
  stdoutPath?: string;
  /** RLIMIT_FSIZE: no file the process writes grows beyond; a write past it fails and does not kill. */
  maxFileBytes: number;
}

export interface ProcExit {
  /** Grows within one life of the spawner. */
  seq: number;
  run: RunId;
  identity: ProcIdentity;
  code: number | null;
  signal: NodeJS.Signals | null;
}

/** Starts processes that outlive the server, and tells how they ended. */
export interface Spawner {
  /** The process keeps its pid through every change of namespace and user. */
  spawn(spec: SpawnSpec, signal: AbortSignal): Promise<ProcIdentity>;
  /** Calls `fn` for every exit, those from before the call too, until it was acknowledged. Returns the unsubscription. */
  onExit(fn: (exit: ProcExit) => void): () => void;
  /** This exit was dealt with and may be forgotten. */
  acknowledge(exit: ProcExit): void;
  list(signal: AbortSignal): Promise<{ run: RunId; identity: ProcIdentity }[]>;
  close(): void;
}
