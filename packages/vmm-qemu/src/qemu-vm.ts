import { randomBytes } from "node:crypto";
import { constants } from "node:fs";
import { open, readFile, rename, rm, writeFile } from "node:fs/promises";
import { connect } from "node:net";
import { dirname } from "node:path";
import { AenvError, bytes, type Logger, Mutex, type RunId, sleep } from "@aenv/base";
import { type Cgroups, isAlive, type ProcIdentity, readTail, signalExact } from "@aenv/host";
import type { GuestMapping, ProcExit, Vm, VmExit, VmHandle, VmStats, VmStatus } from "@aenv/vmm";
import { runPaths } from "./command-line.ts";
import { exitCause, isDiskFull, shutdownReason } from "./exit-cause.ts";
import { guestMappings } from "./maps.ts";
import type { Qmp } from "./qmp.ts";

/** What the handle remembers beside the identity. */
export interface QemuFacts {
  runDir: string;
  consoleLog: string;
  vmmLog: string;
  memoryFile: string;
  memoryBytes: number;
  cgroup?: string;
}

export interface QemuVmDeps {
  logger: Logger;
  cgroups: Pick<Cgroups, "stats"> | undefined;
  onGone(vm: QemuVm): void;
}

/** Device states measured: 9 KiB with one virtual CPU, 2 KiB more for each further; the rest is head room. */
const MAX_DEVICE_STATE_BYTES = 16 * 1024 * 1024;
/** "QEVM": the first bytes of a QEMU device state. */
const STATE_MAGIC = 0x5145564d;
/** Between two looks at /proc once the QMP connection is gone, and how long vmd has to report the exit after that. */
const GONE_POLL_MS = 20;
const EXIT_REPORT_MS = 1_000;
const TAIL_BYTES = 16 * 1024;
/** USER_HZ of every Linux we run on: utime and stime of /proc/PID/stat are in these. */
const TICKS_PER_SECOND = 100;
const PAGE_BYTES = 4096;

export class QemuVm implements Vm {
  readonly handle: VmHandle;
  readonly identity: ProcIdentity;
  readonly exited: Promise<VmExit>;
  readonly #facts: QemuFacts;
  readonly #deps: QemuVmDeps;
  readonly #exit = Promise.withResolvers<VmExit>();
  /** Serialises what the caller asks for; QEMU would take it in any order. */
  readonly #turn = new Mutex();
  #qmp: Qmp | undefined;
  #state: "live" | "ending" | "gone" | "detached" = "live";
  #killed = false;
  #shutdownReason: string | undefined;

  constructor(run: RunId, identity: ProcIdentity, facts: QemuFacts, deps: QemuVmDeps) {
    this.identity = identity;
    this.#facts = facts;
    this.#deps = deps;
    this.exited = this.#exit.promise;
    this.handle = { v: 1, driver: "qemu", run, identity, data: { ...facts } };
  }

  get consoleLog(): string {
    return this.#facts.consoleLog;
  }

