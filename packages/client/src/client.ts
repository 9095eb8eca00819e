import { randomUUID } from "node:crypto";
import { AenvError } from "@aenv/base";
import type {
  BodyIn,
  Checkpoint,
  DoctorReport,
  Lineage,
  ListedSandbox,
  NodeInfo,
  Operation,
  PathParams,
  QueryIn,
  RouteId,
  RouteOf,
  Sandbox,
  SandboxDetail,
  SandboxForkResult,
  SandboxLogEntry,
  SandboxLogs,
  SandboxMetric,
  SnapshotInfo,
  Template,
  TemplateWithBuilds,
} from "@aenv/contract";
import { errorOf, HttpClient, type Reply } from "./http.ts";
import { StoreClient } from "./store.ts";

export interface ClientOptions {
  apiUrl: string;
  apiKey?: string | undefined;
  userAgent?: string;
  /** For one call, retries included. */
  timeoutMs?: number;
}

export interface ListFilter {
  state?: ("running" | "paused")[] | undefined;
  metadata?: Record<string, string> | undefined;
  template?: string | undefined;
  order?: "asc" | "desc" | undefined;
  /** Records of one page. */
  pageSize?: number | undefined;
}

export interface SnapshotFilter {
  /** Only those of this sandbox. */
  sandboxID?: string | undefined;
  /** A name or id, with or without a tag. */
  name?: string | undefined;
  pageSize?: number | undefined;
}

interface Health {
  status: string;
  version: string;
}

const DEFAULT_TIMEOUT_MS = 60_000;

/** Method and path of a route, so that a call names both and the compiler compares them with the contract. */
type At<I extends RouteId> = `${RouteOf<I>["method"]} ${RouteOf<I>["path"]}`;
interface Call<I extends RouteId> {
  params?: PathParams<RouteOf<I>>;
  query?: { [K in keyof QueryIn<RouteOf<I>>]?: QueryIn<RouteOf<I>>[K] | undefined };
  body?: BodyIn<RouteOf<I>>;
  headers?: Record<string, string>;
  repeatable?: boolean;
}

/** The control API of one node. Close it (or `using`) when done: it holds keep-alive connections. */
export class AenvClient implements Disposable {
  readonly #http: HttpClient;
  readonly apiUrl: string;
  readonly store: StoreClient;

  constructor(options: ClientOptions) {
    this.#http = new HttpClient(
      options.apiUrl,
      {
        "user-agent": options.userAgent ?? "aenv-client",
        ...(options.apiKey === undefined ? {} : { "x-api-key": options.apiKey }),
      },
      options.timeoutMs ?? DEFAULT_TIMEOUT_MS,
    );
    this.apiUrl = this.#http.base;
    this.store = new StoreClient(this.#http);
  }

