import { chmod, chown, mkdtemp, open, rm, stat } from "node:fs/promises";
import { dirname } from "node:path";
import { AenvError, type Bytes, errnoOf, type Logger, mib, newRunId, silentLogger, sleep } from "@aenv/base";
import { type Cgroups, isAlive, type ProcIdentity, readTail } from "@aenv/host";
import {
  CONSOLE_LOG_BYTES,
  type Machine,
  type Probe,
  type ProcExit,
  type Spawner,
  type Vm,
  type VmExit,
  type VmHandle,
  type VmmCapabilities,
  type VmmDriver,
  type VmSpec,
} from "@aenv/vmm";
import { hostTscKhz } from "./host-clock.ts";
import { checkMachine, overheadBytes, qemuArgv, type QemuTraits, runPaths } from "./command-line.ts";
import { rotateConsole } from "./console.ts";
import { exitCause, isDiskFull } from "./exit-cause.ts";
import { kvmAccess, PROBE_CMDLINE, PROBE_MARK, type ProbeGuest, probeAcceleration } from "./probe.ts";
import { Qmp } from "./qmp.ts";
import { type QemuFacts, QemuVm } from "./qemu-vm.ts";
import { DEFAULT_BINARY, type QemuVersion, qemuVersion } from "./version.ts";

export interface QemuDriverOptions {
  spawner: Spawner;
  /** Tells an out-of-memory kill from another one. */
  cgroups?: Pick<Cgroups, "stats">;
  logger?: Logger;
  /** Default: qemu-system-x86_64 of the system. */
  binary?: string;
  /** auto: KVM where a probe guest boots under it, else emulation. */
  accel?: "auto" | "kvm" | "tcg";
  /** What the probe boots. Its init prints AENV-PROBE-OK and powers off when the kernel command line has `aenv.probe`. */
  probeGuest?: ProbeGuest;
  /** Remembers the verdict for this host. */
  probeCache?: string;
}

/** QEMU answers 40-50 ms after its start on an idle host; twenty at a time on two cores take half a second. */
const START_DEADLINE_MS = 20_000;
const CONNECT_POLL_MS = 3;
const ADOPT_DEADLINE_MS = 10_000;
/** How long an exit may take to be reported by the spawner. */
const LATE_EXIT_MS = 1_000;
const ROTATE_PERIOD_MS = 5_000;
const MAX_RUN_DIR_BYTES = 80;
/** Exits of processes that no Vm of this driver claimed: those that ended while the server was away. */
const MAX_UNCLAIMED = 1024;

const KVM_DEVICE = "/dev/kvm";
/** The probe guest runs as nobody. */
const PROBE_UID = 65534;
const PROBE_MEMORY = mib(128);

/** Groups of memory files that an older QEMU must be able to open for writing: one per file, in a range of our own. */
const LEGACY_GID_BASE = 1_500_000_000;
const LEGACY_GID_COUNT = 2 ** 20;

const keyOf = (id: ProcIdentity): string => `${id.pid}:${id.startTicks}`;

export class QemuDriver implements VmmDriver {
  readonly name = "qemu";
  readonly #options: QemuDriverOptions;
  readonly #binary: string;
  readonly #logger: Logger;
  readonly #version: QemuVersion;
  readonly #vms = new Map<string, QemuVm>();
  readonly #unclaimed = new Map<string, ProcExit>();
  readonly #offExit: () => void;
  readonly #rotateTimer: NodeJS.Timeout;
  #probing: Promise<Probe> | undefined;

  private constructor(options: QemuDriverOptions, version: QemuVersion) {
    this.#options = options;
    this.#version = version;
    this.#binary = options.binary ?? DEFAULT_BINARY;
    this.#logger = options.logger ?? silentLogger;
    this.#offExit = options.spawner.onExit((e) => this.#spawnerExit(e));
    this.#rotateTimer = setInterval(() => this.#rotate(), ROTATE_PERIOD_MS);
    this.#rotateTimer.unref();
  }

