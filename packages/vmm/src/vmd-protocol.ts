import type { ErrorCode, RunId } from "@aenv/base";
import type { ProcIdentity } from "@aenv/host";
import type { ProcExit, SpawnSpec } from "./spawner.ts";

/** What the server sends to vmd: one JSON object per line. `exits` starts the stream of exits on that connection. */
export type VmdRequest = { id: number } & (
  | { op: "ping" }
  | { op: "spawn"; spec: SpawnSpec }
  | { op: "list" }
  | { op: "exits" }
  | { op: "ack"; seq: number; epoch: string }
);

export type VmdMessage =
  | { id: number; ok: unknown }
  | { id: number; error: { code: ErrorCode; message: string } }
  | { exit: ProcExit };

export interface VmdInfo {
  identity: ProcIdentity;
  /** New at every start of vmd; it knows only the processes it started in this epoch. */
  epoch: string;
  children: number;
}

export interface VmdChild {
  run: RunId;
  identity: ProcIdentity;
}
