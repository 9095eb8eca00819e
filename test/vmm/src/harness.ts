import assert from "node:assert/strict";
import { type ChildProcess, spawn } from "node:child_process";
import { randomBytes } from "node:crypto";
import { once } from "node:events";
import { existsSync } from "node:fs";
import { chmod, chown, mkdir, mkdtemp, open, readFile, rm } from "node:fs/promises";
import { tmpdir } from "node:os";
import { join, resolve } from "node:path";
import { type Logger, mib, newRunId, silentLogger, sleep } from "@aenv/base";
import { Cgroups, isAlive } from "@aenv/host";
import { VmdClient, type Vm, type VmSpec } from "@aenv/vmm";
import type { ContractHarness, GuestEnd } from "@aenv/vmm/contract-suite";
import { QemuDriver, type QemuDriverOptions } from "@aenv/vmm-qemu";
import { testGuest, tickSum, ticks } from "./guest.ts";

const root = resolve(import.meta.dirname, "../../..");
const never = new AbortController().signal;
const POLL_MS = 10;
/** A guest makes a step in 0.1 s; hundreds of times that on a busy host. */
const STEP_DEADLINE_MS = 120_000;
const CHUNK_BYTES = 1024 * 1024;

const ENDS: Record<GuestEnd, string> = {
  "guest-shutdown": "poweroff",
  "guest-reset": "reboot",
  "guest-panic": "panic",
};

export interface HarnessOptions {
  binary?: string;
  accel?: QemuDriverOptions["accel"];
  logger?: Logger;
  memoryMiB?: number;
}

/** A host of VMs for one test: an own vmd, own control groups, own folder; everything is gone after disposal. */
export class QemuHarness implements ContractHarness {
  readonly dir: string;
  readonly cgroups = new Cgroups();
  /** Top-level control group of this harness. */
  readonly group = `aenv-t${randomBytes(4).toString("hex")}`;
  readonly base: string;
  vmd: ChildProcess;
  client: VmdClient;
  driver: QemuDriver;
  readonly #options: HarnessOptions;
  /** What of a line the parent had printed when it was captured, by memory file. */
  readonly #printed = new Map<string, string>();
  readonly #seen = new Map<string, number>();
  #uid = 250_000;

  private constructor(
    base: string,
    dir: string,
    parts: { vmd: ChildProcess; client: VmdClient; driver: QemuDriver },
    options: HarnessOptions,
  ) {
    this.base = base;
    this.dir = dir;
    this.#options = options;
    this.vmd = parts.vmd;
    this.client = parts.client;
    this.driver = parts.driver;
  }

  static async open(options: HarnessOptions = {}): Promise<QemuHarness> {
    const base = await mkdtemp(join(tmpdir(), "aenv-vmm-"));
    await chmod(base, 0o711);
    const dir = join(base, "data");
    await mkdir(dir);
    const vmd = await startVmd(base);
    const client = new VmdClient(`${base}/vmd.sock`);
    const driver = await openDriver(base, client, options);
    return new QemuHarness(base, dir, { vmd, client, driver }, options);
  }