  /** Throws UNAVAILABLE when QEMU is not installed or too old. */
  static async open(options: QemuDriverOptions, signal: AbortSignal): Promise<QemuDriver> {
    const version = await qemuVersion(options.binary ?? DEFAULT_BINARY, signal);
    if (!version.readOnlyMemory)
      (options.logger ?? silentLogger).warn(
        { version: version.text },
        "this QEMU maps snapshots writable by the VMM: a VMM that a guest took over could alter its siblings; install 8.2 or newer",
      );
    return new QemuDriver(options, version);
  }

  get capabilities(): VmmCapabilities {
    return { mappings: true, readOnlyMemoryFile: this.#version.readOnlyMemory, freePageReporting: false };
  }

  probe(signal: AbortSignal): Promise<Probe> {
    this.#probing ??= this.#probe(signal).catch((e: unknown) => {
      this.#probing = undefined;
      throw e;
    });
    return this.#probing;
  }

  async boot(spec: VmSpec, signal: AbortSignal): Promise<Vm> {
    if (spec.memory.mode !== "create") throw new AenvError("INVALID_ARGUMENT", "a cold boot creates its memory file");
    checkMachine(spec.machine);
    await createMemory(spec);
    try {
      return await this.#start(spec, [], signal);
    } catch (e) {
      await rm(spec.memory.file, { force: true });
      throw e;
    }
  }

  async prepare(spec: VmSpec, signal: AbortSignal): Promise<Vm> {
    if (spec.memory.mode !== "map") throw new AenvError("INVALID_ARGUMENT", "a waiting VM maps a memory file");
    checkMachine(spec.machine);
    const groups = await memoryGroups(spec, this.#version.readOnlyMemory);
    return await this.#start(spec, groups, signal);
  }

  async adopt(handle: VmHandle, signal: AbortSignal): Promise<Vm> {
    const { run, identity } = handle;
    if (handle.v !== 1 || handle.driver !== this.name)
      throw new AenvError("INVALID_ARGUMENT", `the handle of ${run} is not one of this driver`);
    const known = this.#vms.get(keyOf(identity));
    if (known) return known;
    const facts = handle.data as unknown as QemuFacts;
    if (!isAlive(identity)) {
      const exit = await this.#lateExit(identity, facts);
      throw new AenvError("NOT_FOUND", `VM ${run} is gone: ${exit.detail}`, { data: { exit } });
    }
    const vm = this.#track(handle, facts);
    try {
      const until = AbortSignal.any([signal, AbortSignal.timeout(ADOPT_DEADLINE_MS)]);
      vm.attach(await this.#connect(vm, facts, until));
      return vm;
    } catch (e) {
      vm.detach();
      throw AenvError.from(e, `adopt VM ${run}`);
    }
  }

  overheadBytes(machine: Machine): Bytes {
    // The larger of the two: the group is made before the acceleration is known.
    return overheadBytes(machine, "tcg");
  }

  async close(): Promise<void> {
    this.#offExit();
    clearInterval(this.#rotateTimer);
    for (const vm of this.#vms.values()) vm.detach();
  }

  async #start(spec: VmSpec, groups: number[], signal: AbortSignal): Promise<QemuVm> {
    if (Buffer.byteLength(spec.runDir) > MAX_RUN_DIR_BYTES)
      throw new AenvError("INVALID_ARGUMENT", `the run folder's path is longer than ${MAX_RUN_DIR_BYTES} bytes`);
    const { accel } = await this.probe(signal);
    if (accel === "kvm") groups = [...groups, ...(await kvmAccess(KVM_DEVICE)).groups];
    return await this.#spawn(spec, qemuArgv(this.#traits(accel), spec), groups, signal);
  }

  async #spawn(spec: VmSpec, argv: string[], groups: number[], signal: AbortSignal): Promise<QemuVm> {
    const facts: QemuFacts = {
      runDir: spec.runDir,
      consoleLog: spec.consoleLog,
      vmmLog: `${dirname(spec.consoleLog)}/vmm.log`,
      memoryFile: spec.memory.file,
      memoryBytes: spec.machine.memoryBytes,
      ...(spec.cgroup === undefined ? {} : { cgroup: spec.cgroup }),
    };
    const identity = await this.#options.spawner.spawn(
      {
        run: spec.run,
        argv,
        env: {},
        cwd: spec.runDir,
        uid: spec.uid,
        gid: spec.gid,
        groups,
        ...(spec.netns === undefined ? {} : { netns: spec.netns }),
        ...(spec.cgroup === undefined ? {} : { cgroup: spec.cgroup }),
        logPath: facts.vmmLog,
        stdoutPath: spec.consoleLog,
        maxFileBytes: CONSOLE_LOG_BYTES,
      },
      signal,
    );
    const vm = this.#track({ v: 1, driver: this.name, run: spec.run, identity, data: {} }, facts);
    try {
      const until = AbortSignal.any([signal, AbortSignal.timeout(START_DEADLINE_MS)]);
      const qmp = await this.#connect(vm, facts, until);
      vm.attach(qmp);
      if (spec.memory.mode === "map")
        await qmp.execute("migrate-set-capabilities", { capabilities: [{ capability: "events", state: true }] }, until);
      return vm;
    } catch (e) {
      // QEMU listens before it has read everything it was given: one that fails on that hangs up, and then ends.
      const early = signal.aborted ? undefined : await Promise.race([vm.exited, sleep(LATE_EXIT_MS)]);
      await vm.kill();
      if (!early) throw AenvError.from(e, `start VM ${spec.run}`);
      const log = (await readTail(facts.vmmLog, 2000)).trim();
      throw new AenvError("VMM_FAILED", `QEMU did not start: ${log || early.detail}`, {
        cause: e,
        data: { exit: early },
      });
    }
  }

  /** Waits for QEMU to listen; rejects when the process ends first. */
  async #connect(vm: QemuVm, facts: QemuFacts, signal: AbortSignal): Promise<Qmp> {
    const path = runPaths(facts.runDir).qmp;
    for (;;) {
      try {
        return await Qmp.connect(path, signal);
      } catch (e) {
        const retry = errnoOf(e) === "ENOENT" || errnoOf(e) === "ECONNREFUSED";
        if (!retry) throw e;
      }
      const end = await Promise.race([sleep(CONNECT_POLL_MS, signal), vm.exited]);
      if (end) throw new AenvError("VMM_FAILED", end.detail);
    }
  }

  #track(handle: VmHandle, facts: QemuFacts): QemuVm {
    const key = keyOf(handle.identity);
    const vm = new QemuVm(handle.run, handle.identity, facts, {
      logger: this.#logger,
      cgroups: this.#options.cgroups,
      onGone: () => this.#vms.delete(key),
    });
    this.#vms.set(key, vm);
    const exit = this.#claim(handle.identity);
    if (exit) vm.spawnerExit(exit);
    return vm;
  }

  #spawnerExit(exit: ProcExit): void {
    const vm = this.#vms.get(keyOf(exit.identity));
    if (vm) {
      this.#options.spawner.acknowledge(exit);
      vm.spawnerExit(exit);
      return;
    }
    this.#unclaimed.set(keyOf(exit.identity), exit);
    const oldest = this.#unclaimed.values().next().value;
    if (this.#unclaimed.size > MAX_UNCLAIMED && oldest) this.#claim(oldest.identity);
  }

  #claim(identity: ProcIdentity): ProcExit | undefined {
    const exit = this.#unclaimed.get(keyOf(identity));
    if (exit) {
      this.#unclaimed.delete(keyOf(identity));
      this.#options.spawner.acknowledge(exit);
    }
    return exit;
  }

  async #lateExit(identity: ProcIdentity, facts: QemuFacts): Promise<VmExit> {
    const until = performance.now() + LATE_EXIT_MS;
    let exit = this.#claim(identity);
    while (!exit && performance.now() < until) {
      await sleep(CONNECT_POLL_MS);
      exit = this.#claim(identity);
    }
    const [console, log, diskFull] = await Promise.all([
      readTail(facts.consoleLog, 16_384),
      readTail(facts.vmmLog, 16_384),
      isDiskFull(dirname(facts.consoleLog)),
    ]);
    const oomKills =
      facts.cgroup === undefined ? 0 : ((await this.#options.cgroups?.stats(facts.cgroup))?.oomKills ?? 0);
    return exitCause({
      killed: false,
      ...(exit ? { code: exit.code, signal: exit.signal } : {}),
      oomKills,
      diskFull,
      console,
      log,
    });
  }

  async #probe(signal: AbortSignal): Promise<Probe> {
    const { accel = "auto", probeGuest, probeCache } = this.#options;
    const version = this.#version.text;
    if (accel !== "auto") return { accel, version, reason: `${accel} was chosen by configuration` };
    if (!probeGuest) throw new AenvError("INVALID_ARGUMENT", "acceleration auto needs a probe guest");
    return await probeAcceleration(
      {
        boot: (accel, until) => this.#bootProbe(accel, probeGuest, until),
        version,
        guest: probeGuest,
        cache: probeCache,
        logger: this.#logger,
      },
      signal,
    );
  }

  async #bootProbe(accel: "kvm" | "tcg", guest: ProbeGuest, signal: AbortSignal): Promise<void> {
    const runDir = await mkdtemp("/run/aenv-probe-");
    try {
      const spec: VmSpec = {
        run: newRunId(),
        machine: { vcpus: 1, memoryBytes: PROBE_MEMORY, cmdline: PROBE_CMDLINE, ...guest },
        runDir,
        uid: PROBE_UID,
        gid: PROBE_UID,
        memory: { file: `${runDir}/memory`, mode: "create" },
        consoleLog: `${runDir}/console.log`,
      };
      await chown(runDir, PROBE_UID, PROBE_UID);
      await createMemory(spec);
      const groups = accel === "kvm" ? (await kvmAccess(KVM_DEVICE)).groups : [];
      const vm = await this.#spawn(spec, qemuArgv(this.#traits(accel), spec), groups, signal);
      try {
        const end = await untilAborted(vm.exited, signal);
        const console = await readTail(spec.consoleLog, CONSOLE_LOG_BYTES);
        if (!console.includes(PROBE_MARK)) throw new AenvError("VMM_FAILED", end.detail);
      } finally {
        await vm.kill();
      }
    } finally {
      await rm(runDir, { recursive: true, force: true });
    }
  }

  #traits(accel: "kvm" | "tcg"): QemuTraits {
    return { binary: this.#binary, accel, readOnlyMemory: this.#version.readOnlyMemory, tscKhz: hostTscKhz() };
  }

  #rotate(): void {
    for (const vm of this.#vms.values())
      rotateConsole(vm.consoleLog).catch((e: unknown) =>
        this.#logger.warn({ run: vm.handle.run, error: String(e) }, "the console log could not be moved"),
      );
  }
}