  /** Takes over a connection; from here on its end is looked into. */
  attach(qmp: Qmp): void {
    this.#qmp = qmp;
    qmp.onEvent((e) => (this.#shutdownReason = shutdownReason(e) ?? this.#shutdownReason));
    void qmp.closed.then(() => this.#watchEnd());
  }

  /** The spawner saw the end. */
  spawnerExit(exit: ProcExit): void {
    void this.#finish(exit);
  }

  async load(deviceState: string, signal: AbortSignal): Promise<void> {
    await this.#do("load", signal, async (qmp) => {
      if ((await this.#queryStatus(qmp, signal)) !== "prepared")
        throw new AenvError("CONFLICT", `VM ${this.handle.run} does not wait for a state`);
      const state = await readState(deviceState);
      try {
        await this.#incoming(qmp, state, deviceState, signal);
      } catch (e) {
        await this.kill();
        throw e;
      }
    });
  }

  async resume(signal: AbortSignal): Promise<void> {
    await this.#do("resume", signal, async (qmp) => {
      await qmp.execute("cont", {}, signal);
    });
  }

  async stop(signal: AbortSignal): Promise<void> {
    await this.#do("stop", signal, async (qmp) => {
      await qmp.execute("stop", {}, signal);
    });
  }

  async saveDeviceState(path: string, signal: AbortSignal): Promise<void> {
    await this.#do("save the device state", signal, async (qmp) => {
      if ((await this.#queryStatus(qmp, signal)) !== "stopped")
        throw new AenvError("CONFLICT", `VM ${this.handle.run} must be stopped to save its device state`);
      const file = runPaths(this.#facts.runDir).state;
      await rm(file, { force: true });
      try {
        // live=false: the VM keeps its disk, whether it resumes or not.
        await qmp.execute("xen-save-devices-state", { filename: file, live: false }, signal);
        // The folder is the VMM's: it may have put anything there.
        const state = await readState(file);
        const temp = `${path}.tmp-${randomBytes(6).toString("hex")}`;
        await writeFile(temp, state, { flag: "wx", mode: 0o600 });
        await rename(temp, path);
      } finally {
        await rm(file, { force: true });
      }
    });
  }

  status(signal: AbortSignal): Promise<VmStatus> {
    return this.#do("query", signal, (qmp) => this.#queryStatus(qmp, signal));
  }

  async mappings(_signal: AbortSignal): Promise<GuestMapping[]> {
    this.#assertLive();
    return await guestMappings(this.identity.pid, this.#facts.memoryFile, this.#facts.memoryBytes);
  }

  async kill(): Promise<void> {
    if (this.#state === "detached") throw new AenvError("CONFLICT", `VM ${this.handle.run} was detached`);
    if (this.#state === "live") {
      // One that ends at this moment by itself counts as killed.
      this.#killed = true;
      signalExact(this.identity, "SIGKILL");
      if (!this.#qmp) void this.#watchEnd();
    }
    await this.exited;
  }

  detach(): void {
    if (this.#state !== "live") return;
    this.#state = "detached";
    this.#qmp?.close();
    this.#deps.onGone(this);
  }

  async stats(): Promise<VmStats> {
    this.#assertLive();
    try {
      const [statm, stat] = await Promise.all([
        readFile(`/proc/${this.identity.pid}/statm`, "latin1"),
        readFile(`/proc/${this.identity.pid}/stat`, "latin1"),
      ]);
      const fields = stat.slice(stat.lastIndexOf(")") + 2).split(" ");
      const ticks = Number(fields[11]) + Number(fields[12]);
      return {
        residentBytes: bytes(Number(statm.split(" ")[1]) * PAGE_BYTES),
        cpuUsec: (ticks * 1_000_000) / TICKS_PER_SECOND,
      };
    } catch (e) {
      throw new AenvError("VMM_FAILED", `VM ${this.handle.run} is gone`, { cause: e });
    }
  }

  async #do<T>(what: string, signal: AbortSignal, fn: (qmp: Qmp) => Promise<T>): Promise<T> {
    using _turn = await this.#turn.acquire(signal);
    const qmp = this.#assertLive();
    try {
      return await fn(qmp);
    } catch (e) {
      throw AenvError.from(e, `${what} VM ${this.handle.run}`);
    }
  }

  #assertLive(): Qmp {
    if (this.#state !== "live" || !this.#qmp)
      throw new AenvError("VMM_FAILED", `VM ${this.handle.run} is ${this.#state === "detached" ? "detached" : "gone"}`);
    return this.#qmp;
  }

  async #queryStatus(qmp: Qmp, signal: AbortSignal): Promise<VmStatus> {
    const reply = (await qmp.execute("query-status", {}, signal)) as { status?: unknown };
    if (reply.status === "inmigrate") return "prepared";
    return reply.status === "running" ? "running" : "stopped";
  }

  /** QEMU listens, we send: the VMM needs no right to the snapshot's file. */
  async #incoming(qmp: Qmp, state: Buffer, name: string, signal: AbortSignal): Promise<void> {
    const { load } = runPaths(this.#facts.runDir);
    const outcome = Promise.withResolvers<string>();
    const off = qmp.onEvent((e) => {
      const status = e.name === "MIGRATION" ? e.data["status"] : undefined;
      if (status === "completed" || status === "failed") outcome.resolve(status);
    });
    void qmp.closed.then(() => outcome.resolve("failed"));
    try {
      await qmp.execute("migrate-incoming", { uri: `unix:${load}` }, signal);
      const socket = connect(load);
      const abort = (): void => outcome.reject(signal.reason as Error);
      signal.addEventListener("abort", abort, { once: true });
      socket.on("error", () => outcome.resolve("failed"));
      socket.end(state);
      try {
        if ((await outcome.promise) === "failed")
          throw new AenvError("CORRUPT", `QEMU refused the device state ${name}`, {
            data: { log: (await readTail(this.#facts.vmmLog, 2000)).trim() },
          });
      } finally {
        signal.removeEventListener("abort", abort);
        socket.destroy();
      }
    } finally {
      off();
      await rm(load, { force: true });
    }
  }

  async #watchEnd(): Promise<void> {
    const since = performance.now();
    let warned = false;
    while (this.#state === "live" && isAlive(this.identity)) {
      // One that ends hangs up a moment before.
      if (!warned && !this.#killed && performance.now() - since > EXIT_REPORT_MS) {
        warned = true;
        this.#deps.logger.warn({ run: this.handle.run, pid: this.identity.pid }, "the QMP connection was lost");
      }
      await sleep(GONE_POLL_MS);
    }
    if (this.#state !== "live") return;
    // The process is gone; the spawner, when it lives, tells more.
    await Promise.race([sleep(EXIT_REPORT_MS), this.exited]);
    await this.#finish(undefined);
  }

  async #finish(exit: ProcExit | undefined): Promise<void> {
    if (this.#state !== "live") return;
    this.#state = "ending";
    // Events that QEMU wrote before it ended are still in the socket.
    await Promise.race([this.#qmp?.closed, sleep(EXIT_REPORT_MS)]);
    const { consoleLog, vmmLog, cgroup } = this.#facts;
    const quiet = (): string => "";
    const [console, log, diskFull, oomKills] = await Promise.all([
      readTail(consoleLog, TAIL_BYTES).catch(quiet),
      readTail(vmmLog, TAIL_BYTES).catch(quiet),
      isDiskFull(dirname(consoleLog)),
      this.#oomKills(cgroup),
    ]);
    const end = exitCause({
      killed: this.#killed,
      ...(this.#shutdownReason === undefined ? {} : { shutdownReason: this.#shutdownReason }),
      ...(exit === undefined ? {} : { code: exit.code, signal: exit.signal }),
      oomKills,
      diskFull,
      console,
      log,
    });
    this.#state = "gone";
    this.#qmp?.close();
    this.#deps.onGone(this);
    this.#deps.logger.info({ run: this.handle.run, pid: this.identity.pid, ...end }, "VM ended");
    this.#exit.resolve(end);
  }

  async #oomKills(cgroup: string | undefined): Promise<number> {
    if (cgroup === undefined || !this.#deps.cgroups) return 0;
    try {
      return (await this.#deps.cgroups.stats(cgroup)).oomKills;
    } catch {
      return 0;
    }
  }
}

async function readState(path: string): Promise<Buffer> {
  let data: Buffer;
  try {
    const file = await open(path, constants.O_RDONLY | constants.O_NOFOLLOW | constants.O_NONBLOCK);
    try {
      const info = await file.stat();
      if (!info.isFile() || info.size > MAX_DEVICE_STATE_BYTES)
        throw new AenvError("CORRUPT", `${path} is not a device state: ${info.size} bytes`);
      data = await file.readFile();
    } finally {
      await file.close();
    }
  } catch (e) {
    throw AenvError.from(e, `read ${path}`);
  }
  if (data.length < 8 || data.readUInt32BE(0) !== STATE_MAGIC)
    throw new AenvError("CORRUPT", `${path} is not a QEMU device state`);
  return data;
}
