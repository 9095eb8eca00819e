/**
 * A host that is not there: what VMMs, disks, slots and control groups exist outlives the server's life that made them.
 * One `Life` is one start of the server; `crash()` ends it in the middle of whatever it does.
 */
import { mkdir, mkdtemp, readdir, readFile, rm, writeFile } from "node:fs/promises";
import { tmpdir } from "node:os";
import { dirname, join } from "node:path";
import { isDeepStrictEqual } from "node:util";
import { AenvError, type Clock, type LayerId, mib, silentLogger } from "@aenv/base";
import type { HookResult, HooksRequest } from "@aenv/guest";
import { localMemory } from "@aenv/memory";
import type { EgressPolicy } from "@aenv/network";
import { State } from "@aenv/state";
import { FakeDriver, FakeWorld, type Vm, type VmHandle, type VmSpec } from "@aenv/vmm";
import type { EngineConfigInput } from "./config.ts";
import { Engine } from "./engine.ts";
import type { DiskSpec, GuestInit, GuestPort, LayerPortRef, Slot } from "./ports.ts";

export class ManualClock implements Clock {
  #now = 1_700_000_000_000;
  #timers: { at: number; fn: () => void }[] = [];

  now(): number {
    return this.#now;
  }
  mono(): number {
    return this.#now;
  }
  after(ms: number, fn: () => void): () => void {
    const timer = { at: this.#now + ms, fn };
    this.#timers.push(timer);
    return () => {
      this.#timers = this.#timers.filter((t) => t !== timer);
    };
  }
  /** Timers due meanwhile run in the order of their time, each at its time. */
  advance(ms: number): void {
    const end = this.#now + ms;
    for (;;) {
      const next = this.#timers.filter((t) => t.at <= end).sort((a, b) => a.at - b.at)[0];
      if (!next) break;
      this.#timers = this.#timers.filter((t) => t !== next);
      this.#now = Math.max(this.#now, next.at);
      next.fn();
    }
    this.#now = end;
  }
}

export type GuestMood = "well" | "silent" | "garbage";

const never = (): Promise<never> => new Promise(() => {});

export class World implements AsyncDisposable {
  readonly clock = new ManualClock();
  readonly vmms = new FakeWorld();
  readonly disks = new Map<string, DiskSpec>();
  readonly slots = new Set<number>();
  readonly cgroups = new Set<string>();
  readonly inits: { host: string; body: GuestInit; currentToken?: string }[] = [];
  /** So many changes of a policy fail. */
  policyFails = 0;
  readonly trusted: { host: string; authority: string; token: string }[] = [];
  readonly policies = new Map<number, EgressPolicy>();
  /** How the agents of guests behave that answer from now on. */
  mood: GuestMood = "well";
  /** What the hooks of the guests come to; undefined: they have none. */
  hooks: ((request: HooksRequest) => HookResult[]) | undefined;
  readonly hooksRun: HooksRequest[] = [];
  /** Runs whose agent never answers. */
  readonly deaf = new Set<string>();
  epoch = "e1";
  /** The state's disk does not take writes: sqlite's code for it, or 0. */
  storeFails = 0;
  /** What the data folder's disk has left. */
  freeBytes: number = mib(10_000);
  slotLimit = 64;
  /** What blockd is doing to disks. */
  readonly changing = new Set<Promise<unknown>>();
  /** The next sealDisk calls fail. */
  sealFails = 0;
  /** The next imports fail and leave a part, or never end. */
  importFails = 0;
  importParks = false;
  /** The next restackDisk calls fail. */
  restackFails = 0;
  /** The next closeDisk calls fail. */
  closeDiskFails = 0;
  readonly home: string;
  readonly runRoot: string;
  /** Which run sits behind a slot's address. */
  readonly behind = new Map<string, string>();
  #lives: Life[] = [];

  private constructor(dir: string) {
    this.home = join(dir, "home");
    this.runRoot = join(dir, "run");
  }

  /** `parent`: where its files are. */
  static async make(parent = tmpdir()): Promise<World> {
    const world = new World(await mkdtemp(join(parent, "aenv-engine-")));
    await mkdir(world.home);
    return world;
  }

