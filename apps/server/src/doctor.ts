/** `aenv doctor`: every resource of this node on the host, with its owner. One without an owner is a leak. */
import { readdir, readFile, statfs } from "node:fs/promises";
import { join } from "node:path";
import { type AenvError, errnoOf, messageOf } from "@aenv/base";
import type { Check, DoctorReport, Resource } from "@aenv/contract";
import { parentOf, processes } from "@aenv/host";
import { BASE_NAME } from "@aenv/images";

export type Kind =
  | "process"
  | "slot"
  | "disk"
  | "cgroup"
  | "rundir"
  | "datadir"
  | "snapshot"
  | "memory"
  | "layer"
  | "netns"
  | "device"
  | "mount";

export interface Found {
  kind: Kind;
  /** Host-global. */
  name: string;
  detail?: string;
  /** Set where the finder knows it: the node's own daemons, free slots of the pool. */
  owner?: string;
}

/** Who is said to own what: by `kind name`. */
export type Owners = ReadonlyMap<string, string>;
export const ownerKey = (kind: string, name: string): string => `${kind} ${name}`;

/** Pure: what was found, each with the owner that claims it. */
export function reconcile(found: readonly Found[], owners: Owners): Resource[] {
  return found
    .map((f) => ({
      kind: f.kind,
      name: f.name,
      owner: f.owner ?? owners.get(ownerKey(f.kind, f.name)) ?? null,
      ...(f.detail === undefined ? {} : { detail: f.detail }),
    }))
    .toSorted((a, b) => a.kind.localeCompare(b.kind) || a.name.localeCompare(b.name));
}

async function entries(dir: string): Promise<string[]> {
  try {
    return await readdir(dir);
  } catch (e) {
    if (errnoOf(e) === "ENOENT" || errnoOf(e) === "ENOTDIR") return [];
    throw e;
  }
}

export interface HostView {
  instance: string;
  home: string;
  runRoot: string;
  /** Pids of the server and its daemons, by name. */
  own: ReadonlyMap<number, string>;
  slots(): readonly { state: string; netns: string }[];
  disks(): Promise<readonly { disk: string }[]>;
  cgroups(): Promise<readonly string[]>;
}

/** Everything on the host that bears this node's name. The kernel and the files are asked, not the engine. */
export async function scanHost(host: HostView): Promise<Found[]> {
  const { instance, home, runRoot } = host;
  const slots = host.slots();
  const poolOwned = new Map(
    slots.filter((s) => s.state !== "used" && s.state !== "unclaimed").map((s) => [s.netns, `pool (${s.state})`]),
  );
  const found: Found[] = findProcesses(host);
  for (const s of slots) {
    const owner = poolOwned.get(s.netns);
    found.push({ kind: "slot", name: s.netns, detail: s.state, ...(owner === undefined ? {} : { owner }) });
  }
  const known = new Set(slots.map((s) => s.netns));
  for (const name of await entries("/run/netns")) {
    if (!name.startsWith(`aenv-${instance}-`)) continue;
    found.push({ kind: "netns", name, ...(known.has(name) ? { owner: `slot ${name}` } : {}) });
  }
  for (const name of await entries("/sys/class/net")) {
    if (!name.startsWith(`av${instance}-`)) continue;
    const netns = `aenv-${instance}-${name.slice(`av${instance}-`.length)}`;
    found.push({ kind: "device", name, ...(known.has(netns) ? { owner: `slot ${netns}` } : {}) });
  }
  for (const { disk } of await host.disks()) found.push({ kind: "disk", name: disk });
  for (const name of await host.cgroups()) found.push({ kind: "cgroup", name });
  const folders: [Kind, string][] = [
    ["rundir", join(runRoot, "r")],
    ["datadir", join(home, "runs")],
    ["snapshot", join(home, "snapshots")],
    ["memory", join(home, "memory")],
    ["layer", join(home, "layers")],
  ];
  for (const [kind, dir] of folders) {
    for (const name of await entries(dir)) found.push({ kind, name: join(dir, name) });
  }
  for (const target of await mountsBelow([home, runRoot])) found.push({ kind: "mount", name: target });
  return found;
}

const isVmm = (argv: readonly string[]): boolean => argv[0]?.includes("qemu") ?? false;

function findProcesses({ instance, runRoot, own }: HostView): Found[] {
  const found: Found[] = [];
  for (const p of processes()) {
    // A tool that the node itself runs at this moment belongs to it; a VMM is nobody's child for long.
    const name = own.get(p.pid) ?? own.get(isVmm(p.argv) ? 0 : (parentOf(p.pid) ?? 0));
    const ours = p.argv.some((a) => a.includes(`${runRoot}/`) || a.includes(`aenv-${instance}`));
    if (name === undefined && !ours) continue;
    const detail = `${p.argv[0] ?? "?"} ${p.argv.slice(1, 3).join(" ")}`.slice(0, 120);
    found.push({
      kind: "process",
      name: String(p.pid),
      detail,
      ...(name === undefined ? {} : { owner: `node (${name})` }),
    });
  }
  return found;
}

async function mountsBelow(roots: readonly string[]): Promise<string[]> {
  const text = await readFile("/proc/self/mounts", "utf8");
  return text
    .split("\n")
    .map((line) => line.split(" ")[1] ?? "")
    .filter((target) => roots.some((r) => target.startsWith(`${r}/`)));
}

/** Below this the node soon refuses work. */
const LOW_DISK_BYTES = 2 * 1024 ** 3;

export async function checkDisk(home: string): Promise<Check> {
  const name = "free space of the data folder";
  try {
    const fs = await statfs(home);
    const free = fs.bavail * fs.bsize;
    const detail = `${(free / 1024 ** 3).toFixed(1)} GiB free at ${home}`;
    return free >= LOW_DISK_BYTES
      ? { name, ok: true, detail }
      : { name, ok: false, detail, fix: "Free disk space, or move AENV_HOME to a larger disk." };
  } catch (e) {
    return { name, ok: false, detail: messageOf(e), fix: `Make ${home} readable for the server.` };
  }
}

/** Why sandboxes of a template cannot be made, or only slowly. Damage stays until somebody acts; the rest may pass. */
export function templateCheck(template: string, error: AenvError): Check {
  const damaged = error.code === "CORRUPT";
  const rebuild =
    template === BASE_NAME
      ? "Run npm run up: it builds base again. Sandboxes that run go on."
      : `Build it again, or delete it: aenv template delete ${template}`;
  return {
    name: `template ${template} ${damaged ? "is whole" : "has spares"}`,
    ok: false,
    detail: error.message,
    fix: damaged ? rebuild : error.hint,
  };
}

export function report(checks: readonly Check[], resources: readonly Resource[]): DoctorReport {
  const leaks = resources.filter((r) => r.owner === null).length;
  const ownership: Check =
    leaks === 0
      ? { name: "every resource has an owner", ok: true, detail: `${resources.length} resources` }
      : {
          name: "every resource has an owner",
          ok: false,
          detail: `${leaks} of ${resources.length} resources have none`,
          fix: "Restart the server (it frees what nobody owns) and report this as a bug with the log.",
        };
  const all = [...checks, ownership];
  return { ok: all.every((c) => c.ok), checks: all, resources: [...resources] };
}
