import { readFile, stat } from "node:fs/promises";
import { AenvError } from "@aenv/base";
import { run } from "@aenv/host";
import { formatCidr, overlaps, parseCidr } from "./address.ts";
import {
  CONNTRACK_SHARE,
  connectionsPerSlot,
  conntrackMax,
  conntrackUsed,
  defaultRouteDevices,
  hostAddresses,
  neighboursMax,
  neighboursUsed,
} from "./host.ts";
import { checkInstanceId, tableName, vethPrefix } from "./names.ts";
import type { Finding } from "./types.ts";

export interface CheckOptions {
  instance: string;
  dns: readonly string[];
  uplink?: string;
  /** The network's block, where there is one. */
  block?: string;
  /** Most slots, and most connections that each should be able to have. */
  limit?: number;
  connections?: number;
}

/** Above this share of the connection table, new connections of everyone on the host soon fail. */
const CONNTRACK_FULL = 0.8;

/** Looks at what the network needs of the host and what of the host is in its way. Changes nothing. */
export async function checkNetwork(options: CheckOptions): Promise<Finding[]> {
  checkInstanceId(options.instance);
  const checks = [checkTools, checkTun, checkUplink, checkConntrack, checkNeighbours, checkBlock, checkFirewall];
  return (await Promise.all(checks.map((check) => check(options)))).flat();
}

const error = (subject: string, problem: string, fix: string): Finding => ({
  severity: "error",
  subject,
  problem,
  fix,
});
const warning = (subject: string, problem: string, fix: string): Finding => ({
  severity: "warning",
  subject,
  problem,
  fix,
});

async function checkTools(): Promise<Finding[]> {
  const tools = [
    ["ip", "-Version", "iproute2"],
    ["nft", "--version", "nftables"],
    ["nsenter", "--version", "util-linux"],
    ["flock", "--version", "util-linux"],
  ] as const;
  const found = tools.map(async ([tool, arg, deb]) =>
    (await works(tool, arg)) ? [] : [error(tool, "is not installed", `apt-get install ${deb}`)],
  );
  if (!(await works("conntrack", "--version")))
    found.push(
      Promise.resolve([
        warning(
          "conntrack",
          "is not installed: the host remembers a guest's connections until they time out",
          "apt-get install conntrack",
        ),
      ]),
    );
  return (await Promise.all(found)).flat();
}

async function works(tool: string, arg: string): Promise<boolean> {
  try {
    await run(tool, [arg]);
    return true;
  } catch (e) {
    if (e instanceof AenvError && e.code === "UNAVAILABLE") return false;
    throw e;
  }
}

async function checkTun(): Promise<Finding[]> {
  const path = "/dev/net/tun";
  const found = await stat(path).catch(() => undefined);
  if (!found?.isCharacterDevice()) return [error(path, "is missing", "modprobe tun")];
  return (found.mode & 0o006) === 0o006 ? [] : [error(path, "VMMs may not open it", `chmod 0666 ${path}`)];
}

async function checkUplink({ uplink }: CheckOptions): Promise<Finding[]> {
  const devices = uplink === undefined ? await defaultRouteDevices() : [uplink];
  if (devices.length === 0)
    return [warning("uplink", "the host has no default route: guests have no internet", "Add one, or name an uplink.")];
  const out: Finding[] = [];
  for (const device of devices) {
    const path = `/proc/sys/net/ipv4/conf/${device}/forwarding`;
    const state = await readFile(path, "utf8").catch(() => undefined);
    if (state === undefined) out.push(error(device, "the uplink does not exist", "Name another uplink."));
    else if (state.trim() !== "1")
      out.push(
        error(
          device,
          "the uplink does not forward: guests have no internet",
          `sysctl -w net.ipv4.conf.${device}.forwarding=1`,
        ),
      );
  }
  return out;
}

async function checkConntrack({ limit = 0, connections = 0 }: CheckOptions): Promise<Finding[]> {
  const [used, max] = await Promise.all([conntrackUsed(), conntrackMax()]);
  const each = connectionsPerSlot(max, limit, connections);
  const small =
    each < connections
      ? [
          warning(
            "conntrack",
            `this host tracks ${max} connections: each of ${limit} sandboxes may have ${each} of ${connections}`,
            `sysctl -w net.netfilter.nf_conntrack_max=${Math.ceil((limit * connections) / CONNTRACK_SHARE)}, then restart the node`,
          ),
        ]
      : [];
  if (used <= max * CONNTRACK_FULL) return small;
  return [
    ...small,
    warning(
      "conntrack",
      `${used} of ${max} connections are in use on this host`,
      `sysctl -w net.netfilter.nf_conntrack_max=${max * 2}`,
    ),
  ];
}

/** Entries of slots are permanent and exempt from the limit; a full table breaks everything else of the host. */
async function checkNeighbours(): Promise<Finding[]> {
  const [used, max] = await Promise.all([neighboursUsed(), neighboursMax()]);
  if (used <= max * CONNTRACK_FULL) return [];
  return [
    warning(
      "neighbours",
      `${used} of ${max} entries of this host's neighbour table are in use`,
      `sysctl -w net.ipv4.neigh.default.gc_thresh3=${max * 2}`,
    ),
  ];
}

