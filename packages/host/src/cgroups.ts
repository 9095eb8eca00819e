import { readFileSync } from "node:fs";
import { mkdir, readdir, readFile, rmdir, writeFile } from "node:fs/promises";
import { AenvError, type Bytes, bytes, errnoOf, sleep } from "@aenv/base";

export interface CgroupLimits {
  memoryBytes?: number;
  /** 1..10000, 100 is the default share of the host's processors. */
  cpuWeight?: number;
  pids?: number;
}

export interface CgroupStats {
  memoryBytes: Bytes;
  cpuUsec: number;
  /** Processes that the kernel ended because the group was at its memory limit. */
  oomKills: number;
}

/** A removed group may still hold a process that the kernel has not reaped: ten times what that takes on a busy host. */
const REMOVE_DEADLINE_MS = 5_000;
const REMOVE_POLL_MS = 5;
const NAME = /^[a-z0-9][a-z0-9_.-]*(\/[a-z0-9][a-z0-9_.-]*)*$/;
const CONTROLLERS = ["memory", "cpu", "cpuacct", "pids"] as const;
type Controller = (typeof CONTROLLERS)[number];

/** Where the kernel's control groups are mounted. */
export type CgroupMounts =
  | { version: 2; root: string }
  | { version: 1; roots: Readonly<Partial<Record<Controller, string>>> };

/** Reads /proc/mounts text. A v2 tree counts only when the controllers are on it: hybrid hosts mount an empty one beside v1. */
export function parseCgroupMounts(text: string): CgroupMounts | undefined {
  const roots: Partial<Record<Controller, string>> = {};
  let unified: string | undefined;
  for (const line of text.split("\n")) {
    const [, path = "", type, options = ""] = line.split(" ");
    if (type === "cgroup2") unified ??= path;
    if (type !== "cgroup") continue;
    const words = options.split(",");
    for (const c of CONTROLLERS) if (words.includes(c)) roots[c] ??= path;
  }
  if (Object.keys(roots).length > 0) return { version: 1, roots };
  return unified === undefined ? undefined : { version: 2, root: unified };
}

/**
 * Control groups of a node, on a pure v2 tree or on v1 hierarchies. A name is relative to the root of the hierarchy:
 * `aenv-<instance>/<RunId>`. A limit whose controller the host does not have is not applied (`missing` names it).
 */
export class Cgroups {
  readonly #mounts: CgroupMounts;

  constructor(mounts: CgroupMounts | undefined = parseCgroupMounts(readFileSync("/proc/mounts", "utf8"))) {
    if (!mounts)
      throw new AenvError("UNAVAILABLE", "no control groups are mounted on this host", {
        hint: "Mount them at /sys/fs/cgroup; every system with systemd has them.",
      });
    this.#mounts = mounts;
  }

  get version(): 1 | 2 {
    return this.#mounts.version;
  }

  /** Controllers that this host lacks. */
  get missing(): readonly string[] {
    const m = this.#mounts;
    return m.version === 2 ? [] : CONTROLLERS.filter((c) => m.roots[c] === undefined);
  }

