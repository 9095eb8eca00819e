/** What the engine shows to the API, the edge and the tools. Times are milliseconds since the epoch. */
import type { AenvError, Bytes, LayerId, RunId, SandboxId, SnapshotId, TemplateId } from "@aenv/base";
import type { ProxyRule, TransformRule } from "@aenv/network";
import type { RunPurpose, SandboxState, SnapshotCause } from "@aenv/state";
import type { Machine } from "@aenv/vmm";

/** `gone` is never shown: a sandbox that ended is NOT_FOUND. */
export type VisibleState = Exclude<SandboxState, "gone">;

export interface Lifecycle {
  onTimeout: "kill" | "pause";
  autoResume: boolean;
}

export interface SandboxView {
  sandboxId: SandboxId;
  templateId: TemplateId;
  /** The template's name. */
  alias?: string;
  name?: string;
  state: VisibleState;
  startedAt: number;
  endAt: number;
  cpuCount: number;
  memoryMB: number;
  diskSizeMB: number;
  metadata: Record<string, string>;
  envdVersion: string;
  /** Absent where the sandbox was created with `secure: false`. */
  envdAccessToken?: string;
  /** Present only where public traffic is off: the edge then asks for it. */
  trafficAccessToken?: string;
  lifecycle: Lifecycle;
  /** null: the caller said nothing, which means allowed. */
  allowInternetAccess: boolean | null;
  /** Its egress rules as they were given. */
  network: NetworkRules;
  ingress?: Ingress;
}

/** How requests from outside reach a sandbox. */
export interface Ingress {
  /** The Host header that its servers see; `${PORT}` in it stands for the port. */
  maskRequestHost?: string;
  /** Ports whose servers speak TLS. */
  httpsPorts?: readonly number[];
}

/** IPv4 addresses, CIDRs and, in `allowOut`, domains; `allowOut` wins. */
export interface NetworkRules {
  allowOut?: readonly string[];
  denyOut?: readonly string[];
  /** SOCKS5: everything over TCP goes through it, and nothing else leaves. */
  egressProxy?: ProxyRule | null;
  /** By domain: headers that requests over HTTPS get. */
  rules?: Readonly<Record<string, readonly TransformRule[]>> | null;
}

/** All that decides what a sandbox may reach. */
export interface EgressOptions extends NetworkRules {
  allowInternetAccess?: boolean | null;
}

export interface CreateOptions {
  /** Template id, name, alias, `team/alias`, `alias:tag` or snapshot id. */
  template: string;
  team?: string;
  timeoutMs: number;
  metadata?: Record<string, string>;
  envVars?: Record<string, string>;
  secure?: boolean;
  autoPause?: boolean;
  autoPauseMemory?: boolean;
  autoResume?: boolean;
  /** The same key with the same options gives the same answer; with other options CONFLICT. */
  idempotencyKey?: string;
  allowInternetAccess?: boolean | null;
  network?: NetworkRules;
  /** false: the edge asks for the traffic token. */
  allowPublicTraffic?: boolean;
  ingress?: Ingress;
}

export interface ListFilter {
  team?: string;
  /** Every pair must match. */
  metadata?: Record<string, string>;
  states?: readonly VisibleState[];
  /** Inclusive. */
  startedAfter?: number;
  /** Id or name; unknown means an empty list. */
  template?: string;
  /** Default desc: newest first. */
  order?: "asc" | "desc";
  /** 1..100, default 100. */
  limit?: number;
  /** `next` of the page before. */
  cursor?: string;
}

export interface Page<T> {
  items: T[];
  /** Absent on the last page. */
  next?: string;
  /** Running sandboxes that match the filter but for its state, page and limit. */
  totalRunning: number;
}

/** Where the edge finds the VM that runs a sandbox now. */
export interface Route {
  run: RunId;
  host: string;
  accessToken?: string;
  trafficToken?: string;
  ingress?: Ingress;
}

export interface MetricSample {
  timestamp: number;
  cpuCount: number;
  cpuUsedPct: number;
  memUsed: number;
  memTotal: number;
  memCache: number;
  diskUsed: number;
  diskTotal: number;
}

export interface LogEntry {
  timestamp: number;
  level: "debug" | "info" | "warn" | "error";
  message: string;
  fields: Record<string, unknown>;
}

export interface TemplateView {
  templateId: TemplateId;
  name: string;
  aliases: string[];
  snapshotId: SnapshotId;
  team: string;
  public: boolean;
  cpuCount: number;
  memoryMB: number;
  diskSizeMB: number;
  envdVersion: string;
  createdAt: number;
  updatedAt: number;
  lastSpawnedAt?: number;
  spawnCount: number;
  buildCount: number;
}

/** A sealed disk layer: the same shape as blockd's. */
export interface LayerFile {
  id: LayerId;
  path: string;
}

export interface BuildTemplateOptions {
  name: string;
  team?: string;
  baseLayer: LayerFile;
  sizeBytes: Bytes;
  machine: Machine;
  /** Commands run before the capture so that what they touch is in the page cache; one that fails fails the build. */
  prime?: readonly (readonly string[])[];
  /** Default user and working directory of its sandboxes. */
  defaultUser?: string;
  defaultWorkdir?: string;
  envVars?: Record<string, string>;
  /** One line per step for a progress display. */
  onStep?: (step: string) => void;
}