async function checkBlock({ instance, block }: CheckOptions): Promise<Finding[]> {
  if (block === undefined) return [];
  const own = parseCidr(block);
  const other = (await hostAddresses(instance)).taken.find((t) => overlaps(t, own));
  if (!other) return [];
  return [
    error(
      "addresses",
      `${formatCidr(other)} of this host overlaps the slots' block ${block}`,
      "Stop all sandboxes and run npm run down -- --purge: another block is chosen then.",
    ),
  ];
}

async function checkFirewall({ instance, dns }: CheckOptions): Promise<Finding[]> {
  if (!(await works("nft", "--version"))) return [];
  const { stdout } = await run("nft", ["-j", "list", "ruleset"]);
  const { host } = await hostAddresses(instance);
  const dnsHere = dns.some((d) => host.some((h) => overlaps(h, parseCidr(d))));
  return [...judgeRuleset(stdout, instance, dnsHere), ...(await checkLegacyTables(instance))];
}

interface Chain {
  family: string;
  table: string;
  name: string;
  hook?: string;
  policy?: string;
}

interface Rule {
  family: string;
  table: string;
  chain: string;
  expr: Record<string, unknown>[];
}

/**
 * Findings from the text of `nft -j list ruleset`: chains of others that end in a refusal for forwarded packets (and for
 * those to the host when a resolver runs on it) and name none of our devices. Accepting in our own table cannot help there.
 */
export function judgeRuleset(json: string, instance: string, dnsOnHost: boolean): Finding[] {
  const { nftables } = JSON.parse(json) as { nftables: { chain?: Chain; rule?: Rule }[] };
  const rules = nftables.flatMap((o) => o.rule ?? []);
  const out: Finding[] = [];
  for (const c of nftables.flatMap((o) => o.chain ?? [])) {
    const matters = c.hook === "forward" || (c.hook === "input" && dnsOnHost);
    if (!matters || (c.family !== "ip" && c.family !== "inet") || c.table.startsWith("aenv_")) continue;
    const table = rules.filter((r) => r.family === c.family && r.table === c.table);
    const last = table.filter((r) => r.chain === c.name).at(-1);
    if (c.policy !== "drop" && !(last && refusesAll(last))) continue;
    if (table.some((r) => JSON.stringify(r.expr).includes(`"${vethPrefix(instance)}`))) continue;
    const docker = nftables.some((o) => o.chain?.name === "DOCKER-USER" && o.chain.table === c.table);
    out.push(
      error(
        `${c.family} ${c.table} ${c.name}`,
        c.hook === "forward"
          ? "drops what guests send to the internet"
          : "drops guests' questions to this host's resolver",
        fixFor(c, instance, docker),
      ),
    );
  }
  return out;
}

const refusesAll = ({ expr }: Rule): boolean =>
  expr.every((e) => "counter" in e || "drop" in e || "reject" in e) && expr.some((e) => "drop" in e || "reject" in e);

function fixFor(c: Chain, instance: string, docker: boolean): string {
  const dev = `${vethPrefix(instance)}+`;
  if (c.hook === "input") return `Let port 53 in from the devices ${dev}.`;
  if (docker)
    return (
      `iptables -I DOCKER-USER -i ${dev} -j ACCEPT; ` +
      `iptables -I DOCKER-USER -o ${dev} -m conntrack --ctstate RELATED,ESTABLISHED -j ACCEPT`
    );
  const insert = `nft insert rule ${c.family} ${c.table} ${c.name}`;
  const wild = `"${vethPrefix(instance)}*"`;
  return (
    `${insert} iifname '${wild}' accept; ${insert} oifname '${wild}' ct state established,related accept ` +
    "(and the same in your firewall's own configuration, so that it stays)"
  );
}

/** Tables of the old iptables are invisible to nft. */
async function checkLegacyTables(instance: string): Promise<Finding[]> {
  const names = await readFile("/proc/net/ip_tables_names", "utf8").catch(() => "");
  if (!names.split("\n").includes("filter") || !(await works("iptables-legacy", "--version"))) return [];
  const { stdout } = await run("iptables-legacy", ["-S", "FORWARD"]);
  if (!stdout.includes("-P FORWARD DROP") || stdout.includes(vethPrefix(instance))) return [];
  const dev = `${vethPrefix(instance)}+`;
  return [
    error(
      "iptables-legacy FORWARD",
      "drops what guests send to the internet",
      `iptables-legacy -I FORWARD -i ${dev} -j ACCEPT; ` +
        `iptables-legacy -I FORWARD -o ${dev} -m conntrack --ctstate RELATED,ESTABLISHED -j ACCEPT`,
    ),
  ];
}

/** Whether the node's own rules are in place; they vanish when the operator flushes the whole ruleset. */
export async function rulesInPlace(instance: string): Promise<boolean> {
  const { stdout } = await run("nft", ["list", "tables", "inet"]);
  return stdout.split("\n").includes(`table inet ${tableName(instance)}`);
}