  /** Creates once, however often the request has to be sent. */
  async create(body: BodyIn<RouteOf<"createSandboxV2">>, signal?: AbortSignal): Promise<Sandbox> {
    const headers = { "idempotency-key": randomUUID() };
    const call = { body, headers, repeatable: true };
    return record<Sandbox>(await this.#call<"createSandboxV2">("POST /v2/sandboxes", call, signal), "sandboxID");
  }

  /** Every page of the list, newest first unless the filter says otherwise. */
  async *list(filter: ListFilter = {}, signal?: AbortSignal): AsyncGenerator<ListedSandbox> {
    const { metadata, pageSize, ...rest } = filter;
    const filters = { ...rest, limit: pageSize, metadata: metadata && metadataQuery(metadata) };
    yield* pages<ListedSandbox>(async (nextToken) => {
      const call = { query: { ...filters, nextToken } };
      return await this.#call<"listSandboxesV2">("GET /v2/sandboxes", call, signal);
    });
  }

  async get(sandboxID: string, signal?: AbortSignal): Promise<SandboxDetail> {
    const reply = await this.#call<"getSandbox">("GET /sandboxes/{sandboxID}", { params: { sandboxID } }, signal);
    return record<SandboxDetail>(reply, "sandboxID");
  }

  /**
   * Makes the sandbox usable (resumes a paused one) and its end no earlier than `timeout` seconds from now.
   * `memory` false: a paused one boots from its disk.
   */
  async connect(
    sandboxID: string,
    timeout: number,
    signal?: AbortSignal,
    options: { memory?: boolean | undefined } = {},
  ): Promise<{ sandbox: Sandbox; resumed: boolean }> {
    const call = { params: { sandboxID }, body: { timeout, ...options } };
    const reply = await this.#call<"connectSandboxV2">("POST /v2/sandboxes/{sandboxID}/connect", call, signal);
    return { sandbox: record<Sandbox>(reply, "sandboxID"), resumed: reply.status === 201 };
  }

  /** False when it was paused already. `memory` false keeps the disk only: the next resume boots. */
  async pause(
    sandboxID: string,
    options: { memory?: boolean | undefined } = {},
    signal?: AbortSignal,
  ): Promise<boolean> {
    try {
      const call = { params: { sandboxID }, body: options, repeatable: true };
      await this.#call<"pauseSandbox">("POST /sandboxes/{sandboxID}/pause", call, signal);
      return true;
    } catch (e) {
      if (e instanceof AenvError && e.code === "CONFLICT") return false;
      throw e;
    }
  }

  /** Replaces what it may reach as a whole; what is left out is cleared. */
  async setNetwork(
    sandboxID: string,
    rules: BodyIn<RouteOf<"setSandboxNetwork">>,
    signal?: AbortSignal,
  ): Promise<void> {
    const call = { params: { sandboxID }, body: rules, repeatable: true };
    await this.#call<"setSandboxNetwork">("PUT /sandboxes/{sandboxID}/network", call, signal);
  }

  /** One result per child, in order: its sandbox, or why there is none. The source goes on. */
  async fork(
    sandboxID: string,
    options: { count?: number | undefined; timeout?: number | undefined; atomic?: boolean | undefined } = {},
    signal?: AbortSignal,
  ): Promise<({ sandbox: Sandbox } | { error: AenvError })[]> {
    const call = { params: { sandboxID }, body: options };
    const reply = await this.#call<"forkSandbox">("POST /sandboxes/{sandboxID}/fork", call, signal);
    return records<SandboxForkResult>(reply.body).map((r) => {
      if (r.sandbox) return { sandbox: r.sandbox };
      return { error: errorOf({ status: r.error?.code ?? 500, body: r.error }, "One child of the fork") };
    });
  }

  /** Keeps its state to create from, under `name`, `name:tag` or none. The sandbox goes on. */
  async snapshot(
    sandboxID: string,
    options: { name?: string | undefined } = {},
    signal?: AbortSignal,
  ): Promise<SnapshotInfo> {
    const call = { params: { sandboxID }, body: options };
    const reply = await this.#call<"createSnapshot">("POST /sandboxes/{sandboxID}/snapshots", call, signal);
    return record<SnapshotInfo>(reply, "snapshotID");
  }

  /** Every page, newest first. */
  async *snapshots(filter: SnapshotFilter = {}, signal?: AbortSignal): AsyncGenerator<SnapshotInfo> {
    const { pageSize, ...rest } = filter;
    yield* pages<SnapshotInfo>(async (nextToken) => {
      const call = { query: { ...rest, limit: pageSize, nextToken } };
      return await this.#call<"listSnapshots">("GET /snapshots", call, signal);
    });
  }

  /** By id or name. False when there is none. */
  async deleteSnapshot(idOrName: string, signal?: AbortSignal): Promise<boolean> {
    return await this.#delete(async () => {
      const call = { params: { templateID: idOrName }, repeatable: true };
      await this.#call<"deleteTemplate">("DELETE /templates/{templateID}", call, signal);
    });
  }

  /** Keeps its state to rewind to. The sandbox goes on. */
  async checkpoint(
    sandboxID: string,
    options: { name?: string | undefined } = {},
    signal?: AbortSignal,
  ): Promise<Checkpoint> {
    const call = { params: { sandboxID }, body: options };
    const reply = await this.#call<"createCheckpoint">("POST /sandboxes/{sandboxID}/checkpoints", call, signal);
    return record<Checkpoint>(reply, "checkpointID");
  }

  /** Oldest first. */
  async checkpoints(sandboxID: string, signal?: AbortSignal): Promise<Checkpoint[]> {
    const call = { params: { sandboxID } };
    return records((await this.#call<"listCheckpoints">("GET /sandboxes/{sandboxID}/checkpoints", call, signal)).body);
  }

  /** Takes the sandbox back in place, to a checkpoint by id or name; `timeout` (seconds) extends its life. */
  async rewind(
    sandboxID: string,
    checkpoint: string,
    options: { timeout?: number | undefined } = {},
    signal?: AbortSignal,
  ): Promise<Sandbox> {
    const call = { params: { sandboxID }, body: { checkpoint, ...options } };
    const reply = await this.#call<"rewindSandbox">("POST /sandboxes/{sandboxID}/rewind", call, signal);
    return record<Sandbox>(reply, "sandboxID");
  }

  /** The states that the sandbox stands on and those captured from it and from its forks. */
  async lineage(sandboxID: string, signal?: AbortSignal): Promise<Lineage> {
    const call = { params: { sandboxID } };
    return record<Lineage>(
      await this.#call<"sandboxLineage">("GET /sandboxes/{sandboxID}/lineage", call, signal),
      "nodes",
    );
  }

  /** Ends it `timeout` seconds from now, earlier or later than before. */
  async setTimeout(sandboxID: string, timeout: number, signal?: AbortSignal): Promise<void> {
    const call = { params: { sandboxID }, body: { timeout } };
    await this.#call<"setSandboxTimeout">("POST /sandboxes/{sandboxID}/timeout", call, signal);
  }

  /** Ends it no earlier than `duration` seconds from now. */
  async extend(sandboxID: string, duration: number, signal?: AbortSignal): Promise<void> {
    const call = { params: { sandboxID }, body: { duration } };
    await this.#call<"refreshSandbox">("POST /sandboxes/{sandboxID}/refreshes", call, signal);
  }

  /** False when there is no such sandbox. */
  async kill(sandboxID: string, signal?: AbortSignal): Promise<boolean> {
    return await this.#delete(async () => {
      const call = { params: { sandboxID }, repeatable: true };
      await this.#call<"killSandbox">("DELETE /sandboxes/{sandboxID}", call, signal);
    });
  }

  /** False: there was nothing to delete. */
  async #delete(send: () => Promise<void>): Promise<boolean> {
    try {
      await send();
      return true;
    } catch (e) {
      if (e instanceof AenvError && e.code === "NOT_FOUND") return false;
      throw e;
    }
  }

  /** Samples between two Unix times in seconds, oldest first; without them, all that the node keeps. */
  async metrics(
    sandboxID: string,
    range: { start?: number; end?: number } = {},
    signal?: AbortSignal,
  ): Promise<SandboxMetric[]> {
    const call = { params: { sandboxID }, query: range };
    return records((await this.#call<"sandboxMetrics">("GET /sandboxes/{sandboxID}/metrics", call, signal)).body);
  }

  /** Entries from `start` (Unix milliseconds) on, oldest first. */
  async logs(
    sandboxID: string,
    range: { start?: number | undefined; limit?: number | undefined } = {},
    signal?: AbortSignal,
  ): Promise<SandboxLogEntry[]> {
    const call = { params: { sandboxID }, query: range };
    const reply = await this.#call<"sandboxLogs">("GET /sandboxes/{sandboxID}/logs", call, signal);
    return records(record<SandboxLogs>(reply, "logEntries").logEntries);
  }

  async templates(signal?: AbortSignal): Promise<Template[]> {
    return records((await this.#call<"listTemplates">("GET /templates", {}, signal)).body);
  }

  /** By id or name. */
  async template(nameOrId: string, signal?: AbortSignal): Promise<TemplateWithBuilds> {
    const templateID = await this.#templateId(nameOrId, signal);
    const reply = await this.#call<"getTemplate">("GET /templates/{templateID}", { params: { templateID } }, signal);
    return record<TemplateWithBuilds>(reply, "templateID");
  }

  /** By id or name. */
  async deleteTemplate(nameOrId: string, signal?: AbortSignal): Promise<void> {
    const templateID = await this.#templateId(nameOrId, signal);
    await this.#call<"deleteTemplate">("DELETE /templates/{templateID}", { params: { templateID } }, signal);
  }

  async #templateId(nameOrId: string, signal?: AbortSignal): Promise<string> {
    if (/^t[a-z0-9]{16}$/.test(nameOrId)) return nameOrId;
    try {
      const call = { params: { alias: nameOrId } };
      const reply = await this.#call<"resolveTemplateAlias">("GET /templates/aliases/{alias}", call, signal);
      return record<{ templateID: string }>(reply, "templateID").templateID;
    } catch (e) {
      if (e instanceof AenvError && e.code === "NOT_FOUND") return nameOrId;
      throw e;
    }
  }

  /** Answers without a key, and while the node only just takes requests. */
  async health(signal?: AbortSignal): Promise<Health> {
    return record<Health>(await this.#call<"health">("GET /health", {}, signal), "version");
  }

  async node(signal?: AbortSignal): Promise<NodeInfo> {
    return record<NodeInfo>(await this.#call<"node">("GET /v1/node", {}, signal), "version");
  }

  /** What the node's latest operations cost, oldest first, from the one after `after` on. */
  async operations(after: number, signal?: AbortSignal): Promise<Operation[]> {
    const reply = await this.#call<"operations">("GET /v1/node/operations", { query: { after } }, signal);
    return record<{ operations: Operation[] }>(reply, "operations").operations;
  }

  async doctor(signal?: AbortSignal): Promise<DoctorReport> {
    return record<DoctorReport>(await this.#call<"doctor">("GET /v1/doctor", {}, signal), "resources");
  }

  #call<I extends RouteId>(at: At<I>, call: Call<I>, signal: AbortSignal | undefined): Promise<Reply> {
    const [method = "", pattern = ""] = at.split(" ");
    const params: Record<string, string> = call.params ?? {};
    const path = pattern.replace(/\{(\w+)\}/g, (_, name: string) => encodeURIComponent(params[name] ?? ""));
    return this.#http.call(method, path, { ...call, signal } as never);
  }

  [Symbol.dispose](): void {
    this.#http[Symbol.dispose]();
  }
}

/** A server that gives the same page again is not asked any more. */
async function* pages<T>(page: (nextToken: string | undefined) => Promise<Reply>): AsyncGenerator<T> {
  let nextToken: string | undefined;
  do {
    const reply = await page(nextToken);
    yield* records<T>(reply.body);
    const next = reply.headers["x-next-token"];
    nextToken = typeof next === "string" && next !== "" && next !== nextToken ? next : undefined;
  } while (nextToken !== undefined);
}

/** Keys and values are percent-encoded once before the form is made: the server decodes them twice. */
function metadataQuery(metadata: Record<string, string>): string {
  const form = new URLSearchParams();
  for (const [k, v] of Object.entries(metadata)) form.set(encodeURIComponent(k), encodeURIComponent(v));
  return form.toString();
}

function record<T>(reply: Reply, key: keyof T & string): T {
  if (typeof reply.body === "object" && reply.body !== null && key in reply.body) return reply.body as T;
  throw notOurs(reply.body);
}

function records<T>(body: unknown): T[] {
  if (Array.isArray(body)) return body as T[];
  throw notOurs(body);
}

function notOurs(body: unknown): AenvError {
  return new AenvError("INTERNAL", "The server's answer has an unexpected shape", {
    data: { answer: JSON.stringify(body)?.slice(0, 200) },
    hint: "Is this URL an AgentENV node, and of the same version?",
  });
}
