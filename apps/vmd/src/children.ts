import { spawn } from "node:child_process";
import { closeSync, constants, openSync, readFileSync } from "node:fs";
import { AenvError, type RunId } from "@aenv/base";
import type { Cgroups, ProcIdentity } from "@aenv/host";
import type { ProcExit, SpawnSpec, VmdChild } from "@aenv/vmm";
import { launchArgv } from "./launch.ts";

/** Exits that nobody acknowledged; beyond it the oldest is dropped, and its driver finds out through /proc. */
const MAX_REMEMBERED_EXITS = 4096;
const ENV = { PATH: "/usr/sbin:/usr/bin:/sbin:/bin" };

/** The processes this vmd started, and how they ended. */
export class Children {
  readonly #cgroups: Cgroups;
  readonly #live = new Map<number, VmdChild>();
  readonly #exits = new Map<number, ProcExit>();
  readonly #listeners = new Set<(e: ProcExit) => void>();
  #seq = 0;

  constructor(cgroups: Cgroups) {
    this.#cgroups = cgroups;
  }

  get list(): VmdChild[] {
    return [...this.#live.values()];
  }

  get exits(): ProcExit[] {
    return [...this.#exits.values()];
  }

  onExit(fn: (e: ProcExit) => void): () => void {
    this.#listeners.add(fn);
    return () => this.#listeners.delete(fn);
  }

  acknowledge(seq: number): void {
    this.#exits.delete(seq);
  }

  async spawn(spec: SpawnSpec): Promise<ProcIdentity> {
    const opened: number[] = [];
    try {
      const open = (path: string): number => {
        const flags = constants.O_WRONLY | constants.O_CREAT | constants.O_APPEND | constants.O_NOFOLLOW;
        const fd = openSync(path, flags, 0o600);
        opened.push(fd);
        return fd;
      };
      const err = open(spec.logPath);
      const out = spec.stdoutPath === undefined ? err : open(spec.stdoutPath);
      const [cmd = "", ...args] = launchArgv(spec, this.#cgroups);
      // Every other descriptor of this process is closed by exec. An own session: signals to vmd's group stop at vmd.
      const child = spawn(cmd, args, {
        cwd: spec.cwd,
        env: { ...ENV, ...spec.env },
        stdio: ["ignore", out, err],
        detached: true,
      });
      const { pid } = child;
      if (pid === undefined) throw await new Promise<unknown>((resolve) => child.once("error", resolve));
      // The child is ours to reap and that happens in a later turn: until then its pid has an entry, ended or not.
      const identity = { pid, startTicks: startTicks(pid) };
      this.#live.set(pid, { run: spec.run, identity });
      child.once("exit", (code, signal) => this.#ended(spec.run, identity, code, signal));
      return identity;
    } catch (e) {
      throw AenvError.from(e, "spawn a VMM");
    } finally {
      for (const fd of opened) closeSync(fd);
    }
  }

  #ended(run: RunId, identity: ProcIdentity, code: number | null, signal: NodeJS.Signals | null): void {
    this.#live.delete(identity.pid);
    const exit: ProcExit = { seq: ++this.#seq, run, identity, code, signal };
    this.#exits.set(exit.seq, exit);
    const oldest = this.#exits.keys().next().value;
    if (this.#exits.size > MAX_REMEMBERED_EXITS && oldest !== undefined) this.#exits.delete(oldest);
    for (const fn of this.#listeners) fn(exit);
  }
}

/** Field 22 of /proc/PID/stat, of a zombie too. */
function startTicks(pid: number): number {
  const stat = readFileSync(`/proc/${pid}/stat`, "latin1");
  return Number(stat.slice(stat.lastIndexOf(")") + 2).split(" ")[19]);
}
