import { chmod, mkdir, readdir, readFile, rm, rmdir, stat, writeFile } from "node:fs/promises";
import { AenvError, errnoOf, type Logger } from "@aenv/base";
import { run } from "@aenv/host";
import { type Cidr, overlaps, parseCidr } from "./address.ts";
import { indexOf, netnsPrefix, vethPrefix } from "./names.ts";

const NETNS_DIR = "/run/netns";

/** Longer than one batch ever takes, so that a lock held this long means something hangs. */
const BARRIER_SECONDS = 60;

const lockPath = (instance: string): string => `/run/aenv-${instance}/network.lock`;

/**
 * Runs a script that changes slots, with the instance's lock held by the script and all its children: when the server
 * is killed in the middle, what it started runs on, and the next server waits for it in `barrier`.
 */
export async function runScript(instance: string, script: string): Promise<string> {
  const { stdout, stderr } = await run("flock", ["--shared", lockPath(instance), "sh", "-s"], { input: script });
  return stderr.trim() === "" ? stdout : `${stdout}\n${stderr}`;
}

/** Returns when no script of an earlier server of this instance runs any more. */
export async function barrier(instance: string): Promise<void> {
  await mkdir(`/run/aenv-${instance}`, { recursive: true, mode: 0o755 });
  await run("flock", ["--exclusive", "--wait", String(BARRIER_SECONDS), lockPath(instance), "true"]);
}

/** Indexes of which the kernel has a netns or a veth; partly made ones included. */
export async function inventory(instance: string): Promise<Set<number>> {
  const found = new Set<number>();
  const add = (name: string, prefix: string): void => {
    const index = indexOf(name, prefix);
    if (index !== undefined) found.add(index);
  };
  for (const name of await netnsNames()) add(name, netnsPrefix(instance));
  for (const name of await deviceNames()) add(name, vethPrefix(instance));
  return found;
}

async function netnsNames(): Promise<string[]> {
  try {
    return await readdir(NETNS_DIR);
  } catch (e) {
    if (errnoOf(e) === "ENOENT") return [];
    throw AenvError.from(e, `read ${NETNS_DIR}`);
  }
}

async function deviceNames(): Promise<string[]> {
  const text = await readFile("/proc/net/dev", "utf8");
  return text.split("\n").flatMap((line) => /^\s*([^\s:]+):/.exec(line)?.[1] ?? []);
}

/** Devices of the IPv4 default routes, best first. */
export async function defaultRouteDevices(): Promise<string[]> {
  const text = await readFile("/proc/net/route", "utf8");
  const rows = text
    .split("\n")
    .slice(1)
    .map((line) => line.split("\t"))
    .filter((f) => f[1] === "00000000" && f[7] === "00000000")
    .sort((a, b) => Number(a[6]) - Number(b[6]));
  return [...new Set(rows.flatMap((f) => f[0] ?? []))];
}

/** Devices, other than those of default routes, behind which some of these ranges are. */
export async function devicesTo(ranges: readonly Cidr[]): Promise<string[]> {
  if (ranges.length === 0) return [];
  const { stdout } = await run("ip", ["-j", "-4", "route", "show"]);
  const routes = (JSON.parse(stdout || "[]") as JsonRoute[]).filter((r) => r.dst !== "default" && r.dev !== undefined);
  const to = routes.filter((r) => ranges.some((range) => overlaps(range, parseCidr(r.dst))));
  return [...new Set(to.flatMap((r) => r.dev ?? []))];
}

interface JsonAddress {
  ifname: string;
  addr_info?: { family: string; local: string; prefixlen: number }[];
}

interface JsonRoute {
  dst: string;
  dev?: string;
}

export interface HostAddresses {
  /** Everything that the host's addresses and routes cover, but for default routes and this instance's devices. */
  taken: Cidr[];
  /** Addresses on this instance's devices. */
  own: string[];
  /** All other addresses of the host. */
  host: Cidr[];
}

export async function hostAddresses(instance: string): Promise<HostAddresses> {
  const prefix = vethPrefix(instance);
  const json = async <T>(args: string[]): Promise<T[]> => JSON.parse((await run("ip", args)).stdout || "[]") as T[];
  const taken: Cidr[] = [];
  const own: string[] = [];
  const host: Cidr[] = [];
  for (const link of await json<JsonAddress>(["-j", "-4", "address", "show"])) {
    for (const a of link.addr_info ?? []) {
      if (link.ifname.startsWith(prefix)) own.push(a.local);
      else {
        host.push(parseCidr(a.local));
        taken.push(parseCidr(`${a.local}/${a.prefixlen}`));
      }
    }
  }
  for (const r of await json<JsonRoute>(["-j", "-4", "route", "show", "table", "all"])) {
    if (r.dst !== "default" && !r.dev?.startsWith(prefix)) taken.push(parseCidr(r.dst));
  }
  return { taken, own, host };
}