  /** Starts the server. */
  async start(options: StartOptions = {}): Promise<Life> {
    const life = new Life(this, options);
    this.#lives.push(life);
    await life.open();
    return life;
  }

  /** A template that is there already, as if built in an earlier life. */
  async addTemplate(life: Life, name: string): Promise<void> {
    const raw = join(this.home, "base.raw");
    await writeFile(raw, "image");
    const baseLayer = await life.engine.importLayer(raw, new AbortController().signal);
    await life.engine.buildTemplate(
      { name, baseLayer, sizeBytes: mib(64), machine: MACHINE },
      new AbortController().signal,
    );
  }

  /** Everything on the host; compare before and after. */
  async inventory(): Promise<Record<string, string[]>> {
    const dir = async (path: string): Promise<string[]> => (await readdir(path).catch((): string[] => [])).sort();
    return {
      vmms: [...this.vmms.alive].sort(),
      disks: [...this.disks.keys()].sort(),
      slots: [...this.slots].map(String).sort(),
      cgroups: [...this.cgroups].sort(),
      runDirs: await dir(join(this.runRoot, "r")),
      dataDirs: await dir(join(this.home, "runs")),
      snapshots: await dir(join(this.home, "snapshots")),
      layers: await dir(join(this.home, "layers")),
      memory: await dir(join(this.home, "memory")),
    };
  }

  async [Symbol.asyncDispose](): Promise<void> {
    for (const life of this.#lives) await life.end();
    await rm(join(this.home, ".."), { recursive: true, force: true });
  }
}

export const MACHINE = { vcpus: 1, memoryBytes: mib(16), kernel: "/kernel", initrd: "/initrd", cmdline: "" };
/** Tests that are not about pools see cold launches only. */
export const NO_SPARES: NonNullable<EngineConfigInput["pool"]> = {
  pinned: [],
  watermarks: { hot: { low: 0, high: 0 }, prepared: { low: 0, high: 0 } },
  perTemplate: {},
};

export interface StartOptions {
  onStep?: (name: string) => Promise<void> | void;
  config?: Partial<EngineConfigInput>;
}

export class Life {
  readonly driver: FakeDriver;
  readonly state: State;
  readonly #world: World;
  readonly #options: StartOptions;
  #engine: Engine | undefined;
  #dead = false;

  constructor(world: World, options: StartOptions) {
    this.#world = world;
    this.#options = options;
    this.driver = new FakeDriver(world.vmms);
    const beforeWrite = (): void => {
      if (world.storeFails !== 0)
        throw Object.assign(new Error("database or disk is full"), { errcode: world.storeFails });
    };
    this.state = State.open(join(world.home, "state.db"), world.clock, { beforeWrite });
  }

