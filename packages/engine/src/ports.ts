/**
 * What the engine needs of the rooms below it, structurally: @aenv/block's BlockdClient, @aenv/network's Network,
 * @aenv/host's Cgroups and @aenv/guest's GuestClient fit as they are. The VMM driver is @aenv/vmm's contract itself.
 */
import type { Bytes, LayerId } from "@aenv/base";

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
