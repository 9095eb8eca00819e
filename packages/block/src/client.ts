import { Agent, request } from "node:http";
import { AenvError, ERROR_CODES, type ErrorCode } from "@aenv/base";
import { z } from "zod";
import {
  type DiskSpec,
  diskSpecSchema,
  errorBodySchema,
  type LayerInfo,
  type LayerRef,
  layerInfoSchema,
  type PingInfo,
  pingSchema,
} from "./control.ts";

/** Our own process answers; more than this is not an answer. */
const MAX_BODY_BYTES = 16 * 1024 * 1024;
/** A call that moves no data takes milliseconds; a blockd that needs longer hangs. */
const CALL_DEADLINE_MS = 20_000;

/** blockd's control client. Every call may throw UNAVAILABLE when blockd is not running or hangs. */
export class BlockdClient {
  readonly #socketPath: string;
  readonly #agent = new Agent({ keepAlive: true, maxSockets: 16 });

  readonly #deadlineMs: number;

  /** `deadlineMs` is for every call but seal and import, which take as long as their data. */
  constructor(socketPath: string, { deadlineMs = CALL_DEADLINE_MS } = {}) {
    this.#socketPath = socketPath;
    this.#deadlineMs = deadlineMs;
  }

  /** `epoch` is new at every start of blockd. */
  ping(signal?: AbortSignal): Promise<PingInfo> {
    return this.#quick("GET", "/ping", undefined, pingSchema, signal);
  }

  /** The socket accepts connections when it returns. The same spec again is fine; another one is CONFLICT. */
  async createDisk(spec: DiskSpec, signal?: AbortSignal): Promise<void> {
    await this.#quick("POST", "/disks", spec, z.unknown(), signal);
  }

  /**
   * Moves the upper to a sealed layer at `target.path` and opens a new empty upper over it. The caller holds the VM
   * stopped or quiesced; requests that come meanwhile wait. Durable, as the disk's durability says, before it answers.
   * The same target again returns the same answer.
   */
  sealDisk(disk: string, target: LayerRef, signal?: AbortSignal): Promise<LayerInfo> {
    return this.#call("POST", `/disks/${encodeURIComponent(disk)}/seal`, target, layerInfoSchema, signal);
  }

  /**
   * Other layers, bottom first, beneath a disk that stands on `from`; CONFLICT where it does not, or something was written
   * to it. With `same` the caller has made sure that both read the same, and what was written stays on top.
   */
  async restackDisk(
    disk: string,
    from: readonly LayerRef[],
    to: readonly LayerRef[],
    { same = false, signal }: { same?: boolean; signal?: AbortSignal } = {},
  ): Promise<void> {
    await this.#quick("PUT", `/disks/${encodeURIComponent(disk)}/layers`, { from, to, same }, z.unknown(), signal);
  }

  /** One durable layer that reads as these do in their order, bottom first. */
  mergeLayers(layers: readonly LayerRef[], target: LayerRef, signal?: AbortSignal): Promise<LayerInfo> {
    return this.#call("POST", "/merge", { layers, target }, layerInfoSchema, signal);
  }

  /** An unknown disk is fine. Clients of it are disconnected. */
  async closeDisk(disk: string, opts: { deleteUpper: boolean }, signal?: AbortSignal): Promise<void> {
    const path = `/disks/${encodeURIComponent(disk)}?deleteUpper=${opts.deleteUpper}`;
    await this.#quick("DELETE", path, undefined, z.unknown(), signal);
  }

  listDisks(signal?: AbortSignal): Promise<DiskSpec[]> {
    return this.#quick("GET", "/disks", undefined, z.array(diskSpecSchema), signal);
  }

  /** Raw image (sparse or not) to a sealed layer that stores no zero blocks. */
  importRaw(rawPath: string, target: LayerRef, signal?: AbortSignal): Promise<LayerInfo> {
    return this.#call("POST", "/import", { rawPath, target }, layerInfoSchema, signal);
  }

  /** Closes idle connections; calls that run still end. */
  close(): void {
    this.#agent.destroy();
  }

  async #quick<T>(method: string, path: string, body: unknown, schema: z.ZodType<T>, signal?: AbortSignal): Promise<T> {
    const deadline = AbortSignal.timeout(this.#deadlineMs);
    try {
      const either = signal === undefined ? deadline : AbortSignal.any([signal, deadline]);
      return await this.#call(method, path, body, schema, either);
    } catch (e) {
      if (!deadline.aborted || signal?.aborted === true) throw e;
      throw new AenvError("UNAVAILABLE", `blockd gave no answer to ${method} ${path} in ${this.#deadlineMs} ms`, {
        cause: e,
        hint: "Its log is log/blockd.log in the data folder; npm run down and npm run up start it anew.",
      });
    }
  }

  async #call<T>(method: string, path: string, body: unknown, schema: z.ZodType<T>, signal?: AbortSignal): Promise<T> {
    const { status, text } = await this.#exchange(method, path, body, signal);
    let json: unknown;
    try {
      json = JSON.parse(text);
    } catch (e) {
      throw new AenvError("INTERNAL", `blockd answered ${status} without JSON`, { cause: e });
    }
    if (status < 300) return schema.parse(json);
    const error = errorBodySchema.safeParse(json);
    if (!error.success || !isCode(error.data.code))
      throw new AenvError("INTERNAL", `blockd answered ${status}: ${text}`);
    const { code, message, hint, data } = error.data;
    throw new AenvError(code, message, {
      ...(hint === undefined ? {} : { hint }),
      ...(data === undefined ? {} : { data }),
    });
  }

  #exchange(
    method: string,
    path: string,
    body: unknown,
    signal?: AbortSignal,
  ): Promise<{ status: number; text: string }> {
    return new Promise((resolve, reject) => {
      const payload = body === undefined ? undefined : JSON.stringify(body);
      const req = request({
        socketPath: this.#socketPath,
        agent: this.#agent,
        method,
        path,
        headers:
          payload === undefined
            ? {}
            : { "content-type": "application/json", "content-length": Buffer.byteLength(payload) },
        ...(signal === undefined ? {} : { signal }),
      });
      const fail = (e: unknown): void => {
        if (signal?.aborted) reject(AenvError.from(signal.reason, `blockd ${method} ${path}`));
        else {
          reject(
            new AenvError("UNAVAILABLE", `blockd does not answer at ${this.#socketPath}`, {
              cause: e,
              hint: "Start the node with npm run up; its log is log/blockd.log in the data folder.",
            }),
          );
        }
      };
      req.on("error", fail);
      req.on("response", (res) => {
        const chunks: Buffer[] = [];
        let size = 0;
        res.on("data", (chunk: Buffer) => {
          size += chunk.length;
          if (size > MAX_BODY_BYTES) res.destroy(new Error("answer too long"));
          else chunks.push(chunk);
        });
        res.on("error", fail);
        res.on("end", () => resolve({ status: res.statusCode ?? 500, text: Buffer.concat(chunks).toString() }));
      });
      req.end(payload);
    });
  }
}

function isCode(code: string): code is ErrorCode {
  return Object.hasOwn(ERROR_CODES, code);
}
