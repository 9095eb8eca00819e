/** What the engine needs of the rooms below it: as little as it uses, so that tests can stand in for each. */
import type { Bytes, LayerId } from "@aenv/base";
import type { GuestClient } from "@aenv/guest";
import type { Network } from "@aenv/network";

export type { GuestInit } from "@aenv/guest";
export type { Slot } from "@aenv/network";

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

/** @aenv/block's BlockdClient. */
export interface BlockdPort {
  ping(signal?: AbortSignal): Promise<{ epoch: string }>;
  createDisk(spec: DiskSpec, signal?: AbortSignal): Promise<void>;
  /** The VM is stopped. The upper becomes the layer at `path`, durable, and a new empty upper is opened on top. */
  sealDisk(disk: string, target: LayerPortRef, signal?: AbortSignal): Promise<{ bytes: number }>;
  /** Other layers beneath a disk that stands on `from`: one that nothing was written to, or layers that read the `same`. */
  restackDisk(
    disk: string,
    from: readonly LayerPortRef[],
    to: readonly LayerPortRef[],
    options?: { same?: boolean; signal?: AbortSignal },
  ): Promise<void>;
  /** One durable layer that reads as these do in their order, bottom first. */
  mergeLayers(layers: readonly LayerPortRef[], target: LayerPortRef, signal?: AbortSignal): Promise<{ bytes: number }>;
  closeDisk(disk: string, options: { deleteUpper: boolean }): Promise<void>;
  /** `layers`: what a disk stands on now, bottom first. */
  listDisks(): Promise<{ disk: string; layers: LayerPortRef[] }[]>;
  importRaw(rawPath: string, target: LayerPortRef, signal?: AbortSignal): Promise<{ bytes: number }>;
}

/** @aenv/host's Cgroups. */
export interface CgroupsPort {
  create(name: string, limits: { memoryBytes?: number; cpuWeight?: number; pids?: number }): Promise<unknown>;
  /** Unknown is fine, as for remove. */
  kill(name: string): Promise<unknown>;
  remove(name: string): Promise<unknown>;
  /** Full names of the groups directly below `parent`. */
  list(parent: string): Promise<string[]>;
}

export type NetworkPort = Pick<Network, "ensure" | "acquire" | "release" | "adopt" | "sweep" | "setPolicy">;
export type GuestPort = Pick<
  GuestClient,
  "health" | "waitReady" | "init" | "trust" | "hooks" | "exec" | "metrics" | "close"
>;

/** One client per VM run: its connections never serve another. */
export type GuestFactory = (target: { host: string; accessToken?: string }) => GuestPort;
