/** The node that is exercised: that of AENV_TEST_HOME or AENV_HOME, on this machine. */
import { readFileSync } from "node:fs";
import { readdir, readFile, stat } from "node:fs/promises";
import { join } from "node:path";
import { AenvError, sleep } from "@aenv/base";
import { aenvHome, readNodeConfig, readServerFile, runRoot } from "@aenv/host";
import { Sandbox, type SandboxOpts } from "e2b";

/** What the node holds on the host, but for its spares, of which it keeps as many as it was asked for lately. */
export interface Inventory {
  snapshots: number;
  memory: number;
  layers: number;
  runs: number;
  runDirs: number;
  cgroups: number;
  vmms: number;
  /** Slots of sandboxes. */
  slots: number;
  /** What the doctor finds without an owner. */
  leaks: number;
  /** Spares that are being made. */
  making: number;
}

interface Doctor {
  resources: { kind: string; owner: string | null }[];
}

export class Node {
  readonly home: string;
  readonly instance: string;
  readonly connection: { apiKey: string; apiUrl: string; sandboxUrl: string };

  private constructor(home: string, instance: string, url: string) {
    this.home = home;
    this.instance = instance;
    const { apiKey } = JSON.parse(readFileSync(join(home, "auth.json"), "utf8")) as { apiKey: string };
    this.connection = { apiKey, apiUrl: url, sandboxUrl: url };
  }

  static async find(): Promise<Node> {
    const home = process.env["AENV_TEST_HOME"] ?? aenvHome();
    const config = await readNodeConfig(home);
    const server = readServerFile(home);
    if (!config || !server)
      throw new AenvError("UNAVAILABLE", `no node runs in ${home}`, { hint: "Start one: npm run up." });
    return new Node(home, config.instance, `http://127.0.0.1:${server.port}`);
  }

  create(template = "base", opts: SandboxOpts = {}): Promise<Sandbox> {
    return Sandbox.create(template, { ...this.connection, timeoutMs: 3_600_000, ...opts });
  }

  connect(id: string): Promise<Sandbox> {
    return Sandbox.connect(id, { ...this.connection, timeoutMs: 3_600_000 });
  }

  /** The node's API as it is: the status, and the answer. */
  async api(method: string, path: string, body?: unknown): Promise<{ status: number; value: unknown }> {
    const { apiKey, apiUrl } = this.connection;
    const res = await fetch(apiUrl + path, {
      method,
      headers: { "X-API-KEY": apiKey, ...(body === undefined ? {} : { "Content-Type": "application/json" }) },
      ...(body === undefined ? {} : { body: JSON.stringify(body) }),
    });
    const text = await res.text();
    return { status: res.status, value: text === "" ? undefined : (JSON.parse(text) as unknown) };
  }

  deleteSnapshot(id: string): Promise<boolean> {
    return Sandbox.deleteSnapshot(id, this.connection);
  }

  /** All children, or the first error; then those that are there are killed. */
  async fork(source: Sandbox, count: number): Promise<Sandbox[]> {
    const made = await source.fork({ count, timeoutMs: 3_600_000 });
    const children = made.filter((c) => c instanceof Sandbox);
    const failed = made.find((c) => c instanceof Error);
    if (!failed) return children;
    await Promise.all(children.map((c) => c.kill()));
    throw failed;
  }