  async restart(): Promise<QemuDriver> {
    this.driver = await openDriver(this.base, this.client, this.#options);
    return this.driver;
  }

  async spec(memory: VmSpec["memory"], vcpus = 1, cmdline = ""): Promise<VmSpec> {
    const run = newRunId();
    const uid = this.#uid++;
    const runDir = `${this.base}/${run}`;
    await mkdir(runDir);
    await chown(runDir, uid, uid);
    const memoryBytes = mib(this.#options.memoryMiB ?? 128);
    const machine = { vcpus, memoryBytes, ...(await testGuest()), cmdline };
    const cgroup = `${this.group}/${run}`;
    await this.cgroups.create(cgroup, {
      memoryBytes: memoryBytes + this.driver.overheadBytes(machine),
      cpuWeight: 100,
      pids: 64 + vcpus,
    });
    return { run, machine, runDir, uid, gid: uid, cgroup, memory, consoleLog: `${this.base}/${run}.console` };
  }

  async console(spec: VmSpec): Promise<string> {
    const printed = this.#printed.get(spec.memory.file) ?? "";
    return printed + (existsSync(spec.consoleLog) ? await readFile(spec.consoleLog, "latin1") : "");
  }

  async until(spec: VmSpec, what: RegExp): Promise<string> {
    const deadline = performance.now() + STEP_DEADLINE_MS;
    for (;;) {
      const text = await this.console(spec);
      if (what.test(text)) return text;
      assert.ok(performance.now() < deadline, `no ${what} on the console of ${spec.run}: ${text.slice(-500)}`);
      await sleep(POLL_MS);
    }
  }

  async step(spec: VmSpec): Promise<number> {
    const seen = this.#seen.get(spec.run) ?? 0;
    const deadline = performance.now() + STEP_DEADLINE_MS;
    for (;;) {
      const all = ticks(await this.console(spec));
      const next = all[seen];
      if (next) {
        this.#seen.set(spec.run, seen + 1);
        assert.equal(next.sum, tickSum(next.tick), `memory of ${spec.run} at tick ${next.tick}`);
        return next.tick;
      }
      assert.ok(performance.now() < deadline, `no step of ${spec.run}: ${(await this.console(spec)).slice(-500)}`);
      await sleep(POLL_MS);
    }
  }

  async progress(spec: VmSpec): Promise<number> {
    const all = ticks(await this.console(spec));
    this.#seen.set(spec.run, all.length);
    return all.at(-1)?.tick ?? 0;
  }

  /** A plain copy of all guest memory, zero chunks as holes. */
  async captureMemory(vm: Vm, spec: VmSpec, target: string): Promise<void> {
    const from = await open(`/proc/${vm.identity.pid}/mem`, "r");
    const to = await open(target, "wx", 0o444);
    const zero = Buffer.alloc(CHUNK_BYTES);
    const chunk = Buffer.alloc(CHUNK_BYTES);
    try {
      await to.truncate(spec.machine.memoryBytes);
      for (const m of await vm.mappings(never)) {
        for (let at = 0; at < m.length; at += CHUNK_BYTES) {
          const { bytesRead } = await from.read(chunk, 0, CHUNK_BYTES, m.hostAddress + BigInt(at));
          assert.equal(bytesRead, CHUNK_BYTES);
          if (!chunk.equals(zero)) await to.write(chunk, 0, CHUNK_BYTES, m.guestOffset + at);
        }
      }
    } finally {
      await from.close();
      await to.close();
    }
    await this.continues(spec, target);
  }

  /** Whoever maps the file from now on goes on where this guest stands. */
  async continues(spec: VmSpec, memoryFile: string): Promise<void> {
    const text = await this.console(spec);
    this.#printed.set(memoryFile, text.slice(text.lastIndexOf("\n") + 1));
  }

  async crash(vm: Vm): Promise<void> {
    process.kill(vm.identity.pid, "SIGKILL");
    while (isAlive(vm.identity)) await sleep(POLL_MS);
  }

  async bootAndEnd(end: GuestEnd): Promise<Vm> {
    const memory = { file: `${this.dir}/end.memory`, mode: "create" } as const;
    return await this.driver.boot(await this.spec(memory, 1, `test.end=${ENDS[end]}`), never);
  }

  async alive(): Promise<number> {
    return (await this.client.list(never)).length;
  }

  async [Symbol.asyncDispose](): Promise<void> {
    await this.driver.close();
    for (const name of await this.cgroups.list(this.group)) await this.cgroups.kill(name);
    await this.cgroups.remove(this.group);
    this.client.close();
    await stopVmd(this.vmd);
    await rm(this.base, { recursive: true, force: true });
  }
}

function openDriver(base: string, client: VmdClient, options: HarnessOptions): Promise<QemuDriver> {
  return QemuDriver.open(
    {
      spawner: client,
      cgroups: new Cgroups(),
      accel: options.accel ?? "tcg",
      logger: options.logger ?? silentLogger,
      probeCache: `${base}/probe.json`,
      ...(options.binary === undefined ? {} : { binary: options.binary }),
    },
    never,
  );
}

export async function startVmd(base: string): Promise<ChildProcess> {
  const socket = `${base}/vmd.sock`;
  const child = spawn(
    process.execPath,
    [join(root, "apps/vmd/src/main.ts"), "--socket", socket, "--log", `${base}/vmd.log`],
    { stdio: ["ignore", "inherit", "inherit"] },
  );
  const client = new VmdClient(socket);
  try {
    for (;;) {
      if (child.exitCode !== null) throw new Error(`vmd ended with ${child.exitCode}`);
      const up = await client.ping(never).catch(() => undefined);
      if (up?.identity.pid === child.pid) return child;
      await sleep(POLL_MS);
    }
  } finally {
    client.close();
  }
}

export async function stopVmd(child: ChildProcess, signal: NodeJS.Signals = "SIGTERM"): Promise<void> {
  if (child.exitCode !== null || child.signalCode !== null) return;
  const ended = once(child, "exit");
  child.kill(signal);
  await ended;
}