function untilAborted<T>(promise: Promise<T>, signal: AbortSignal): Promise<T> {
  return new Promise((resolve, reject) => {
    const abort = (): void => reject(signal.reason as Error);
    if (signal.aborted) return abort();
    signal.addEventListener("abort", abort, { once: true });
    void promise.then(resolve, reject).finally(() => signal.removeEventListener("abort", abort));
  });
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
    await chown(file, spec.uid, spec.gid);
  } catch (e) {
    if (errnoOf(e) === "EEXIST")
      throw new AenvError("CONFLICT", `the memory file ${file} exists already`, { cause: e });
    throw AenvError.from(e, `create the memory file ${file}`);
  }
}

/** Checks the file and returns the groups that the VMM needs to read it. */
async function memoryGroups(spec: VmSpec, readOnly: boolean): Promise<number[]> {
  const { file } = spec.memory;
  let info;
  try {
    info = await stat(file);
  } catch (e) {
    if (errnoOf(e) === "ENOENT")
      throw new AenvError("NOT_FOUND", `the memory file ${file} does not exist`, { cause: e });
    throw AenvError.from(e, `read the memory file ${file}`);
  }
  if (info.size !== spec.machine.memoryBytes)
    throw new AenvError("CORRUPT", `${file} has ${info.size} bytes, the machine ${spec.machine.memoryBytes}`);
  if (!readOnly) {
    // It opens the file for writing though it maps it privately.
    const gid = LEGACY_GID_BASE + (info.ino % LEGACY_GID_COUNT);
    await chown(file, info.uid, gid);
    await chmod(file, (info.mode & 0o777) | 0o060);
    return [gid];
  }
  const worldReadable = (info.mode & 0o004) !== 0;
  return worldReadable || info.uid === spec.uid || info.gid === 0 ? [] : [info.gid];
}
