/** A whole node without its HTTP server, for one test file: blockd, vmd, network, QEMU and the engine, with everything of its own. */
import { type ChildProcess, spawn } from "node:child_process";
import { randomBytes } from "node:crypto";
import { once } from "node:events";
import { chmod, mkdir, mkdtemp, readdir, rm } from "node:fs/promises";
import { tmpdir } from "node:os";
import { join, resolve } from "node:path";
import { type Logger, mib, type SandboxId, sleep, systemClock } from "@aenv/base";
import { BlockdClient } from "@aenv/block";
import { Engine, type EngineConfigInput, type LayerFile } from "@aenv/engine";
import { GuestClient } from "@aenv/guest";
import { Cgroups, run } from "@aenv/host";
import { type BaseManifest, ensureBaseDisk, ensureKernel, writeBaseManifest } from "@aenv/images";
import { Network } from "@aenv/network";
import { State } from "@aenv/state";
import { VmdClient } from "@aenv/vmm";
import { QemuDriver } from "@aenv/vmm-qemu";

const root = resolve(import.meta.dirname, "../../..");
const never = new AbortController().signal;
const POLL_MS = 20;
const SLOTS = 64;
const SCRIPT_MS = 120_000;

const warnings: Logger = {
  debug: () => {},
  info: (fields, message) => process.env["AENV_TEST_LOG"] && console.error("info:", message, JSON.stringify(fields)),
  warn: (fields, message) => console.error("warn:", message, JSON.stringify(fields)),
  error: (fields, message) => console.error("error:", message, JSON.stringify(fields)),
};

export const HOUR = 3_600_000;
const spares = { low: 0, high: 0 };
/** Without spares: what is there belongs to a sandbox. */
export const CONFIG: Partial<EngineConfigInput> = {
  pool: { pinned: [], watermarks: { hot: spares, prepared: spares }, perTemplate: {} },
};
export type Operation = "pause" | "resume" | "snapshot" | "fork" | "rewind";

/** What the script prints, in the sandbox; it must end well. */
export async function sh(engine: Engine, id: SandboxId, script: string, user = "user"): Promise<string> {
  const route = engine.route(id);
  if (!route) throw new Error(`sandbox ${id} does not run`);
  const { host, accessToken } = route;
  const guest = new GuestClient({ host, ...(accessToken === undefined ? {} : { accessToken }) });
  try {
    const command = { cmd: "/bin/bash", args: ["-c", script], user };
    const { exitCode, stdout, stderr } = await guest.exec(command, AbortSignal.timeout(SCRIPT_MS));
    if (exitCode !== 0) throw new Error(`${script} ended with ${exitCode}: ${stderr}`);
    return stdout.trim();
  } finally {
    guest.close();
  }
}

/** One life of the server. */
export interface Life {
  engine: Engine;
  state: State;
  driver: QemuDriver;
  network: Network;
  vmd: VmdClient;
  blockd: BlockdClient;
}

export class TestNode implements AsyncDisposable {
  readonly home: string;
  readonly instance: string;
  readonly cgroups = new Cgroups();
  readonly #children = new Map<"blockd" | "vmd", ChildProcess>();
  #life: Life | undefined;
  #manifest: BaseManifest | undefined;

  private constructor(home: string, instance = randomBytes(2).toString("hex")) {
    this.home = home;
    this.instance = instance;
  }

  /** `parent`: where its data folder is made. */
  static async make(parent = tmpdir()): Promise<TestNode> {
    const home = await mkdtemp(join(parent, "aenv-node-"));
    await chmod(home, 0o711);
    const node = new TestNode(home);
    await mkdir(node.runRoot, { mode: 0o755 });
    await mkdir(join(home, "log"));
    await node.startChild("blockd");
    await node.startChild("vmd");
    return node;
  }

  /** The node that another process made: only for its engine. */
  static attach(home: string, instance: string): TestNode {
    return new TestNode(home, instance);
  }

  get runRoot(): string {
    return `/run/aenv-${this.instance}`;
  }