/** How a create got its VM: an idle running spare, a waiting VMM, or everything made for it. */
export type LaunchSource = "hot" | "prepared" | "cold";

/** What one operation on a sandbox cost. */
export interface Operation {
  /** child: one of a fork, whose own entry has the whole. */
  op: "create" | "child" | "resume" | "rewind" | "pause" | "snapshot" | "fork";
  /** The one that came to be, or whose state was taken. */
  sandboxId: SandboxId;
  /** Of launches. */
  source?: LaunchSource;
  /** On the node's monotonic clock, milliseconds. */
  startedAt: number;
  totalMs: number;
  /** Milliseconds by phase, in the order in which they ended; phases may overlap. */
  phases: Record<string, number>;
  /** Milliseconds from the start to turning points: `stop` and `go` of a guest that is captured, `running` of one launched. */
  marks: Record<string, number>;
  /** Bytes: `dirty` looked at, `stored` kept, `injected` written into a VMM. */
  counts: Record<string, number>;
}

/** One host resource and who it is for; `aenv doctor` compares this with what the host has. */
export interface OwnedResource {
  kind: ResourceName;
  /** Host-global name: pid, path, netns, cgroup, disk. */
  name: string;
  run: RunId;
  owner: Owner;
}
export type ResourceName = "process" | "slot" | "disk" | "cgroup" | "rundir" | "datadir";

/** Who a VM run is for. `id`: sandbox id; snapshot id of a spare or a build. */
export interface Owner {
  kind: RunPurpose;
  id: string;
}

export interface PoolStatus {
  snapshotId: SnapshotId;
  template?: string;
  hot: number;
  prepared: number;
  refilling: number;
  wantHot: number;
  wantPrepared: number;
  /** Why the last attempt to make a spare failed; absent after one that did not. */
  lastError?: AenvError;
}

export interface PauseOptions {
  /** false: only the disk is kept, and the next resume is a cold boot. Default true. */
  memory?: boolean;
  /** true: UNAVAILABLE where the guest's agent does not answer, and the sandbox goes on. Default false. */
  requireHealthyGuest?: boolean;
}

export interface ResumeOptions {
  /** false: the memory that was kept is ignored and the disk is booted. Default true. */
  memory?: boolean;
  /** What happens at the end of its time from now on; absent: as before. */
  autoPause?: boolean;
}

export interface SnapshotOptions {
  /** `alias`, `alias:tag` or `team/alias:tag`; the same name again replaces what it stands for. */
  name?: string;
  team?: string;
  /** false: only the disk is kept; a sandbox made from it boots. Default true. */
  memory?: boolean;
}

/** A state of a sandbox that is kept and can be created from. */
export interface SnapshotView {
  /** Its name as `team/alias:tag`, else `<templateId>:default`; accepted as `template` of a create. */
  snapshotId: string;
  templateId: TemplateId;
  /** Empty where it has none, else `team/alias:tag`. */
  names: string[];
  /** Whose state it is. */
  sandboxId: SandboxId;
  team: string;
  cpuCount: number;
  memoryMB: number;
  diskSizeMB: number;
  createdAt: number;
}

export interface SnapshotFilter {
  team?: string;
  sandboxId?: SandboxId;
  /** A name or id, with or without team and tag; unknown means an empty list. */
  name?: string;
  /** 1..100, default 100. */
  limit?: number;
  cursor?: string;
}

export interface ForkOptions {
  /** 1..`maxForks` of the engine's configuration. */
  count: number;
  timeoutMs: number;
  /** All or none: where one child fails the others are killed and each result is an error. */
  atomic?: boolean;
}

/** One child, or why there is none. */
export type ForkResult = { view: SandboxView } | { error: AenvError };

/** A state of one sandbox to which that sandbox can return; it ends with its sandbox. */
export interface CheckpointView {
  checkpointId: string;
  sandboxId: SandboxId;
  name?: string;
  createdAt: number;
  /** Memory and disk that only this checkpoint holds. */
  ownBytes: number;
}

export interface CheckpointOptions {
  /** Unique in the sandbox; the same name again stands for the new one, the old one stays without a name. */
  name?: string;
}

export interface RewindOptions {
  /** The end becomes now + this unless that is earlier; absent: unchanged, and of a paused sandbox as for traffic. */
  timeoutMs?: number;
}

/** Bytes on this node. */
export interface LineageSize {
  /** In files that no other state has. */
  ownBytes: number;
  /** What it needs and other states hold too. */
  sharedBytes: number;
}

/** One captured state. */
export interface LineageNode {
  snapshotId: SnapshotId;
  /** Absent at the root. */
  parent?: SnapshotId;
  cause: SnapshotCause;
  /** Whose state it is; absent for a template's build. */
  sandboxId?: SandboxId;
  /** Of the template, snapshots and checkpoints that keep it. */
  names: string[];
  createdAt: number;
  memory: LineageSize;
  disk: LineageSize;
}

/** From the template's state down: what a sandbox stands on, what was captured from it, and the same of its forks. */
export interface Lineage {
  sandboxId: SandboxId;
  /** The state it went on from last. */
  snapshotId: SnapshotId;
  /** Each after its parent. */
  nodes: LineageNode[];
  /** Which sandboxes that are alive went on from which state. */
  sandboxes: { sandboxId: SandboxId; snapshotId: SnapshotId; state: VisibleState }[];
}
