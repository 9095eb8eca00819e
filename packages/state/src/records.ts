/** What the database holds, as its users see it. Times are milliseconds since the epoch. */
import type { Bytes, CheckpointId, LayerId, MemoryId, RunId, SandboxId, SnapshotId, TemplateId } from "@aenv/base";

/** Stored states of a sandbox. `gone` rows stay for a while so that its end can be explained. */
export const SANDBOX_STATES = [
  "creating",
  "running",
  "pausing",
  "paused",
  "resuming",
  "rewinding",
  "killing",
  "gone",
] as const;
export type SandboxState = (typeof SANDBOX_STATES)[number];

export interface TeamRecord {
  id: string;
  name: string;
  createdAt: number;
}

/** The key itself is never stored: only its SHA-256 and a mask to recognise it by. */
export interface ApiKeyRecord {
  id: string;
  team: string;
  name: string;
  /** `e2b_` and the last four characters. */
  mask: string;
  createdAt: number;
  lastUsedAt?: number;
}

export interface MachineRecord {
  vcpus: number;
  memoryBytes: Bytes;
  kernel: string;
  initrd: string;
  cmdline: string;
}

export interface GuestDefaults {
  user: string;
  workdir: string;
  envVars: Record<string, string>;
}

export interface LayerRecord {
  id: LayerId;
  path: string;
  bytes: number;
  createdAt: number;
}

/** A file of guest memory. `bytes`: of data in it; 0 where that is not known. */
export interface MemoryFileRecord {
  id: MemoryId;
  path: string;
  kind: "flat" | "delta";
  bytes: number;
  createdAt: number;
}

/** What a snapshot was taken for. */
export const SNAPSHOT_CAUSES = ["build", "pause", "snapshot", "checkpoint", "fork"] as const;
export type SnapshotCause = (typeof SNAPSHOT_CAUSES)[number];

/** An immutable captured state: what a sandbox is launched from. */
export interface SnapshotRecord {
  id: SnapshotId;
  parent?: SnapshotId;
  cause: SnapshotCause;
  /** Whose state it is; absent for a build. */
  sandbox?: SandboxId;
  machine: MachineRecord;
  /** Where `memory` is empty there is none: a launch is a cold boot of the disk. */
  devicePath: string;
  /** CRC-32 of the device state; absent in those of older versions. */
  deviceCrc?: number;
  /** The flat file that VMMs map, then the deltas on it, oldest first. */
  memory: MemoryFileRecord[];
  diskBytes: Bytes;
  /** Bottom first. */
  layers: LayerRecord[];
  defaults: GuestDefaults;
  envdVersion: string;
  createdAt: number;
}

export interface TemplateRecord {
  id: TemplateId;
  team: string;
  name: string;
  public: boolean;
  snapshot: SnapshotId;
  createdAt: number;
  updatedAt: number;
  lastSpawnedAt?: number;
  spawnCount: number;
  buildCount: number;
}

/** Egress rules as their owner wrote them: @aenv/network says what they mean. */
export interface NetworkRecord {
  allowOut?: string[];
  denyOut?: string[];
  /** By domain. */
  rules?: Record<string, { transform?: { headers?: Record<string, string> } }[]>;
  egressProxy?: { address: string; username?: string | null; password?: string | null };
  /** Of the certificates that the guest gets where there are rules; PEM. */
  authority?: { cert: string; key: string };
}

/** How requests from outside reach a sandbox. */
export interface IngressRecord {
  /** The Host header that its servers see, `${PORT}` in it stands for the port. */
  maskRequestHost?: string;
  /** Ports whose servers speak TLS. */
  httpsPorts?: readonly number[];
}

export interface SandboxRecord {
  id: SandboxId;
  team: string;
  template: TemplateId;
  snapshot: SnapshotId;
  alias?: string;
  state: SandboxState;
  /** The VM incarnation it runs on now. */
  run?: RunId;
  startedAt: number;
  endAt: number;
  metadata: Record<string, string>;
  envVars: Record<string, string>;
  secure: boolean;
  onTimeout: "kill" | "pause";
  /** At its timeout: false keeps the disk only. */
  pauseMemory: boolean;
  autoResume: boolean;
  /** Paused because its node stopped, and nobody else asked for it: traffic wakes it, and its time goes on. */
  interrupted: boolean;
  /** The lifetime that it was made with; traffic that wakes it gives it as much again. */
  timeoutMs: number;
  allowInternetAccess: boolean | null;
  allowPublicTraffic: boolean;
  /** Absent: as it comes. */
  ingress?: IngressRecord;
  /** Absent: no rules. */
  network?: NetworkRecord;
  endedAt?: number;
  /** Why it ended: "killed", "expired", or the cause of its VM's exit. */
  cause?: string;
}

/** A snapshot that a user keeps, and can create sandboxes from as from a template. */
export interface SavedRecord {
  id: TemplateId;
  snapshot: SnapshotId;
  /** Whose state it is. */
  sandbox: SandboxId;
  /** The template that sandbox came from. */
  template: TemplateId;
  team: string;
  createdAt: number;
  lastSpawnedAt?: number;
  spawnCount: number;
  names: { team: string; alias: string; tag: string }[];
}

/** A state in the history of one sandbox to which it can return. */
export interface CheckpointRecord {
  id: CheckpointId;
  sandbox: SandboxId;
  snapshot: SnapshotId;
  name?: string;
  createdAt: number;
}

export type RunPurpose = "sandbox" | "spare" | "build";
export interface RunRecord {
  id: RunId;
  purpose: RunPurpose;
  /** The state that its guest had at its last capture, or else at its launch. */
  snapshot?: SnapshotId;
  /** A cold boot writes its memory through to this file; absent: it maps the flat file of the snapshot privately. */
  memoryFile?: string;
  /** The flat file that its VMM maps. */
  maps?: MemoryId;
  sandbox?: SandboxId;
  /** The driver's versioned handle, once the VMM runs. */
  handle?: object;
  createdAt: number;
}

export const RESOURCE_KINDS = [
  "datadir",
  "rundir",
  "cgroup",
  "slot",
  "disk",
  "process",
  "layer",
  "snapshot",
  "memory",
] as const;
export type ResourceKind = (typeof RESOURCE_KINDS)[number];
/** Written before the resource is made (`intent`) and after (`held`); the row goes when it is released. */
export interface ResourceRecord {
  run: RunId;
  kind: ResourceKind;
  name: string;
  phase: "intent" | "held";
}
