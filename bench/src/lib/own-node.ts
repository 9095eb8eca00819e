import { type ChildProcess, spawn } from "node:child_process";
import { once } from "node:events";
import { mkdir, mkdtemp, readFile, rm, writeFile } from "node:fs/promises";
import { dirname, join } from "node:path";
import { AenvError, sleep } from "@aenv/base";
import { aenvHome, isAlive, readServerFile, run } from "@aenv/host";
import { readBaseManifest } from "@aenv/images";
import { RunningNode } from "./node.ts";

const SERVER = join(import.meta.dirname, "../../../apps/server/src/main.ts");
/** Building the template `base` under emulation takes 10 s alone. */
const READY_MS = 180_000;

export interface OwnNodeOptions {
  /** Guest memory of its template. Default: as the node of the data folder. */
  memoryMiB?: number;
  /** False: no spares are kept, so that every launch starts from nothing. */
  spares: boolean;
}

/** A second node beside the one that runs, with a template and pools of its own; nothing is left of it. */
export class OwnNode implements AsyncDisposable {
  readonly #home: string;
  readonly #server: ChildProcess;
  #node: RunningNode | undefined;

  private constructor(home: string, env: Record<string, string>) {
    this.#home = home;
    this.#server = spawn(process.execPath, [SERVER, "--home", home, "--port", "0"], {
      stdio: "ignore",
      env: { ...process.env, ...env },
    });
  }

  static async start(options: OwnNodeOptions, signal: AbortSignal): Promise<OwnNode> {
    const manifest = await readBaseManifest(aenvHome());
    if (!manifest) throw new AenvError("UNAVAILABLE", "there is no base image", { hint: "Run npm run up first." });
    // Beside the data folder: the file system is part of what is measured.
    const home = await mkdtemp(join(dirname(aenvHome()), "aenv-bench-"));
    await mkdir(join(home, "images"));
    const memoryMB = options.memoryMiB ?? manifest.memoryMB;
    await writeFile(join(home, "images/manifest.json"), JSON.stringify({ ...manifest, memoryMB }));
    await writeFile(join(home, "probe.json"), await readFile(join(aenvHome(), "probe.json")).catch(() => "{}"));
    const own = new OwnNode(home, options.spares ? {} : { AENV_POOL_MB: "0" });
    try {
      await own.#ready(signal);
    } catch (e) {
      await own[Symbol.asyncDispose]();
      throw e;
    }
    return own;
  }

  get node(): RunningNode {
    if (!this.#node) throw new Error("the node is not ready");
    return this.#node;
  }

  async #ready(signal: AbortSignal): Promise<void> {
    const until = performance.now() + READY_MS;
    while (performance.now() < until && this.#server.exitCode === null) {
      const file = readServerFile(this.#home);
      if (file && isAlive(file)) {
        this.#node ??= await RunningNode.find(this.#home);
        const info = await this.#node.client.node(signal).catch(() => undefined);
        if (info?.base.state === "ready") return;
        if (info?.base.state === "failed") break;
      }
      await sleep(100, signal);
    }
    throw new AenvError("UNAVAILABLE", `a node for the benchmark did not start: ${this.#home}/log`);
  }

  async [Symbol.asyncDispose](): Promise<void> {
    this.#node?.[Symbol.dispose]();
    if (this.#server.exitCode === null && this.#server.signalCode === null) {
      const gone = once(this.#server, "exit");
      this.#server.kill("SIGKILL");
      await gone;
    }
    await run(process.execPath, [SERVER, "--home", this.#home, "--release"]);
    await rm(this.#home, { recursive: true, force: true });
  }
}
