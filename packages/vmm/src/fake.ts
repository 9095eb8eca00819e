import { randomBytes } from "node:crypto";
import { open, readFile, rename, rm, stat, writeFile } from "node:fs/promises";
import { AenvError, type Bytes, bytes, errnoOf, mib, sleep } from "@aenv/base";
import type { ProcIdentity } from "@aenv/host";
import type {
  ExitCause,
  GuestMapping,
  Machine,
  Probe,
  Vm,
  VmExit,
  VmHandle,
  VmmCapabilities,
  VmmDriver,
  VmSpec,
  VmStats,
  VmStatus,
} from "./contract.ts";

export type FakeOp = "boot" | "prepare" | "load" | "resume" | "stop" | "save" | "mappings" | "adopt";

/** What a guest of the fake serves while its VM runs; made by `FakeKnobs.guest`. */
export interface FakeGuest {
  /** Runs at every resume, the first included. */
  resume(): Promise<void>;
  /** Runs at every stop and at the end. */
  stop(): Promise<void>;
}

/** Faults and delays; change them at any time. */
export interface FakeKnobs {
  /** Milliseconds before the operation does its work. */
  delayMs: Partial<Record<FakeOp, number>>;
  /** The next operations of that kind fail with these, in order. */
  failures: Partial<Record<FakeOp, Error[]>>;
  /** Awaited at the start of every operation: a test parks here. */
  hook: ((op: FakeOp, run: string) => Promise<void>) | undefined;
  /** A real peer in place of a guest, for example a TCP server on the slot's address. */
  guest: ((spec: VmSpec) => FakeGuest) | undefined;
}

interface Process {
  spec: VmSpec;
  identity: ProcIdentity;
  status: VmStatus;
  /** The whole memory of a fake guest: what a capture must carry over. */
  memory: { counter: number; boots: number };
  end: VmExit | undefined;
  ended: PromiseWithResolvers<VmExit>;
  guest: FakeGuest | undefined;
}

/** Above the kernel's largest pid: a look at /proc or a signal by mistake finds nothing. */
const FIRST_PID = 2 ** 22 + 1;
const STATE_KIND = "aenv-fake-device-state";

/**
 * Driver without VMMs. It keeps the contract to the letter: files, states, exits and errors are those of a real one. VMs
 * live in the driver object's world; a second driver on the same world is a server that was restarted.
 */
export class FakeDriver implements VmmDriver {
  readonly name = "fake";
  readonly capabilities: VmmCapabilities = { mappings: false, readOnlyMemoryFile: true, freePageReporting: false };
  readonly knobs: FakeKnobs = { delayMs: {}, failures: {}, hook: undefined, guest: undefined };
  readonly #world: FakeWorld;
  readonly #attached = new Set<FakeVm>();

  constructor(world: FakeWorld = new FakeWorld()) {
    this.#world = world;
  }

  async probe(signal: AbortSignal): Promise<Probe> {
    signal.throwIfAborted();
    return { accel: "tcg", version: "0.0.0", reason: "the fake driver runs no guest" };
  }

  async boot(spec: VmSpec, signal: AbortSignal): Promise<Vm> {
    await this.enter("boot", spec.run, signal);
    if (spec.memory.mode !== "create") throw new AenvError("INVALID_ARGUMENT", "a cold boot creates its memory file");
    checkMachine(spec.machine);
    await createMemory(spec);
    const process = this.#world.start(spec, "stopped", { counter: 0, boots: 1 }, this.knobs.guest?.(spec));
    await this.#world.resume(process);
    return this.#attach(process);
  }

  async prepare(spec: VmSpec, signal: AbortSignal): Promise<Vm> {
    await this.enter("prepare", spec.run, signal);
    if (spec.memory.mode !== "map") throw new AenvError("INVALID_ARGUMENT", "a waiting VM maps a memory file");
    checkMachine(spec.machine);
    await checkMemory(spec);
    return this.#attach(this.#world.start(spec, "prepared", { counter: 0, boots: 0 }, this.knobs.guest?.(spec)));
  }

