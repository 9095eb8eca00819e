/** What the database holds, as its users see it. Times are milliseconds since the epoch. */
import type { Bytes, LayerId, RunId, SandboxId, SnapshotId, TemplateId } from "@aenv/base";

/** Stored states of a sandbox. `gone` rows stay for a while so that its end can be explained. */
export const SANDBOX_STATES = ["creating", "running", "pausing", "paused", "resuming", "killing", "gone"] as const;
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
  devicePath: string;
  memoryPath: string;
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
  autoResume: boolean;
  allowInternetAccess: boolean | null;
  allowPublicTraffic: boolean;
  /** Absent: no rules. */
  network?: NetworkRecord;
  endedAt?: number;
  /** Why it ended: "killed", "expired", or the cause of its VM's exit. */
  cause?: string;
}

export type RunPurpose = "sandbox" | "spare" | "build";
export interface RunRecord {
  id: RunId;
  purpose: RunPurpose;
  snapshot?: SnapshotId;
  sandbox?: SandboxId;
  /** The driver's versioned handle, once the VMM runs. */
  handle?: object;
  createdAt: number;
}

export const RESOURCE_KINDS = ["datadir", "rundir", "cgroup", "slot", "disk", "process", "layer", "snapshot"] as const;
export type ResourceKind = (typeof RESOURCE_KINDS)[number];
/** Written before the resource is made (`intent`) and after (`held`); the row goes when it is released. */
export interface ResourceRecord {
  run: RunId;
  kind: ResourceKind;
  name: string;
  phase: "intent" | "held";
}