  /** Makes the group and its parents; existing ones are fine. */
  async create(name: string, limits: CgroupLimits = {}): Promise<void> {
    try {
      await Promise.all(this.#folders(name).map((dir) => mkdir(dir, { recursive: true })));
      const m = this.#mounts;
      if (m.version === 2) {
        await enableControllers(m.root, check(name));
        await Promise.all([
          put(`${m.root}/${name}/memory.max`, limits.memoryBytes),
          put(`${m.root}/${name}/memory.oom.group`, limits.memoryBytes && 1),
          put(`${m.root}/${name}/cpu.weight`, limits.cpuWeight),
          put(`${m.root}/${name}/pids.max`, limits.pids),
        ]);
      } else {
        const { memory, cpu, pids } = m.roots;
        // cpu.shares has 1024 where v2 has a weight of 100.
        const shares = limits.cpuWeight && Math.max(2, Math.round((limits.cpuWeight * 1024) / 100));
        await Promise.all([
          memory && put(`${memory}/${name}/memory.limit_in_bytes`, limits.memoryBytes),
          cpu && put(`${cpu}/${name}/cpu.shares`, shares),
          pids && put(`${pids}/${name}/pids.max`, limits.pids),
        ]);
      }
    } catch (e) {
      throw AenvError.from(e, `create control group ${name}`);
    }
  }

  /** A process that writes its pid into each of these is in the group. */
  procsFiles(name: string): string[] {
    return this.#folders(name).map((dir) => `${dir}/cgroup.procs`);
  }

  async pids(name: string): Promise<number[]> {
    const all = new Set<number>();
    for (const file of this.procsFiles(name)) {
      const text = (await readOrNothing(file)) ?? "";
      for (const line of text.split("\n")) if (line) all.add(Number(line));
    }
    return [...all];
  }

  /** SIGKILL to everything in the group; an unknown group is fine. Returns when the signals are sent. */
  async kill(name: string): Promise<void> {
    const m = this.#mounts;
    if (m.version === 2) {
      try {
        await writeFile(`${m.root}/${check(name)}/cgroup.kill`, "1");
        return;
      } catch (e) {
        if (errnoOf(e) === "ENOENT" && (await readOrNothing(`${m.root}/${name}/cgroup.procs`)) === undefined) return;
        // Kernels before 5.14 have no cgroup.kill.
      }
    }
    // A process may fork between the reading and the signal: read again until a round finds nobody new.
    const seen = new Set<number>();
    for (let found = true; found; ) {
      found = false;
      for (const pid of await this.pids(name)) {
        if (seen.has(pid)) continue;
        seen.add(pid);
        found = true;
        try {
          process.kill(pid, "SIGKILL");
        } catch (e) {
          if (errnoOf(e) !== "ESRCH") throw AenvError.from(e, `kill ${pid} of control group ${name}`);
        }
      }
    }
  }

  /** Removes the group, which must have no living process, and its child groups; an unknown group is fine. */
  async remove(name: string): Promise<void> {
    await Promise.all(this.#folders(name).map((dir) => removeTree(dir, Date.now() + REMOVE_DEADLINE_MS)));
  }

  async stats(name: string): Promise<CgroupStats> {
    const m = this.#mounts;
    if (m.version === 2) {
      const dir = `${m.root}/${check(name)}`;
      const [memory, cpu, events] = await Promise.all(
        ["memory.current", "cpu.stat", "memory.events"].map((f) => readOrNothing(`${dir}/${f}`)),
      );
      return {
        memoryBytes: bytes(Number(memory ?? 0)),
        cpuUsec: field(cpu, "usage_usec"),
        oomKills: field(events, "oom_kill"),
      };
    }
    check(name);
    const read = (c: Controller, file: string): Promise<string | undefined> =>
      m.roots[c] === undefined ? Promise.resolve(undefined) : readOrNothing(`${m.roots[c]}/${name}/${file}`);
    const [memory, cpu, events] = await Promise.all([
      read("memory", "memory.usage_in_bytes"),
      read("cpuacct", "cpuacct.usage"),
      read("memory", "memory.oom_control"),
    ]);
    return {
      memoryBytes: bytes(Number(memory ?? 0)),
      cpuUsec: Math.floor(Number(cpu ?? 0) / 1000),
      oomKills: field(events, "oom_kill"),
    };
  }

  /** Names of the groups directly below `parent`, sorted; with a trailing `*` instead: top-level groups with that prefix. */
  async list(parent: string): Promise<string[]> {
    const star = parent.endsWith("*");
    const prefix = star ? parent.slice(0, -1) : `${check(parent)}/`;
    const names = new Set<string>();
    for (const root of this.#roots()) {
      for (const entry of await dirs(star ? root : `${root}/${parent}`)) {
        if (!star) names.add(prefix + entry);
        else if (entry.startsWith(prefix)) names.add(entry);
      }
    }
    return [...names].sort();
  }

  #roots(): string[] {
    const m = this.#mounts;
    return m.version === 2 ? [m.root] : [...new Set(Object.values(m.roots))];
  }

  #folders(name: string): string[] {
    check(name);
    return this.#roots().map((root) => `${root}/${name}`);
  }
}

function check(name: string): string {
  if (!NAME.test(name)) throw new AenvError("INVALID_ARGUMENT", `${JSON.stringify(name)} is not a control group name`);
  return name;
}

/** On v2 a group has a controller only when every ancestor passes it down. */
async function enableControllers(root: string, name: string): Promise<void> {
  let dir = root;
  for (const part of name.split("/")) {
    for (const c of ["memory", "cpu", "pids"]) {
      try {
        await writeFile(`${dir}/cgroup.subtree_control`, `+${c}`);
      } catch (e) {
        // The host has not this controller, or keeps it from us: the limit is then not applied.
        if (errnoOf(e) !== "ENOENT" && errnoOf(e) !== "EINVAL" && errnoOf(e) !== "EBUSY") throw e;
      }
    }
    dir = `${dir}/${part}`;
  }
}

async function put(file: string, value: number | undefined): Promise<void> {
  if (value === undefined) return;
  try {
    await writeFile(file, String(value), { flag: "r+" });
  } catch (e) {
    if (errnoOf(e) !== "ENOENT") throw e;
  }
}

async function readOrNothing(file: string): Promise<string | undefined> {
  try {
    return await readFile(file, "utf8");
  } catch (e) {
    if (errnoOf(e) === "ENOENT" || errnoOf(e) === "ENODEV") return undefined;
    throw AenvError.from(e, `read ${file}`);
  }
}

function field(text: string | undefined, name: string): number {
  for (const line of text?.split("\n") ?? [])
    if (line.startsWith(`${name} `)) return Number(line.slice(name.length + 1));
  return 0;
}

async function dirs(path: string): Promise<string[]> {
  try {
    return (await readdir(path, { withFileTypes: true })).filter((d) => d.isDirectory()).map((d) => d.name);
  } catch (e) {
    if (errnoOf(e) === "ENOENT" || errnoOf(e) === "ENODEV") return [];
    throw AenvError.from(e, `list ${path}`);
  }
}

async function removeTree(dir: string, until: number): Promise<void> {
  for (const child of await dirs(dir)) await removeTree(`${dir}/${child}`, until);
  for (;;) {
    try {
      return await rmdir(dir);
    } catch (e) {
      if (errnoOf(e) === "ENOENT") return;
      if (errnoOf(e) !== "EBUSY" || Date.now() > until) throw AenvError.from(e, `remove control group ${dir}`);
      await sleep(REMOVE_POLL_MS);
    }
  }
}
