import { type ChildProcess, spawn } from "node:child_process";
import { once } from "node:events";
import { mkdtemp, readFile, rm } from "node:fs/promises";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { AenvError } from "@aenv/base";
import { run } from "@aenv/host";
import { readBaseManifest } from "@aenv/images";
import { versionOf } from "./conditions.ts";

const ENV = { PATH: "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin", HOME: "/root", LC_ALL: "C" };
/** Less work than podman's defaults do: no cgroup, no network, no overlay over the folder. Its default limits are above what some hosts allow. */
const FLAGS = ["--cgroups=disabled", "--network=none", "--ulimit=nofile=1024:1024", "--ulimit=nproc=1024:1024"];
/** Debian 12's crun refuses hosts with cgroups v1 where the unified hierarchy has a controller, although it is told to use none. */
const UNIFIED = "/sys/fs/cgroup/unified";

export interface Timed {
  firstOutputMs: number;
  endMs: number;
}

/** Containers over the files of the template's own base disk. */
export class Podman implements AsyncDisposable {
  readonly #dir: string;
  /** What podman is started with: a mount namespace without the unified hierarchy where crun would refuse it. */
  #prefix: string[] = [];
  #namespace: ChildProcess | undefined;
  readonly #started: string[] = [];

  private constructor(dir: string) {
    this.#dir = dir;
  }

  static async open(home: string, signal: AbortSignal): Promise<Podman> {
    const version = await versionOf("podman", ["--version"]);
    if (!version.startsWith("podman"))
      throw new AenvError("UNAVAILABLE", `podman cannot be run: ${version}`, {
        hint: "npm run bench installs it as root; this benchmark compares with it.",
      });
    const manifest = await readBaseManifest(home);
    if (!manifest) throw new AenvError("UNAVAILABLE", `${home} has no base image`, { hint: "Run npm run up first." });
    const dir = await mkdtemp(join(tmpdir(), "aenv-bench-rootfs-"));
    const podman = new Podman(dir);
    try {
      await run("debugfs", ["-R", `rdump / ${dir}`, manifest.disk], { signal });
      await podman.#enterNamespace();
    } catch (e) {
      await podman[Symbol.asyncDispose]();
      throw e;
    }
    return podman;
  }

  async #enterNamespace(): Promise<void> {
    const controllers = await readFile(`${UNIFIED}/cgroup.controllers`, "utf8").catch(() => "");
    if (controllers.trim() === "") return;
    const script = `umount ${UNIFIED} && echo ready && exec sleep infinity`;
    const child = spawn("unshare", ["-m", "--propagation", "private", "sh", "-c", script], {
      env: ENV,
      stdio: ["ignore", "pipe", "inherit"],
    });
    this.#namespace = child;
    await once(child.stdout, "data");
    this.#prefix = ["nsenter", `--mount=/proc/${child.pid}/ns/mnt`];
  }

  #argv(args: readonly string[]): [cmd: string, args: string[]] {
    const [cmd = "podman", ...rest] = [...this.#prefix, "podman", ...args];
    return [cmd, rest];
  }

  #time(args: readonly string[], signal: AbortSignal): Promise<Timed> {
    return new Promise((resolve, reject) => {
      const started = performance.now();
      const child = spawn(...this.#argv(args), { env: ENV, stdio: ["ignore", "pipe", "pipe"], signal });
      let firstOutputMs: number | undefined;
      let stderr = "";
      child.stdout.once("data", () => (firstOutputMs = performance.now() - started));
      child.stderr.on("data", (d: Buffer) => (stderr += d.toString()));
      child.on("error", reject);
      child.on("close", (code) => {
        if (code === 0 && firstOutputMs !== undefined) resolve({ firstOutputMs, endMs: performance.now() - started });
        else reject(new AenvError("INTERNAL", `podman ${args[0]} ended with ${code}: ${stderr.slice(-1000)}`));
      });
    });
  }

  run(argv: readonly string[], signal: AbortSignal): Promise<Timed> {
    return this.#time(["run", "--rm", ...FLAGS, "--rootfs", this.#dir, ...argv], signal);
  }

  /** A container that waits; ends with this object. */
  async start(signal: AbortSignal): Promise<string> {
    const args = ["run", "-d", ...FLAGS, "--rootfs", this.#dir, "sleep", "infinity"];
    const { stdout } = await run(...this.#argv(args), { env: ENV, signal });
    const id = stdout.trim();
    this.#started.push(id);
    return id;
  }

  exec(container: string, argv: readonly string[], signal: AbortSignal): Promise<Timed> {
    return this.#time(["exec", container, ...argv], signal);
  }

  static conditions(): Promise<string> {
    return versionOf("podman", ["--version"]);
  }

  async [Symbol.asyncDispose](): Promise<void> {
    for (const id of this.#started) await run(...this.#argv(["rm", "-f", "-t", "0", id]), { env: ENV });
    this.#namespace?.kill();
    await rm(this.#dir, { recursive: true, force: true });
  }
}