  async adopt(handle: VmHandle, signal: AbortSignal): Promise<Vm> {
    await this.enter("adopt", handle.run, signal);
    if (handle.v !== 1 || handle.driver !== this.name)
      throw new AenvError("INVALID_ARGUMENT", `the handle of ${handle.run} is not one of this driver`);
    const process = this.#world.find(handle.identity);
    if (!process || process.end)
      throw new AenvError("NOT_FOUND", `VM ${handle.run} is gone`, { data: { exit: process?.end ?? UNKNOWN } });
    for (const vm of this.#attached) if (vm.process === process) return vm;
    return this.#attach(process);
  }

  overheadBytes(_machine: Machine): Bytes {
    return mib(1);
  }

  async close(): Promise<void> {
    for (const vm of this.#attached) vm.detach();
  }

  /** Ends the VM of a run from outside, as a crash or the guest itself would. */
  async crash(run: string, cause: ExitCause = "vmm-crash", detail = "the VMM was ended by SIGKILL"): Promise<void> {
    const process = this.#world.byRun(run);
    if (!process) throw new AenvError("NOT_FOUND", `the fake has no VM of run ${run}`);
    await this.#world.end(process, { cause, detail });
  }

  /** What the guest has in memory; `counter` grows with every `touch`. */
  memoryOf(run: string): { counter: number; boots: number } | undefined {
    return this.#world.byRun(run)?.memory;
  }

  /** Changes the memory of a running guest. */
  touch(run: string): void {
    const process = this.#world.byRun(run);
    if (process?.status !== "running") throw new AenvError("CONFLICT", `run ${run} is not running`);
    process.memory.counter++;
  }

  /** Runs whose VMM is alive, in the order of their start. */
  get alive(): string[] {
    return this.#world.alive;
  }

  /** Hook, delay and failure of one operation. */
  async enter(op: FakeOp, run: string, signal: AbortSignal): Promise<void> {
    signal.throwIfAborted();
    await this.knobs.hook?.(op, run);
    const delay = this.knobs.delayMs[op];
    if (delay !== undefined) await sleep(delay, signal);
    const failure = this.knobs.failures[op]?.shift();
    if (failure) throw failure;
  }

  #attach(process: Process): Vm {
    const vm = new FakeVm(this, this.#world, process, () => this.#attached.delete(vm));
    this.#attached.add(vm);
    return vm;
  }
}

const UNKNOWN: VmExit = { cause: "unknown", detail: "nobody saw how the VMM ended" };

/** The processes of a fake host; outlives drivers. */
export class FakeWorld {
  readonly #processes = new Map<number, Process>();
  #nextPid = FIRST_PID;

  get alive(): string[] {
    return [...this.#processes.values()].filter((p) => !p.end).map((p) => p.spec.run);
  }

  start(spec: VmSpec, status: VmStatus, memory: Process["memory"], guest: FakeGuest | undefined): Process {
    const identity = { pid: this.#nextPid++, startTicks: 1 };
    const ended = Promise.withResolvers<VmExit>();
    const process: Process = { spec, identity, status, memory, end: undefined, ended, guest };
    this.#processes.set(identity.pid, process);
    return process;
  }

  find(identity: ProcIdentity): Process | undefined {
    return this.#processes.get(identity.pid);
  }

  byRun(run: string): Process | undefined {
    return [...this.#processes.values()].findLast((p) => p.spec.run === run);
  }

  async resume(process: Process): Promise<void> {
    if (process.status === "running") return;
    process.status = "running";
    await process.guest?.resume();
  }

  async stop(process: Process): Promise<void> {
    if (process.status !== "running") return;
    process.status = "stopped";
    await process.guest?.stop();
  }

  async end(process: Process, exit: VmExit): Promise<void> {
    if (process.end) return;
    process.end = exit;
    if (process.status === "running") await process.guest?.stop();
    process.ended.resolve(exit);
  }
}

class FakeVm implements Vm {
  readonly handle: VmHandle;
  readonly identity: ProcIdentity;
  readonly exited: Promise<VmExit>;
  readonly process: Process;
  readonly #driver: FakeDriver;
  readonly #world: FakeWorld;
  readonly #onGone: () => void;
  #detached = false;

  constructor(driver: FakeDriver, world: FakeWorld, process: Process, onGone: () => void) {
    this.#driver = driver;
    this.#world = world;
    this.process = process;
    this.#onGone = onGone;
    this.identity = process.identity;
    this.handle = { v: 1, driver: driver.name, run: process.spec.run, identity: process.identity, data: {} };
    this.exited = new Promise((resolve) => {
      void process.ended.promise.then((exit) => {
        if (this.#detached) return;
        onGone();
        resolve(exit);
      });
    });
  }

  async load(deviceState: string, signal: AbortSignal): Promise<void> {
    await this.#enter("load", signal);
    const { process } = this;
    if (process.status !== "prepared")
      throw new AenvError("CONFLICT", `VM ${process.spec.run} does not wait for a state`);
    let state: { kind?: unknown; memory?: Process["memory"]; vcpus?: number };
    try {
      state = JSON.parse(await readFile(deviceState, "utf8")) as typeof state;
    } catch (e) {
      if (errnoOf(e)) throw AenvError.from(e, `read ${deviceState}`);
      state = {};
    }
    if (state.kind !== STATE_KIND) throw new AenvError("CORRUPT", `${deviceState} is not a device state of the fake`);
    if (!state.memory || state.vcpus !== process.spec.machine.vcpus) {
      await this.kill();
      throw new AenvError("CORRUPT", `the fake refused the device state ${deviceState}`);
    }
    // No host mapping leads to this memory, so the state carries it: a delta of a real guest would.
    process.memory = state.memory;
    process.status = "stopped";
  }

  async resume(signal: AbortSignal): Promise<void> {
    await this.#enter("resume", signal);
    if (this.process.status === "prepared") throw new AenvError("VMM_FAILED", "nothing is loaded yet");
    await this.#world.resume(this.process);
  }

  async stop(signal: AbortSignal): Promise<void> {
    await this.#enter("stop", signal);
    await this.#world.stop(this.process);
  }

  async saveDeviceState(path: string, signal: AbortSignal): Promise<void> {
    await this.#enter("save", signal);
    const { spec, memory, status } = this.process;
    if (status !== "stopped")
      throw new AenvError("CONFLICT", `VM ${spec.run} must be stopped to save its device state`);
    const temp = `${path}.tmp-${randomBytes(6).toString("hex")}`;
    try {
      await writeFile(temp, JSON.stringify({ kind: STATE_KIND, memory, vcpus: spec.machine.vcpus }), { flag: "wx" });
      await rename(temp, path);
    } catch (e) {
      await rm(temp, { force: true });
      throw AenvError.from(e, `save the device state of VM ${spec.run}`);
    }
  }

  async status(signal: AbortSignal): Promise<VmStatus> {
    signal.throwIfAborted();
    this.#assertLive();
    return this.process.status;
  }

  async mappings(signal: AbortSignal): Promise<GuestMapping[]> {
    await this.#enter("mappings", signal);
    return [];
  }

  async kill(): Promise<void> {
    if (this.#detached) throw new AenvError("CONFLICT", `VM ${this.process.spec.run} was detached`);
    await this.#world.end(this.process, { cause: "killed", detail: "the VM was killed on request" });
    await this.exited;
  }

  detach(): void {
    if (this.#detached || this.process.end) return;
    this.#detached = true;
    this.#onGone();
  }

  async stats(): Promise<VmStats> {
    this.#assertLive();
    return { residentBytes: bytes(0), cpuUsec: 0 };
  }

  async #enter(op: FakeOp, signal: AbortSignal): Promise<void> {
    this.#assertLive();
    await this.#driver.enter(op, this.process.spec.run, signal);
    this.#assertLive();
  }

  #assertLive(): void {
    if (this.#detached || this.process.end)
      throw new AenvError("VMM_FAILED", `VM ${this.process.spec.run} is ${this.#detached ? "detached" : "gone"}`);
  }
}

function checkMachine(machine: Machine): void {
  if (!Number.isInteger(machine.vcpus) || machine.vcpus < 1)
    throw new AenvError("INVALID_ARGUMENT", `${machine.vcpus} is not a number of virtual CPUs`);
}

async function createMemory(spec: VmSpec): Promise<void> {
  const { file } = spec.memory;
  try {
    const handle = await open(file, "wx", 0o600);
    try {
      await handle.truncate(spec.machine.memoryBytes);
    } finally {
      await handle.close();
    }
  } catch (e) {
    if (errnoOf(e) === "EEXIST")
      throw new AenvError("CONFLICT", `the memory file ${file} exists already`, { cause: e });
    throw AenvError.from(e, `create the memory file ${file}`);
  }
}

async function checkMemory(spec: VmSpec): Promise<void> {
  const { file } = spec.memory;
  let size: number;
  try {
    ({ size } = await stat(file));
  } catch (e) {
    if (errnoOf(e) === "ENOENT")
      throw new AenvError("NOT_FOUND", `the memory file ${file} does not exist`, { cause: e });
    throw AenvError.from(e, `read the memory file ${file}`);
  }
  if (size !== spec.machine.memoryBytes)
    throw new AenvError("CORRUPT", `${file} has ${size} bytes, the machine ${spec.machine.memoryBytes}`);
}