  get life(): Life {
    if (!this.#life) throw new Error("the engine is not open");
    return this.#life;
  }

  async open(
    config: Partial<EngineConfigInput> = {},
    onStep: (name: string) => Promise<void> | void = () => {},
  ): Promise<Engine> {
    const state = State.open(join(this.home, "state.db"), systemClock, { room: true });
    const vmd = new VmdClient(`${this.runRoot}/vmd.sock`);
    const blockd = new BlockdClient(`${this.runRoot}/blockd.sock`);
    const driver = await QemuDriver.open(
      {
        spawner: vmd,
        cgroups: this.cgroups,
        accel: "tcg",
        logger: warnings,
        probeCache: join(this.home, "probe.json"),
      },
      never,
    );
    const network = await Network.open({ instance: this.instance, limit: SLOTS, dns: [], logger: warnings });
    const engine = await Engine.open({
      state,
      blockd,
      driver,
      network,
      cgroups: this.cgroups,
      guestFactory: (target) => new GuestClient(target),
      clock: systemClock,
      logger: warnings,
      config: { home: this.home, instance: this.instance, ...config },
      onStep,
    });
    this.#life = { engine, state, driver, network, vmd, blockd };
    return engine;
  }

  /** The server leaves in an orderly way; sandboxes stay. */
  async closeLife(): Promise<void> {
    const life = this.#life;
    this.#life = undefined;
    if (!life) return;
    await life.engine.close();
    await life.driver.close();
    await life.network.close();
    life.vmd.close();
    life.blockd.close();
    life.state.close();
  }

  async baseLayer(): Promise<LayerFile> {
    const disk = await ensureBaseDisk(join(root, ".cache"), () => {}, never);
    return await this.life.engine.importLayer(disk, never);
  }

  async buildTemplate(name: string, baseLayer: LayerFile, memoryMiB = 256): Promise<void> {
    const m = await this.#images();
    await this.life.engine.buildTemplate(
      {
        name,
        baseLayer,
        sizeBytes: mib(m.sizeBytes / 1024 ** 2),
        machine: {
          vcpus: 1,
          memoryBytes: mib(memoryMiB),
          kernel: m.kernel,
          initrd: m.initrd,
          cmdline: process.env["AENV_CMDLINE"] ?? "",
        },
        prime: [
          ["/bin/bash", "-l", "-c", "id"],
          ["/usr/bin/python3", "-c", "import json, os, subprocess"],
        ],
      },
      never,
    );
  }

  async startChild(name: "blockd" | "vmd"): Promise<void> {
    const args = ["--socket", `${this.runRoot}/${name}.sock`, "--log", join(this.home, "log", `${name}.log`)];
    if (name === "blockd") args.push("--state", join(this.home, "blockd"));
    const child = spawn(process.execPath, [join(root, `apps/${name}/src/main.ts`), ...args], {
      stdio: ["ignore", "inherit", "inherit"],
    });
    this.#children.set(name, child);
    const client =
      name === "blockd" ? new BlockdClient(`${this.runRoot}/blockd.sock`) : new VmdClient(`${this.runRoot}/vmd.sock`);
    try {
      for (;;) {
        if (child.exitCode !== null) throw new Error(`${name} ended with ${child.exitCode}`);
        const up = await client.ping(AbortSignal.timeout(1000)).catch(() => undefined);
        if (up?.identity.pid === child.pid) return;
        await sleep(POLL_MS);
      }
    } finally {
      client.close();
    }
  }

  async stopChild(name: "blockd" | "vmd", signal: NodeJS.Signals): Promise<void> {
    const child = this.#children.get(name);
    this.#children.delete(name);
    if (!child || child.exitCode !== null || child.signalCode !== null) return;
    const ended = once(child, "exit");
    child.kill(signal);
    await ended;
  }

  /** Everything of this instance on the host, by kind. */
  async leftovers(): Promise<Record<string, string[]>> {
    const { stdout } = await run("ip", ["netns", "list"]);
    const used = this.life.network.list().filter((s) => s.state === "used");
    return {
      disks: (await this.life.blockd.listDisks()).map((d) => d.disk),
      usedSlots: used.map((s) => s.netns),
      netnsOfNobody: stdout
        .split("\n")
        .map((l) => l.split(" ")[0] ?? "")
        .filter((n) => n.startsWith(`aenv-${this.instance}-`))
        .filter((n) => !this.life.network.list().some((s) => s.netns === n)),
      cgroups: await this.cgroups.list(`aenv-${this.instance}`),
      runDirs: await readdir(join(this.runRoot, "r")),
      dataDirs: await readdir(join(this.home, "runs")),
      vmms: (await this.life.vmd.list(never)).map((v) => v.run),
    };
  }

  /** Folders of captured states, by kind. */
  async artifacts(): Promise<{ snapshots: number; memory: number; layers: number }> {
    const count = async (name: string): Promise<number> => (await readdir(join(this.home, name))).length;
    return { snapshots: await count("snapshots"), memory: await count("memory"), layers: await count("layers") };
  }

  async [Symbol.asyncDispose](): Promise<void> {
    if (!this.#life) await this.open().catch(() => {});
    const life = this.#life;
    for (const { sandboxId } of life?.engine.list().items ?? []) await life?.engine.kill(sandboxId);
    await life?.engine.close();
    await life?.network.destroy();
    await this.closeLife();
    await this.cgroups.remove(`aenv-${this.instance}`);
    await this.stopChild("blockd", "SIGTERM");
    await this.stopChild("vmd", "SIGTERM");
    await rm(this.runRoot, { recursive: true, force: true });
    await rm(this.home, { recursive: true, force: true });
  }

  async #images(): Promise<BaseManifest> {
    const cache = join(root, ".cache");
    this.#manifest ??= await writeBaseManifest({
      home: this.home,
      kernel: await ensureKernel(cache, never),
      guestBinary: await guestBinary(),
      disk: await ensureBaseDisk(cache, () => {}, never),
      guest: { address: "169.254.0.21/30", gateway: "169.254.0.22", root: "/dev/vda", dns: [] },
    });
    return this.#manifest;
  }
}

async function guestBinary(): Promise<string> {
  await run(process.execPath, [join(root, "tools/src/build-guest.ts")], {
    env: { PATH: process.env["PATH"] ?? "", HOME: process.env["HOME"] ?? "/root" },
  });
  return join(root, ".cache/guest/aenv-guest");
}