  get engine(): Engine {
    if (!this.#engine) throw new Error("the server is not up");
    return this.#engine;
  }

  /** The process is gone between two instructions: nothing of this life has any effect from now on. */
  async crash(): Promise<void> {
    this.#dead = true;
    await this.driver.close();
    this.state.close();
  }

  /** A clean stop, unless it crashed. */
  async end(): Promise<void> {
    if (this.#dead) return;
    await this.#engine?.close();
    this.#dead = true;
    this.state.close();
  }

  async open(): Promise<void> {
    const w = this.#world;
    const { onStep, config } = this.#options;
    this.#engine = await Engine.open({
      state: this.state,
      clock: w.clock,
      logger: silentLogger,
      blockd: this.#alive(this.#blockd()),
      driver: this.#alive(this.#driver()),
      memory: this.#alive(localMemory),
      network: this.#alive(this.#network()),
      cgroups: this.#alive(this.#cgroups()),
      guestFactory: ({ host }) => this.#alive(this.#guest(host)),
      freeBytes: () => w.freeBytes,
      makeAuthority: (name) => ({ cert: `certificate of ${name}`, key: "key" }),
      config: { home: w.home, instance: "abcd", runRoot: w.runRoot, pool: NO_SPARES, ...config },
      ...(onStep === undefined ? {} : { onStep: (name) => (this.#dead ? never() : onStep(name)) }),
    });
  }

  /** Calls of a dead server never happen. */
  #alive<T extends object>(port: T): T {
    return new Proxy(port, {
      get: (target, name) => {
        const value: unknown = Reflect.get(target, name);
        if (typeof value !== "function") return value;
        return (...args: unknown[]): unknown => (this.#dead ? never() : Reflect.apply(value, target, args));
      },
    });
  }

  #driver() {
    const { driver } = this;
    const behind = this.#world.behind;
    const note = async (spec: VmSpec, vm: Promise<Vm>): Promise<Vm> => {
      behind.set(spec.netns ?? "", spec.run);
      return await vm;
    };
    return {
      name: driver.name,
      capabilities: driver.capabilities,
      probe: (s: AbortSignal) => driver.probe(s),
      boot: (spec: VmSpec, s: AbortSignal) => note(spec, driver.boot(spec, s)),
      prepare: (spec: VmSpec, s: AbortSignal) => note(spec, driver.prepare(spec, s)),
      adopt: (handle: VmHandle, s: AbortSignal) => driver.adopt(handle, s),
      overheadBytes: driver.overheadBytes.bind(driver),
      close: () => driver.close(),
    };
  }

  #blockd() {
    const w = this.#world;
    // A change goes on when its caller dies, and who asks what there is waits for it.
    const change = async <T>(fn: () => Promise<T>): Promise<T> => {
      const work = fn();
      w.changing.add(work);
      try {
        return await work;
      } finally {
        w.changing.delete(work);
      }
    };
    return {
      ping: async () => ({ epoch: w.epoch }),
      createDisk: (spec: DiskSpec) =>
        change(async () => {
          await mkdir(spec.upperDir);
          w.disks.set(spec.disk, spec);
        }),
      sealDisk: (disk: string, target: { id: LayerId; path: string }) =>
        change(async () => {
          const found = w.disks.get(disk);
          if (!found) throw new AenvError("NOT_FOUND", `disk ${disk} is not open`);
          if (w.sealFails > 0) {
            w.sealFails--;
            throw new AenvError("NO_SPACE", "the disk is full");
          }
          await writeFile(target.path, "sealed", { flag: "wx" });
          if (w.disks.get(disk) !== found) throw new AenvError("NOT_FOUND", `disk ${disk} was closed`);
          w.disks.set(disk, { ...found, layers: [...found.layers, { id: target.id, path: target.path }] });
          return { bytes: 6 };
        }),
      restackDisk: async (disk: string, from: readonly LayerPortRef[], to: readonly LayerPortRef[]) => {
        const found = w.disks.get(disk);
        if (!found) throw new AenvError("NOT_FOUND", `disk ${disk} is not open`);
        if (w.restackFails > 0) {
          w.restackFails--;
          throw new AenvError("UNAVAILABLE", "blockd is away");
        }
        if (!isDeepStrictEqual(found.layers, from)) throw new AenvError("CONFLICT", `disk ${disk} stands on others`);
        w.disks.set(disk, { ...found, layers: [...to] });
      },
      mergeLayers: async (layers: readonly LayerPortRef[], target: LayerPortRef) => {
        const content = await Promise.all(layers.map((l) => readFile(l.path, "utf8")));
        await mkdir(dirname(target.path));
        await writeFile(target.path, content.join("+"), { flag: "wx" });
        return { bytes: content.join("+").length };
      },
      closeDisk: async (disk: string) => {
        if (w.closeDiskFails > 0) {
          w.closeDiskFails--;
          throw new AenvError("UNAVAILABLE", "blockd is away");
        }
        w.disks.delete(disk);
      },
      listDisks: async () => {
        await Promise.allSettled(w.changing);
        return [...w.disks.values()];
      },
      importRaw: async (_raw: string, target: { path: string }) => {
        if (w.importFails > 0) {
          await writeFile(`${target.path}.tmp-1`, "a part");
          w.importFails--;
          if (w.importParks) await never();
          throw new AenvError("NO_SPACE", "the disk is full");
        }
        await writeFile(target.path, "imported");
        return { bytes: 8 };
      },
    };
  }

  #network() {
    const w = this.#world;
    const held = new Map<number, Slot>();
    const slot = (index: number): Slot => ({
      index,
      netns: `ns${index}`,
      tap: "tap0",
      hostIp: `ns${index}`,
      uid: process.getuid?.() ?? 0,
      gid: process.getgid?.() ?? 0,
    });
    const claim = (index: number): Slot => {
      const made = slot(index);
      held.set(index, made);
      w.slots.add(index);
      return made;
    };
    return {
      ensure: async () => {},
      acquire: async (signal?: AbortSignal) => {
        signal?.throwIfAborted();
        for (let index = 0; index < w.slotLimit; index++) if (!w.slots.has(index)) return claim(index);
        throw new AenvError("SLOT_EXHAUSTED", "no slots");
      },
      release: async (s: Slot) => {
        if (held.get(s.index) !== s) throw new AenvError("CONFLICT", `slot ${s.index} is not held`);
        held.delete(s.index);
        w.slots.delete(s.index);
        w.policies.delete(s.index);
      },
      adopt: (indexes: readonly number[]) => indexes.filter((i) => w.slots.has(i)).map(claim),
      sweep: async () => {
        const freed = [...w.slots].filter((i) => !held.has(i));
        for (const i of freed) w.slots.delete(i);
        return { freed, failed: [] };
      },
      setPolicy: async (s: Slot, policy: EgressPolicy) => {
        if (w.policyFails > 0) {
          w.policyFails--;
          throw new AenvError("UNAVAILABLE", "the rules could not be set");
        }
        w.policies.set(s.index, policy);
      },
    };
  }

