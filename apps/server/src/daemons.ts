/** Starts blockd and vmd where they do not run, and again when they die. Both outlive the server. */
import { spawn } from "node:child_process";
import { closeSync, existsSync, openSync } from "node:fs";
import { connect } from "node:net";
import { AenvError, type Logger, messageOf, sleep, TaskGroup } from "@aenv/base";
import { ageMs, isAlive, type ProcIdentity, procIdentity, processes, signalExact } from "@aenv/host";

export interface DaemonSpec {
  name: string;
  /** Its main file. */
  main: string;
  /** Also how a running one is recognised: it was started with this `--socket`. */
  socket: string;
  args: readonly string[];
  /** Where what it prints goes. */
  log: string;
  env: Readonly<Record<string, string>>;
  /** How long it may take until it answers; default 20 s. */
  startMs?: number;
}

const POLL_MS = 250;
const START_POLL_MS = 10;
const START_DEADLINE_MS = 20_000;
/** From SIGTERM to SIGKILL. */
const END_DEADLINE_MS = 5000;
/** A daemon that dies at once is not restarted in a tight loop. */
const BACKOFF_MS = { first: 100, most: 5000 } as const;

export class Daemon {
  readonly #spec: DaemonSpec;
  readonly #logger: Logger;
  #identity: ProcIdentity | undefined;
  #restarts = 0;

  constructor(spec: DaemonSpec, logger: Logger) {
    this.#spec = spec;
    this.#logger = logger;
  }

  get #startMs(): number {
    return this.#spec.startMs ?? START_DEADLINE_MS;
  }

  get name(): string {
    return this.#spec.name;
  }

  get identity(): ProcIdentity | undefined {
    return this.#identity;
  }

  get restarts(): number {
    return this.#restarts;
  }

  /** Resolves when it serves its socket. */
  async ensure(signal: AbortSignal): Promise<void> {
    this.#identity ??= this.#find();
    if (this.#identity && (await this.#serves(this.#identity, signal))) return;
    this.#identity = await this.#start(signal);
  }

  /** Keeps it running until the signal aborts. */
  async supervise(signal: AbortSignal): Promise<void> {
    let backoff: number = BACKOFF_MS.first;
    while (!signal.aborted) {
      await sleep(POLL_MS, signal);
      const was = this.#identity;
      const deaf = was !== undefined && isAlive(was);
      if (deaf && existsSync(this.#spec.socket)) continue;
      const what = deaf ? "the socket of a daemon was deleted" : "a daemon died";
      this.#logger.error({ daemon: this.name, was: was?.pid }, `${what}; starting it again`);
      this.#identity = undefined;
      const started = performance.now();
      try {
        if (deaf) await this.#end(was, signal);
        await this.ensure(signal);
        this.#restarts++;
        this.#logger.info(
          { daemon: this.name, ms: Math.round(performance.now() - started) },
          "the daemon serves again",
        );
        backoff = BACKOFF_MS.first;
      } catch (e) {
        if (signal.aborted) return;
        this.#logger.error({ daemon: this.name, error: messageOf(e) }, "the daemon could not be started");
        await sleep(backoff, signal);
        backoff = Math.min(BACKOFF_MS.most, backoff * 2);
      }
    }
  }

  /**
   * True when it answers, which one that just started gets the time for. Nobody reaches one whose socket was deleted,
   * and it keeps another from its files: it is ended, and false.
   */
  async #serves(identity: ProcIdentity, signal: AbortSignal): Promise<boolean> {
    while (isAlive(identity)) {
      if (await answers(this.#spec.socket)) return true;
      if (ageMs(identity) > this.#startMs) {
        await this.#end(identity, signal);
        return false;
      }
      await sleep(START_POLL_MS, signal);
    }
    return false;
  }

  async #end(identity: ProcIdentity, signal: AbortSignal): Promise<void> {
    this.#logger.warn({ daemon: this.name, pid: identity.pid }, "a daemon does not serve its socket; ending it");
    signalExact(identity, "SIGTERM");
    const until = performance.now() + END_DEADLINE_MS;
    while (isAlive(identity)) {
      if (performance.now() > until) signalExact(identity, "SIGKILL");
      await sleep(START_POLL_MS, signal);
    }
  }

  #find(): ProcIdentity | undefined {
    for (const p of processes()) {
      const at = p.argv.indexOf("--socket");
      if (at > 0 && p.argv[at + 1] === this.#spec.socket && p.argv.includes(this.#spec.main))
        return { pid: p.pid, startTicks: p.startTicks };
    }
    return undefined;
  }

  async #start(signal: AbortSignal): Promise<ProcIdentity> {
    const { name, main, socket, args, log, env } = this.#spec;
    const out = openSync(log, "a", 0o600);
    let ended: string | undefined;
    let pid: number | undefined;
    try {
      const child = spawn(process.execPath, [main, "--socket", socket, ...args], {
        cwd: "/",
        detached: true,
        stdio: ["ignore", out, out],
        env: { ...env },
      });
      child.once("error", (e) => (ended = e.message));
      child.once("exit", (code, sig) => (ended = sig ?? `exit code ${code}`));
      child.unref();
      pid = child.pid;
    } finally {
      closeSync(out);
    }
    const until = performance.now() + this.#startMs;
    while (performance.now() < until) {
      if (ended !== undefined) break;
      const identity = pid === undefined ? undefined : procIdentity(pid);
      if (identity && (await answers(socket))) return identity;
      await sleep(START_POLL_MS, signal);
    }
    throw new AenvError("UNAVAILABLE", `${name} did not start: ${ended ?? "its socket does not answer"}`, {
      hint: `Read ${log}.`,
    });
  }
}

function answers(path: string): Promise<boolean> {
  return new Promise((resolve) => {
    const socket = connect(path);
    socket.once("connect", () => {
      socket.destroy();
      resolve(true);
    });
    socket.once("error", () => resolve(false));
  });
}

/** All daemons of the node: up when it returns, kept up until it is disposed; that leaves them running. */
export async function superviseDaemons(
  daemons: readonly Daemon[],
  logger: Logger,
  signal: AbortSignal,
): Promise<AsyncDisposable> {
  await Promise.all(daemons.map((d) => d.ensure(signal)));
  const tasks = new TaskGroup((name, e) => logger.error({ daemon: name, error: messageOf(e) }, "supervision ended"));
  for (const d of daemons) tasks.spawn(d.name, (s) => d.supervise(s));
  return tasks;
}