  async inventory(): Promise<Inventory> {
    const count = async (dir: string): Promise<number> => (await readdir(dir).catch((): string[] => [])).length;
    const { pools } = (await this.api("GET", "/v1/node")).value as { pools: Record<string, number> };
    const sum = (kinds: RegExp): number =>
      Object.entries(pools).reduce((n, [name, value]) => (kinds.test(name) ? n + value : n), 0);
    const spares = sum(/\.(hot|prepared)$/);
    const { resources } = (await this.api("GET", "/v1/doctor")).value as Doctor;
    return {
      snapshots: await count(join(this.home, "snapshots")),
      memory: await count(join(this.home, "memory")),
      layers: await count(join(this.home, "layers")),
      runs: (await count(join(this.home, "runs"))) - spares,
      runDirs: (await count(join(runRoot(this.instance), "r"))) - spares,
      cgroups: (await this.#cgroups()) - spares,
      vmms: (await this.#vmms()) - spares,
      slots: resources.filter((r) => r.kind === "slot" && r.owner?.startsWith("sandbox")).length,
      leaks: resources.filter((r) => r.owner === null).length,
      making: sum(/\.refilling$/),
    };
  }

  async #cgroups(): Promise<number> {
    // Version 2, or the hierarchies of version 1, in which a group has the same name.
    const roots = ["/sys/fs/cgroup", ...(await readdir("/sys/fs/cgroup")).map((n) => join("/sys/fs/cgroup", n))];
    const found = new Set<string>();
    for (const root of roots)
      for (const g of await readdir(join(root, `aenv-${this.instance}`), { withFileTypes: true }).catch(() => []))
        if (g.isDirectory()) found.add(g.name);
    return found.size;
  }

  async #vmms(): Promise<number> {
    const mark = `${runRoot(this.instance)}/`;
    let found = 0;
    for (const pid of await readdir("/proc")) {
      if (!/^\d+$/.test(pid)) continue;
      const argv = await readFile(`/proc/${pid}/cmdline`, "utf8").catch(() => "");
      if (argv.split("\0")[0]?.includes("qemu") && argv.includes(mark)) found++;
    }
    return found;
  }

  /** Bytes on the host's disk below the folders of states: memory, layers, uppers. */
  async diskBytes(): Promise<number> {
    let total = 0;
    for (const dir of ["memory", "layers", "snapshots", "runs"]) total += await usage(join(this.home, dir));
    return total;
  }

  /** Resident memory and open files of the server. */
  async server(): Promise<{ rssMiB: number; files: number }> {
    const pid = readServerFile(this.home)?.pid ?? 0;
    const status = await readFile(`/proc/${pid}/status`, "utf8");
    const files = await readdir(`/proc/${pid}/fd`);
    return { rssMiB: Math.round(Number(/^VmRSS:\s+(\d+)/m.exec(status)?.[1] ?? 0) / 1024), files: files.length };
  }

  /** Waits until the host holds no more than `before`: releases and collections run in the background. */
  async settled(before: Inventory): Promise<Inventory> {
    for (const end = Date.now() + SETTLE_MS; ; ) {
      const now = await this.inventory();
      const more = (Object.keys(before) as (keyof Inventory)[]).filter((k) => now[k] > before[k]);
      if (more.length === 0 && now.making === 0) return now;
      if (Date.now() > end)
        throw new AenvError("INTERNAL", `left behind: ${more.map((k) => `${k} ${before[k]} -> ${now[k]}`).join(", ")}`);
      await sleep(200);
    }
  }

  /** What the host holds once nothing changes any more. */
  async quiet(): Promise<Inventory> {
    for (let last = "", same = 0; ; ) {
      const now = await this.inventory();
      const text = JSON.stringify(now);
      same = text === last && now.making === 0 && now.leaks === 0 ? same + 1 : 0;
      if (same === QUIET_TURNS) return now;
      last = text;
      await sleep(500);
    }
  }
}

const SETTLE_MS = 120_000;
const QUIET_TURNS = 6;

async function usage(dir: string): Promise<number> {
  let total = 0;
  for (const e of await readdir(dir, { withFileTypes: true }).catch(() => [])) {
    const path = join(dir, e.name);
    if (e.isDirectory()) total += await usage(path);
    else total += ((await stat(path).catch(() => undefined))?.blocks ?? 0) * 512;
  }
  return total;
}

/** Standard output of a shell script; throws when it fails. */
export async function sh(s: Sandbox, script: string): Promise<string> {
  return (await s.commands.run(script, { timeoutMs: 300_000 })).stdout.trim();
}

export const mib = (bytes: number): string => `${(bytes / 1024 / 1024).toFixed(1)} MiB`;
