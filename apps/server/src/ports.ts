import type { DoctorReport, NodeInfo, Operation, Timing } from "@aenv/contract";
import type { Engine, Exchange } from "@aenv/engine";

/** What the handlers need of the engine; the real one fits as it is. */
export type EngineApi = Pick<
  Engine,
  | "templates"
  | "create"
  | "get"
  | "list"
  | "kill"
  | "setTimeout"
  | "setNetwork"
  | "extend"
  | "connect"
  | "pause"
  | "fork"
  | "snapshot"
  | "listSnapshots"
  | "deleteSnapshot"
  | "checkpoint"
  | "listCheckpoints"
  | "rewind"
  | "lineage"
  | "count"
  | "metrics"
  | "latestMetrics"
  | "logs"
  | "logPage"
  | "pools"
> & { readonly exchange: ExchangeApi };

export type ExchangeApi = Pick<
  Exchange,
  | "publish"
  | "fetch"
  | "transfers"
  | "transfer"
  | "published"
  | "unpublish"
  | "collect"
  | "exportArchive"
  | "importArchive"
>;

/** Options of a create that change what a sandbox is: a node that lacks one refuses it instead of ignoring it. */
export interface Features {
  pause: boolean;
  /** `allow_internet_access: false`. */
  internetOff: boolean;
  /** `network.allowOut`, `network.denyOut` and their update. */
  egressRules: boolean;
  /** `network.allowPublicTraffic: false`. */
  privateTraffic: boolean;
}

/** Facts about this node that are not the engine's. */
export interface NodeApi {
  readonly version: string;
  readonly instance: string;
  /** Read anew each time: with port 0 it is known only once the server listens. */
  readonly domain: string;
  readonly features: Features;
  /** Most children of one fork. */
  readonly forkLimit: number;
  facts(): NodeFacts;
  timings(): Timing[];
  /** The latest ones, oldest first, from the one after `after` on. */
  operations(after: number): Operation[];
  doctor(signal: AbortSignal): Promise<DoctorReport>;
}

export interface NodeFacts {
  vmm: string;
  vmmVersion: string;
  accel: string;
  accelReason: string;
  envdVersion: string;
  base: NodeInfo["base"];
  /** PEM. */
  certificateAuthority?: string;
}