  #cgroups() {
    const w = this.#world;
    return {
      create: async (name: string) => void w.cgroups.add(name),
      kill: async (name: string) => {
        const run = name.split("/")[1] ?? "";
        if (w.vmms.alive.includes(run)) await new FakeDriver(w.vmms).crash(run, "killed");
      },
      remove: async (name: string) => void w.cgroups.delete(name),
      list: async (parent: string) => [...w.cgroups].filter((n) => n.startsWith(`${parent}/`)),
    };
  }

  #guest(host: string): GuestPort {
    const w = this.#world;
    const answer = async (signal: AbortSignal): Promise<void> => {
      signal.throwIfAborted();
      if (w.mood === "garbage") throw new AenvError("GUEST_FAILED", "the guest sent <html>", { data: { status: 200 } });
      const run = w.behind.get(host);
      if (w.mood === "silent" || run === undefined || w.deaf.has(run) || !w.vmms.alive.includes(run))
        await new Promise((_, reject) => {
          signal.addEventListener("abort", () => reject(signal.reason as Error), { once: true });
        });
    };
    return {
      health: async (signal) => {
        await answer(signal);
        return true;
      },
      waitReady: answer,
      init: async (body, signal, currentToken) => {
        await answer(signal);
        w.inits.push({ host, body, ...(currentToken === undefined ? {} : { currentToken }) });
        return { hooks: w.hooks !== undefined };
      },
      trust: async (authority, token, signal) => {
        await answer(signal);
        w.trusted.push({ host, authority, token });
      },
      hooks: async (request, _options, signal) => {
        await answer(signal);
        w.hooksRun.push(request);
        return w.hooks?.(request) ?? [];
      },
      exec: async (_spec, signal) => {
        await answer(signal);
        return { exitCode: 0, stdout: "", stderr: "", status: "exit status 0" };
      },
      metrics: async (signal) => {
        await answer(signal);
        return {
          ts: 1,
          cpu_count: 1,
          cpu_used_pct: 2,
          mem_total: 100,
          mem_used: 50,
          mem_cache: 10,
          mem_total_mib: 0,
          mem_used_mib: 0,
          disk_used: 1,
          disk_total: 2,
        };
      },
      close: () => {},
    };
  }
}

/** Lets what is runnable run, until the condition holds. */
export async function until(condition: () => boolean | Promise<boolean>, what: string): Promise<void> {
  const end = performance.now() + 60_000;
  while (!(await condition())) {
    if (performance.now() > end) throw new Error(`never: ${what}`);
    await new Promise((resolve) => setImmediate(resolve));
  }
}
