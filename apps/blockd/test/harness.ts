/** A real blockd process in a folder of its own, for tests. */
import { type ChildProcess, spawn } from "node:child_process";
import { once } from "node:events";
import { get } from "node:http";
import { mkdirSync, mkdtempSync, rmSync } from "node:fs";
import { tmpdir } from "node:os";
import { join, resolve } from "node:path";
import { bytes, newLayerId } from "@aenv/base";
import { BlockdClient, type CacheStats, type DiskSpec, type LayerRef } from "@aenv/block";

const MAIN = resolve(import.meta.dirname, "../src/main.ts");
const READY_TRIES = 2000;

export class TestBlockd implements AsyncDisposable {
  readonly dir: string;
  readonly client: BlockdClient;
  readonly log: string;
  #child: ChildProcess | undefined;

  readonly #args: readonly string[];

  private constructor(dir: string, args: readonly string[]) {
    this.dir = dir;
    this.#args = args;
    this.log = join(dir, "blockd.log");
    this.client = new BlockdClient(join(dir, "blockd.sock"));
  }

  /** `args` are more arguments for every start. */
  static async start(args: readonly string[] = []): Promise<TestBlockd> {
    const blockd = new TestBlockd(mkdtempSync(join(tmpdir(), "aenv-blockd-")), args);
    await blockd.start();
    return blockd;
  }

  get pid(): number {
    return this.#child?.pid ?? 0;
  }

  async start(): Promise<void> {
    const args = [
      MAIN,
      "--socket",
      join(this.dir, "blockd.sock"),
      "--state",
      join(this.dir, "state"),
      "--log",
      this.log,
    ];
    const child = spawn(process.execPath, [...args, "--workers", "2", ...this.#args], {
      stdio: ["ignore", "inherit", "inherit"],
    });
    this.#child = child;
    for (let i = 0; i < READY_TRIES; i++) {
      if (child.exitCode !== null) throw new Error(`blockd ended with ${child.exitCode}`);
      const ready = await this.client.ping().then(
        (p) => p.identity.pid === child.pid,
        () => false,
      );
      if (ready) return;
      await new Promise((r) => setTimeout(r, 5));
    }
    throw new Error("blockd did not become ready");
  }

  /** Waits for a state of it. */
  async until(is: () => Promise<boolean>): Promise<void> {
    for (let i = 0; i < 3000; i++) {
      if (await is()) return;
      await new Promise((r) => setTimeout(r, 20));
    }
    throw new Error("blockd did not come to the state");
  }

  cache(): Promise<CacheStats | undefined> {
    return new Promise((resolve, reject) => {
      get({ socketPath: join(this.dir, "blockd.sock"), path: "/cache" }, (res) => {
        let text = "";
        res.on("data", (d: Buffer) => (text += d.toString()));
        res.on("end", () => resolve(JSON.parse(text) as CacheStats));
      }).on("error", reject);
    });
  }

  /** Sends the signal and returns the exit code (null when the signal ended it). */
  async end(signal: NodeJS.Signals): Promise<number | null> {
    const child = this.#child;
    if (!child) return null;
    const exited = once(child, "exit") as Promise<[number | null]>;
    child.kill(signal);
    const [code] = await exited;
    this.#child = undefined;
    return code;
  }

  spec(disk: string, sizeBytes: number, layers: LayerRef[] = []): DiskSpec {
    const run = join(this.dir, "r", disk);
    mkdirSync(run, { recursive: true });
    return {
      disk,
      layers,
      sizeBytes: bytes(sizeBytes),
      upperDir: join(this.dir, "runs", disk),
      socketPath: join(run, "disk.sock"),
      socketUid: 0,
      socketGid: 0,
    };
  }

  layer(): LayerRef {
    const id = newLayerId();
    return { id, path: join(this.dir, "layers", id, "data.lsmt") };
  }

  path(name: string): string {
    return join(this.dir, name);
  }

  async [Symbol.asyncDispose](): Promise<void> {
    await this.end("SIGKILL");
    this.client.close();
    rmSync(this.dir, { recursive: true, force: true });
  }
}

export const uri = (spec: DiskSpec): string => `nbd+unix:///disk?socket=${spec.socketPath}`;
