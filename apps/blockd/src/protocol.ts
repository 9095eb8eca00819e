import { AenvError, ERROR_CODES, type ErrorCode } from "@aenv/base";
import type { ExtentMap, LayerRef, SharedFile, SharedRemote, UpperFiles } from "@aenv/block";

/** Messages between the control thread and the disk workers. Typed arrays are over shared memory; file numbers are the process's. */
export interface SharedStack {
  map: ExtentMap;
  files: (SharedFile | SharedRemote)[];
}

export interface OpenDisk {
  disk: string;
  sizeBytes: number;
  durability: "process" | "power";
  stack: SharedStack;
  upper: UpperFiles;
  /** The upper does not have to exist yet. */
  mayCreate: boolean;
  socket: { temp: string; path: string; uid: number; gid: number };
}

export interface SealDisk {
  disk: string;
  target: LayerRef;
  nextUpper: UpperFiles;
}

/** The sealed file, opened for reading, and the index of the stack with it on top. */
export interface Sealed {
  bytes: number;
  extents: number;
  file: SharedFile;
  layerMap: ExtentMap;
  map: ExtentMap;
}

export interface WorkerCalls {
  open: { args: OpenDisk; result: undefined };
  /** Leaves the disk frozen; `thaw` follows once the record is written. */
  seal: { args: SealDisk; result: Sealed };
  thaw: { args: { disk: string }; result: undefined };
  /** Other layers beneath an upper. `written`: also beneath one that something was written to. */
  restack: { args: { disk: string; stack: SharedStack; written: boolean }; result: undefined };
  close: { args: { disk: string }; result: undefined };
  stop: { args: undefined; result: undefined };
}

export type CallName = keyof WorkerCalls;
/** Answers to what a worker asked: pieces of a layer in a store are held until it says `release`. */
export type Loaded = { op: "loaded"; load: number } | { op: "loadFailed"; load: number; error: WireError };

export type ToWorker = Loaded | { [K in CallName]: { id: number; op: K; args: WorkerCalls[K]["args"] } }[CallName];

export interface WireError {
  code: string;
  message: string;
  hint?: string;
  data?: Record<string, unknown>;
}

export type FromWorker =
  | { kind: "done"; id: number; result: unknown }
  | { kind: "failed"; id: number; error: WireError }
  | { kind: "load"; load: number; blob: number; from: number; to: number }
  | { kind: "release"; load: number }
  | { kind: "log"; level: "debug" | "info" | "warn" | "error"; fields: Record<string, unknown>; message: string };

export function fromWire(e: WireError): AenvError {
  const code = Object.hasOwn(ERROR_CODES, e.code) ? (e.code as ErrorCode) : "INTERNAL";
  return new AenvError(code, e.message, {
    ...(e.hint === undefined ? {} : { hint: e.hint }),
    ...(e.data === undefined ? {} : { data: e.data }),
  });
}
