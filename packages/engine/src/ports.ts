/**
 * What the engine needs of the rooms below it, structurally: @aenv/block's BlockdClient, a @aenv/vmm driver,
 * @aenv/network's Network, @aenv/host's Cgroups and @aenv/guest's GuestClient fit as they are.
 */
import type { Bytes, LayerId, RunId } from "@aenv/base";
import type { ProcIdentity } from "@aenv/host";

export interface LayerPortRef {
  id: LayerId;
  path: string;
}

export interface DiskSpec {
  /** The run id. */
  disk: string;
  /** Bottom first. */
  layers: LayerPortRef[];
  sizeBytes: Bytes;
  /** Made by blockd; holds the writable upper. */
  upperDir: string;
  socketPath: string;
  socketUid: number;
  socketGid: number;
}

export interface BlockdPort {
  ping(signal?: AbortSignal): Promise<{ epoch: string }>;
  createDisk(spec: DiskSpec, signal?: AbortSignal): Promise<void>;
  /** The VM is stopped. The upper becomes the layer at `path`, durable, and a new empty upper is opened on top. */
  sealDisk(disk: string, target: LayerPortRef, signal?: AbortSignal): Promise<{ bytes: number }>;
  closeDisk(disk: string, options: { deleteUpper: boolean }): Promise<void>;
  listDisks(): Promise<{ disk: string; upperDir: string }[]>;
  importRaw(rawPath: string, target: LayerPortRef): Promise<{ bytes: number }>;
}

export interface Machine {
  vcpus: number;
  memoryBytes: Bytes;
  kernel: string;
  initrd: string;
  cmdline: string;
}

export interface VmSpec {
  run: RunId;
  machine: Machine;
  runDir: string;
  uid: number;
  gid: number;
  cgroup: string;
  netns: string;
  tap: string;
  mac: string;
  diskSocket: string;
  memory: { file: string; mode: "create" | "map" };
  consoleLog: string;
}

export interface VmExit {
  cause: string;
  detail: string;
}

export interface GuestMapping {
  pid: number;
  hostAddress: bigint;
  guestOffset: number;
  length: number;
}

export interface VmPort {
  /** Versioned JSON; only the driver looks inside. */
  readonly handle: object;
  readonly identity: ProcIdentity;
  readonly exited: Promise<VmExit>;
  /** Leaves the VM stopped. */
  load(deviceState: string, signal: AbortSignal): Promise<void>;
  resume(signal: AbortSignal): Promise<void>;
  stop(signal: AbortSignal): Promise<void>;
  saveDeviceState(path: string, signal: AbortSignal): Promise<void>;
  mappings(signal: AbortSignal): Promise<GuestMapping[]>;
  /** Idempotent; resolves when the process is gone. */
  kill(): Promise<void>;
  detach(): void;
}

export interface DriverPort {
  readonly name: string;
  boot(spec: VmSpec, signal: AbortSignal): Promise<VmPort>;
  prepare(spec: VmSpec, signal: AbortSignal): Promise<VmPort>;
  /** NOT_FOUND when the process is gone. */
  adopt(handle: object, signal: AbortSignal): Promise<VmPort>;
}

export interface SlotPort {
  index: number;
  netns: string;
  tap: string;
  hostIp: string;
  uid: number;
  gid: number;
}

export interface NetworkPort {
  ensure(count: number, signal: AbortSignal): Promise<void>;
  acquire(signal: AbortSignal): Promise<SlotPort>;
  release(slot: SlotPort): Promise<void>;
  adopt(indexes: number[]): SlotPort[];
  sweep(): Promise<object>;
}

export interface CgroupsPort {
  create(name: string, limits: { memoryBytes?: number; cpuWeight?: number; pids?: number }): Promise<unknown>;
  kill(name: string): Promise<unknown>;
  remove(name: string): Promise<unknown>;
  list(): Promise<string[]>;
}

export interface GuestInit {
  envVars: Record<string, string>;
  accessToken: string;
  /** RFC 3339 with nanoseconds. */
  timestamp: string;
  defaultUser: string;
  defaultWorkdir: string;
  sandboxId: string;
  templateId: string;
  hostname: string;
  /** 32 hex digits. */
  machineId: string;
  /** base64 of 64 random bytes of the host. */
  entropy: string;
  /** The run id. */
  lifecycleID: string;
  cause: "create" | "resume" | "fork" | "boot";
}

export interface GuestMetrics {
  cpuCount: number;
  cpuUsedPct: number;
  memUsed: number;
  memTotal: number;
  memCache: number;
  diskUsed: number;
  diskTotal: number;
}

export interface GuestPort {
  health(signal: AbortSignal): Promise<boolean>;
  waitReady(signal: AbortSignal): Promise<void>;
  init(body: GuestInit, signal: AbortSignal): Promise<void>;
  exec(
    spec: { cmd: string; args: string[]; user?: string; timeoutMs?: number },
    signal: AbortSignal,
  ): Promise<{ exitCode: number; stdout: string; stderr: string }>;
  metrics(signal: AbortSignal): Promise<GuestMetrics>;
  close(): void;
}

/** One client per VM run: its connections never serve another. */
export type GuestFactory = (target: { host: string; accessToken?: string }) => GuestPort;
