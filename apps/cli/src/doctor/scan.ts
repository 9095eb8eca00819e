import { readdirSync, readFileSync } from "node:fs";
import { join } from "node:path";
import { errnoOf } from "@aenv/base";
import { run } from "@aenv/host";

export type Kind = "process" | "netns" | "interface" | "nft table" | "mount" | "cgroup" | "run folder" | "file";

/** Something on this host that carries one of AgentENV's names. */
export interface HostThing {
  kind: Kind;
  /** As the tools of the host call it: pid, netns, interface, table, path. */
  name: string;
  /** The node it belongs to by its name; undefined where the name does not say. */
  instance: string | undefined;
  /** The VM run in its name. */
  run: string | undefined;
  /** A server, blockd or vmd, by which a node counts as alive. */
  daemon?: "server" | "blockd" | "vmd" | "egress";
  detail: string;
}

export interface Scan {
  things: HostThing[];
  /** Places that this user may not look at. */
  unseen: string[];
}

const INSTANCE = /aenv-([0-9a-f]{4})(?![0-9a-z])/;
const RUN = /(?<![a-z0-9])(r[a-z0-9]{12})(?![a-z0-9])/;
const DAEMON = /apps\/(server|blockd|vmd|egress)\/src\/main\.ts$/;

/** Looks at everything itself and believes no record. `root` is another root folder in tests. */
export async function scanHost(options: { home: string; instance: string | undefined; root?: string }): Promise<Scan> {
  const root = options.root ?? "/";
  const scan: Scan = { things: [], unseen: [] };
  scanProcesses(scan, join(root, "proc"), options);
  scanNames(scan, join(root, "run/netns"), "netns", /^aenv-([0-9a-f]{4})-\d+$/);
  scanNames(scan, join(root, "sys/class/net"), "interface", /^av([0-9a-f]{4})-\d+/);
  scanMounts(scan, join(root, "proc/self/mountinfo"), options);
  scanCgroups(scan, join(root, "sys/fs/cgroup"));
  scanRunRoots(scan, join(root, "run"));
  scanData(scan, options);
  if (options.root === undefined) await scanTables(scan);
  return scan;
}

function names(scan: Scan, path: string): string[] {
  try {
    return readdirSync(path);
  } catch (e) {
    const code = errnoOf(e);
    if (code === "EACCES" || code === "EPERM") scan.unseen.push(path);
    return [];
  }
}

function text(path: string): string {
  try {
    return readFileSync(path, "utf8");
  } catch {
    // It ended or vanished between the two looks.
    return "";
  }
}

function thing(kind: Kind, name: string, detail: string, more: Partial<HostThing> = {}): HostThing {
  return { kind, name, instance: INSTANCE.exec(name)?.[1], run: RUN.exec(name)?.[1], detail, ...more };
}

function scanProcesses(scan: Scan, proc: string, node: { home: string; instance: string | undefined }): void {
  for (const pid of names(scan, proc)) {
    if (!/^\d+$/.test(pid) || Number(pid) === process.pid) continue;
    const argv = text(join(proc, pid, "cmdline"))
      .split("\0")
      .slice(0, -1);
    if (argv.length === 0) continue;
    const line = argv.join(" ");
    const daemon = argv.slice(0, 4).flatMap((a) => DAEMON.exec(a)?.[1] ?? [])[0] as HostThing["daemon"];
    const ours = daemon !== undefined || /\/aenv-[0-9a-f]{4}\//.test(line) || /(^|\/)aenv-guest$/.test(argv[0] ?? "");
    // Tools that only mention a path (an editor, grep) are not ours: a VMM runs under its own uid or in a netns of ours.
    if (!ours || (daemon === undefined && !/qemu-system|aenv-guest/.test(argv[0] ?? ""))) continue;
    const home = argv[argv.indexOf("--home") + 1];
    const at = argv.indexOf("--home") >= 0 ? home : daemon === "server" ? "/var/lib/aenv" : undefined;
    const instance = INSTANCE.exec(line)?.[1] ?? (at === node.home ? node.instance : instanceOf(at));
    const more = { instance, run: RUN.exec(line)?.[1], ...(daemon === undefined ? {} : { daemon }) };
    scan.things.push(thing("process", pid, line.slice(0, 120), more));
  }
}

function instanceOf(home: string | undefined): string | undefined {
  if (home === undefined) return undefined;
  try {
    const config: unknown = JSON.parse(text(join(home, "config.json")));
    return (config as { instance?: string }).instance;
  } catch {
    return undefined;
  }
}

function scanNames(scan: Scan, path: string, kind: Kind, shape: RegExp): void {
  for (const name of names(scan, path)) {
    const instance = shape.exec(name)?.[1];
    if (instance !== undefined) scan.things.push(thing(kind, name, "", { instance }));
  }
}

/** Namespaces are files mounted under /run/netns: they are counted as such, not as mounts. */
function scanMounts(scan: Scan, path: string, node: { home: string; instance: string | undefined }): void {
  for (const line of text(path).split("\n")) {
    const point = line.split(" ")[4]?.replace(/\\040/g, " ");
    if (point === undefined || /\/netns\//.test(point)) continue;
    // The data folder itself may well be a mount: that is how it gets its own disk.
    if (point.startsWith(`${node.home}/`)) scan.things.push(thing("mount", point, "", { instance: node.instance }));
    else if (INSTANCE.test(point)) scan.things.push(thing("mount", point, ""));
  }
}

/** cgroup v2 has one tree; v1 has one for every controller, so a group is found several times. */
function scanCgroups(scan: Scan, top: string): void {
  const found = new Set<string>();
  for (const tree of ["", ...names(scan, top)])
    for (const name of names(scan, join(top, tree))) {
      if (!/^aenv-[0-9a-f]{4}$/.test(name)) continue;
      found.add(name);
      for (const child of names(scan, join(top, tree, name)))
        if (/^r[a-z0-9]{12}$/.test(child)) found.add(`${name}/${child}`);
    }
  for (const name of found) scan.things.push(thing("cgroup", name, ""));
}

function scanRunRoots(scan: Scan, run: string): void {
  for (const name of names(scan, run)) {
    if (!/^aenv-[0-9a-f]{4}$/.test(name)) continue;
    scan.things.push(thing("run folder", join("/run", name), ""));
    for (const child of names(scan, join(run, name, "r")))
      scan.things.push(thing("run folder", join("/run", name, "r", child), ""));
  }
}

/** Runs, layers and snapshots of the node of this home. */
function scanData(scan: Scan, node: { home: string; instance: string | undefined }): void {
  for (const folder of ["runs", "layers", "snapshots"])
    for (const name of names(scan, join(node.home, folder)))
      scan.things.push(thing("file", join(node.home, folder, name), "", { instance: node.instance }));
}

async function scanTables(scan: Scan): Promise<void> {
  try {
    const { stdout } = await run("nft", ["list", "tables"]);
    for (const line of stdout.split("\n")) {
      const [, family, name] = line.split(" ");
      const instance = /^aenv_([0-9a-f]{4})$/.exec(name ?? "")?.[1];
      if (instance !== undefined) scan.things.push(thing("nft table", `${family} ${name}`, "", { instance }));
    }
  } catch {
    scan.unseen.push("nft tables");
  }
}
