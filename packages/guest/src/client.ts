import { Agent } from "node:http";
import { Agent as SecureAgent } from "node:https";
import { type Readable } from "node:stream";
import { AenvError, deadline, sleep } from "@aenv/base";
import {
  Empty,
  Entries,
  type EntryInfo,
  Envs,
  type GuestInit,
  GuestMetrics,
  type HookResult,
  Hooks,
  type HooksRequest,
  OneEntry,
  type ProcessEvent,
  type ProcessSummary,
  Processes,
  Written,
  type WrittenFile,
} from "./messages.ts";
import { events, type GuestProcess, ProcessCalls } from "./process.ts";
import { parse, readAll, Transport } from "./transport.ts";

const ENVD_PORT = 49983;
/** Idle connections per guest; envd itself closes them only after 640 s. */
const IDLE_SOCKETS = 4;
/** A guest that boots answers within this or is asked again. */
const PROBE_MS = 2000;
const PROBE_PAUSE_MS = 5;

export type GuestClientOptions = (
  | { host: string; port?: number }
  /** For instance the edge of a node; `headers` then carry the routing. */
  | { baseUrl: string }
) & { headers?: Record<string, string>; accessToken?: string; agent?: Agent };

export interface StartSpec {
  cmd: string;
  args?: string[];
  envs?: Record<string, string>;
  cwd?: string;
  /** A user of the guest; its default user when absent. */
  user?: string;
  /** The guest kills the process after this; absent means never. */
  timeoutMs?: number;
  tag?: string;
  /** Keeps a pipe on standard input for sendInput; otherwise it is /dev/null. */
  stdin?: boolean;
  pty?: { cols: number; rows: number };
}

export interface ExecSpec extends Omit<StartSpec, "stdin" | "pty" | "tag"> {
  /** Sent whole, then closed. */
  stdin?: Buffer | string;
  /** More output than this of either stream ends the call with TOO_LARGE (default 16 MiB). */
  maxOutput?: number;
}

export interface ExecResult {
  /** -1 when a signal ended it; `status` tells which. */
  exitCode: number;
  stdout: string;
  stderr: string;
  status: string;
}

/** At most 64 hooks with 2 KiB of output each, and what JSON makes of it. */
const MAX_HOOKS_REPLY = 2 * 1024 * 1024;
const MAX_OUTPUT = 16 * 1024 * 1024;

/** Speaks to the daemon of one guest. One client per run of a VM: its connections die with the run. */
export class GuestClient {
  readonly #t: Transport;
  readonly #calls: ProcessCalls;

  constructor(o: GuestClientOptions) {
    const base = new URL(
      "baseUrl" in o ? o.baseUrl : `http://${o.host.includes(":") ? `[${o.host}]` : o.host}:${o.port ?? ENVD_PORT}`,
    );
    const headers: Record<string, string> = { ...o.headers };
    if (o.accessToken) headers["X-Access-Token"] = o.accessToken;
    const options = { keepAlive: true, maxFreeSockets: IDLE_SOCKETS };
    const agent = o.agent ?? (base.protocol === "https:" ? new SecureAgent(options) : new Agent(options));
    this.#t = new Transport(base, headers, agent);
    this.#calls = new ProcessCalls(this.#t);
  }

  /** False when something answers that is not a healthy envd; throws when nothing answers. */
  async health(signal: AbortSignal): Promise<boolean> {
    try {
      await this.#t.fetch({ method: "GET", path: "/health" }, signal);
      return true;
    } catch (e) {
      if (e instanceof AenvError && e.data["status"] !== undefined) return false;
      throw e;
    }
  }

  /** Resolves when envd answers; asks again until the signal aborts. */
  async waitReady(signal: AbortSignal): Promise<void> {
    for (;;) {
      signal.throwIfAborted();
      try {
        if (await this.health(deadline(PROBE_MS, signal))) return;
      } catch {
        // Not up yet: refused, no route, or a probe that got lost while the guest boots.
      }
      await sleep(PROBE_PAUSE_MS, signal);
    }
  }