/** Lets the device forward, which the host as a whole may not do. */
export async function enableForwarding(device: string, logger: Logger): Promise<void> {
  const path = `/proc/sys/net/ipv4/conf/${device}/forwarding`;
  try {
    if ((await readFile(path, "utf8")).trim() === "1") return;
    await writeFile(path, "1");
    logger.info({ device }, "IPv4 forwarding enabled on the uplink");
  } catch (e) {
    logger.warn({ device, error: String(e) }, "cannot enable forwarding on the uplink: guests will have no internet");
  }
}

/** Before the host's own rules of routing, but for that of local addresses. */
const MARKED_PREFERENCE = 1000;

/** Packets with this mark are for a socket of this host, whatever their destination. The table has the mark's number. */
export async function routeMarkedHere(mark: number): Promise<void> {
  const table = String(mark);
  await run("ip", ["-4", "route", "replace", "local", "0.0.0.0/0", "dev", "lo", "table", table]);
  const { stdout } = await run("ip", ["-4", "-j", "rule", "show", "fwmark", table]);
  if ((JSON.parse(stdout || "[]") as unknown[]).length > 0) return;
  await run("ip", ["-4", "rule", "add", "pref", String(MARKED_PREFERENCE), "fwmark", table, "lookup", table]);
}

export async function dropMarkedRoute(mark: number): Promise<void> {
  const lines = [`rule del fwmark ${mark} lookup ${mark}`, `route flush table ${mark}`];
  // Where there is neither, both say so.
  await run("ip", ["-4", "-force", "-batch", "-"], { input: lines.join("\n") }).catch(() => {});
}

/** udev gives /dev/net/tun mode 0666: making a device needs CAP_NET_ADMIN, opening one's own tap does not. */
export async function openTunToVmms(logger: Logger): Promise<void> {
  const path = "/dev/net/tun";
  const found = await stat(path).catch(() => undefined);
  if (!found?.isCharacterDevice())
    throw new AenvError("UNAVAILABLE", `${path} is missing`, { hint: "Load the kernel module: modprobe tun" });
  if ((found.mode & 0o006) === 0o006) return;
  await chmod(path, 0o666);
  logger.info({ path }, "opened the tap device to the VMMs' users, as udev does by default");
}

/** The most tracked connections the root netns can hold. */
export async function conntrackMax(): Promise<number> {
  const text = await readFile("/proc/sys/net/netfilter/nf_conntrack_max", "utf8").catch(() => "65536");
  return Number(text);
}

export async function removeLock(instance: string): Promise<void> {
  await rm(lockPath(instance), { force: true });
  await rmdir(`/run/aenv-${instance}`).catch((e: unknown) => {
    if (errnoOf(e) !== "ENOTEMPTY" && errnoOf(e) !== "ENOENT") throw AenvError.from(e, "remove the run directory");
  });
}

/** All slots together take at most this share of the root netns' connection table. */
export const CONNTRACK_SHARE = 0.5;

/** Most connections of a slot that the root netns tracks; few, but not none, where the table is small. */
export const connectionsPerSlot = (max: number, slots: number, wanted: number): number =>
  Math.min(wanted, Math.max(64, Math.floor((max * CONNTRACK_SHARE) / Math.max(1, slots))));

/** Entries in the host's IPv4 neighbour table that its limit counts. */
export async function neighboursUsed(): Promise<number> {
  const { stdout } = await run("ip", ["-4", "-j", "neigh", "show"]);
  const entries = JSON.parse(stdout || "[]") as { state?: string[] }[];
  return entries.filter((e) => !e.state?.includes("PERMANENT")).length;
}

export async function neighboursMax(): Promise<number> {
  return Number(await readFile("/proc/sys/net/ipv4/neigh/default/gc_thresh3", "utf8").catch(() => "1024"));
}

export async function conntrackUsed(): Promise<number> {
  return Number(await readFile("/proc/sys/net/netfilter/nf_conntrack_count", "utf8").catch(() => "0"));
}