  /** `currentToken`: the token that the guest was captured with, where it is not the one that is set now. */
  async init(body: GuestInit, signal: AbortSignal, currentToken?: string): Promise<{ hooks: boolean }> {
    const { headers } = await this.#t.fetch(
      {
        method: "POST",
        path: "/init",
        headers: {
          "content-type": "application/json",
          ...(currentToken === undefined ? {} : { "X-Access-Token": currentToken }),
        },
        body: Buffer.from(JSON.stringify(body)),
      },
      signal,
    );
    return { hooks: headers["x-aenv-hooks"] !== undefined };
  }

  /** The programs of the guest trust this authority (PEM) from then on. `token` is the guest's, empty where it has none. */
  async trust(authority: string, token: string, signal: AbortSignal): Promise<void> {
    await this.#t.fetch(
      {
        method: "POST",
        path: "/init",
        headers: { "content-type": "application/json", ...(token === "" ? {} : { "X-Access-Token": token }) },
        body: Buffer.from(JSON.stringify({ timestamp: new Date().toISOString(), caBundle: authority })),
      },
      signal,
    );
  }

  /**
   * Runs the guest's hooks of a phase, one after the other; those that fail are in the result. The guest gives them 20 s
   * together. DEADLINE where it does not begin to answer within `answerMs`.
   */
  async hooks(
    request: HooksRequest,
    options: { token?: string; answerMs: number },
    signal: AbortSignal,
  ): Promise<HookResult[]> {
    const what = "POST /hooks";
    const late = new AbortController();
    const timer = setTimeout(
      () => late.abort(new AenvError("DEADLINE", `${what}: no answer within ${options.answerMs} ms`)),
      options.answerMs,
    );
    try {
      const res = await this.#t.send(
        {
          method: "POST",
          path: "/hooks",
          headers: {
            "content-type": "application/json",
            ...(options.token === undefined ? {} : { "X-Access-Token": options.token }),
          },
          body: Buffer.from(JSON.stringify(request)),
        },
        AbortSignal.any([signal, late.signal]),
      );
      clearTimeout(timer);
      if (res.statusCode !== 200) return await this.#t.refuse(res, what, signal);
      return parse(what, await readAll(res, MAX_HOOKS_REPLY, what, signal), Hooks).hooks;
    } finally {
      clearTimeout(timer);
    }
  }

  /** Runs a program to its end. Not a shell: `cmd` is looked up in the guest's PATH. */
  async exec(spec: ExecSpec, signal: AbortSignal): Promise<ExecResult> {
    const limit = spec.maxOutput ?? MAX_OUTPUT;
    const { stdin, maxOutput: _, ...rest } = spec;
    const process = await this.start({ ...rest, stdin: stdin !== undefined }, signal);
    const out = { stdout: new Collector(limit), stderr: new Collector(limit) };
    const feed = stdin === undefined ? undefined : this.#feed(process.pid, Buffer.from(stdin), signal);
    // A program may exit before it read all its input; how it ended is what counts.
    feed?.catch(() => {});
    for await (const e of process) {
      if (e.type === "end") {
        const { exitCode, status } = e;
        return { exitCode, status, stdout: out.stdout.text(), stderr: out.stderr.text() };
      }
      if (e.type === "stdout" || e.type === "stderr") out[e.type].add(e.data);
    }
    throw new AenvError("GUEST_FAILED", `${spec.cmd}: the guest ended the stream before the process ended`);
  }

  async #feed(pid: number, data: Buffer, signal: AbortSignal): Promise<void> {
    for (let at = 0; at < data.length; at += INPUT_CHUNK)
      await this.sendInput(pid, { stdin: data.subarray(at, at + INPUT_CHUNK) }, signal);
    await this.closeStdin(pid, signal);
  }

  /** Starts a process. The first event was read already: `pid` is known. */
  async start(spec: StartSpec, signal: AbortSignal): Promise<GuestProcess> {
    const headers: Record<string, string> = { "keepalive-ping-interval": "50" };
    if (spec.timeoutMs) headers["connect-timeout-ms"] = String(Math.ceil(spec.timeoutMs));
    if (spec.user) headers["authorization"] = `Basic ${Buffer.from(`${spec.user}:`).toString("base64")}`;
    const message = {
      process: { cmd: spec.cmd, args: spec.args ?? [], envs: spec.envs ?? {}, cwd: spec.cwd },
      stdin: spec.stdin ?? false,
      tag: spec.tag,
      ...(spec.pty ? { pty: { size: spec.pty } } : {}),
    };
    return await following(events(this.#t, "Start", message, headers, signal));
  }

  /** Follows a running process; earlier output is not repeated. */
  async connect(process: { pid: number } | { tag: string }, signal: AbortSignal): Promise<GuestProcess> {
    const headers = { "keepalive-ping-interval": "50" };
    return await following(events(this.#t, "Connect", { process }, headers, signal));
  }

  async list(signal: AbortSignal): Promise<ProcessSummary[]> {
    return (await this.#t.call("process.Process/List", {}, Processes, signal)).processes;
  }

  sendInput(pid: number, input: { stdin: Buffer } | { pty: Buffer }, signal: AbortSignal): Promise<void> {
    return this.#calls.sendInput(pid, input, signal);
  }
  closeStdin(pid: number, signal: AbortSignal): Promise<void> {
    return this.#calls.closeStdin(pid, signal);
  }
  signal(pid: number, name: "SIGKILL" | "SIGTERM", signal: AbortSignal): Promise<void> {
    return this.#calls.signal(pid, name, signal);
  }
  resize(pid: number, size: { cols: number; rows: number }, signal: AbortSignal): Promise<void> {
    return this.#calls.resize(pid, size, signal);
  }

  /** Writes one file; parents are made. Give `size` where it is known, so that the guest sees a short body. */
  async upload(
    path: string,
    body: Buffer | Readable,
    o: { user?: string; size?: number; metadata?: Record<string, string> },
    signal: AbortSignal,
  ): Promise<WrittenFile> {
    const headers: Record<string, string> = { "content-type": "application/octet-stream" };
    for (const [k, v] of Object.entries(o.metadata ?? {})) headers[`X-Metadata-${k}`] = v;
    const size = Buffer.isBuffer(body) ? body.length : o.size;
    if (size !== undefined) headers["content-length"] = String(size);
    const answer = await this.#t.fetch({ method: "POST", path: filesPath(path, o.user), headers, body }, signal);
    const [written] = parse("POST /files", answer.body, Written);
    if (!written) throw new AenvError("GUEST_FAILED", "POST /files: the guest wrote no file");
    return written;
  }

  /** The bytes of a file as a stream; the caller reads it to the end or destroys it. */
  async download(path: string, o: { user?: string }, signal: AbortSignal): Promise<Readable> {
    const x = { method: "GET", path: filesPath(path, o.user), headers: { "accept-encoding": "identity" } };
    const res = await this.#t.send(x, signal);
    if (res.statusCode === 200) return res;
    return await this.#t.refuse(res, "GET /files", signal);
  }

  async stat(path: string, signal: AbortSignal): Promise<EntryInfo> {
    return (await this.#t.call("filesystem.Filesystem/Stat", { path }, OneEntry, signal)).entry;
  }
  async listDir(path: string, depth: number, signal: AbortSignal): Promise<EntryInfo[]> {
    return (await this.#t.call("filesystem.Filesystem/ListDir", { path, depth }, Entries, signal)).entries;
  }
  async makeDir(path: string, signal: AbortSignal): Promise<EntryInfo> {
    return (await this.#t.call("filesystem.Filesystem/MakeDir", { path }, OneEntry, signal)).entry;
  }
  async remove(path: string, signal: AbortSignal): Promise<void> {
    await this.#t.call("filesystem.Filesystem/Remove", { path }, Empty, signal);
  }
  async move(source: string, destination: string, signal: AbortSignal): Promise<EntryInfo> {
    return (await this.#t.call("filesystem.Filesystem/Move", { source, destination }, OneEntry, signal)).entry;
  }

  async metrics(signal: AbortSignal): Promise<GuestMetrics> {
    const { body } = await this.#t.fetch({ method: "GET", path: "/metrics" }, signal);
    return parse("GET /metrics", body, GuestMetrics);
  }
  async envs(signal: AbortSignal): Promise<Record<string, string>> {
    const { body } = await this.#t.fetch({ method: "GET", path: "/envs" }, signal);
    return parse("GET /envs", body, Envs);
  }

  /** Breaks every connection, also those in use. */
  close(): void {
    this.#t.close();
  }
}

const INPUT_CHUNK = 1024 * 1024;

function filesPath(path: string, user: string | undefined): string {
  const query = new URLSearchParams({ path, ...(user === undefined ? {} : { username: user }) });
  return `/files?${query.toString()}`;
}

async function following(stream: AsyncGenerator<ProcessEvent, void, void>): Promise<GuestProcess> {
  const first = await stream.next();
  if (first.done || first.value.type !== "start") {
    await stream.return();
    throw new AenvError("GUEST_FAILED", "the guest did not begin the stream with the process id");
  }
  return { pid: first.value.pid, [Symbol.asyncIterator]: () => stream };
}

class Collector {
  readonly #limit: number;
  readonly #parts: Buffer[] = [];
  #size = 0;

  constructor(limit: number) {
    this.#limit = limit;
  }

  add(part: Buffer): void {
    this.#size += part.length;
    if (this.#size > this.#limit) throw new AenvError("TOO_LARGE", `the process wrote more than ${this.#limit} bytes`);
    this.#parts.push(part);
  }

  text(): string {
    return Buffer.concat(this.#parts).toString("utf8");
  }
}
