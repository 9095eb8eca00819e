import { domainToASCII } from "node:url";
import { AenvError } from "@aenv/base";
import { type Cidr, covers, formatCidr, formatIp, mergeCidrs, parseCidr, parseIp, subtractCidrs } from "./address.ts";
import type { EgressPolicy, HostTransform, SocksProxy } from "./types.ts";

/** What the owner of a sandbox says about its egress: the fields of the API as they are. */
export interface EgressRules {
  /** `allow_internet_access`; null: not said, which is yes. */
  allowInternet: boolean | null;
  /** IPv4 addresses, CIDRs, domains and `*.domain`. Wins over `denyOut`. */
  allowOut?: readonly string[];
  /** Addresses and CIDRs. */
  denyOut?: readonly string[];
  /** By domain or `*.domain`: headers that requests over HTTPS get. */
  rules?: Readonly<Record<string, readonly TransformRule[]>> | null;
  /** SOCKS5, `host:port`. */
  egressProxy?: ProxyRule | null;
}

export interface TransformRule {
  transform?: { headers?: Readonly<Record<string, string>> };
}

export interface ProxyRule {
  address: string;
  username?: string | null;
  password?: string | null;
}

/** Of each list: a policy is rewritten as a whole at each change. */
export const MAX_EGRESS_ENTRIES = 1000;

const EVERYTHING: Cidr = parseCidr("0.0.0.0/0");
const MAX_DOMAIN_LENGTH = 253;
const LABEL = /^(?!-)[a-z0-9_-]{1,63}(?<!-)$/;

/**
 * The policy that these rules mean. Throws INVALID_ARGUMENT for the first entry that means nothing.
 * A sandbox that may reach nothing by default gets no DNS either, unless it may reach domains: questions are a way out.
 */
export function egressPolicy(rules: EgressRules): EgressPolicy {
  const allowOut = checkLength("allowOut", rules.allowOut);
  const denyOut = checkLength("denyOut", rules.denyOut);
  const domains = new Set<string>();
  const allow: Cidr[] = [];
  for (const entry of allowOut) {
    if (isIpv6(entry)) throw wrong("allowOut", entry, "guests have no IPv6 on this node", "Leave it out.");
    const cidr = asCidr("allowOut", entry);
    if (cidr) allow.push(cidr);
    else domains.add(parseDomain(entry));
  }
  const deny: Cidr[] = [];
  for (const entry of denyOut) {
    // Guests have no IPv6: it is denied already.
    if (isIpv6(entry)) continue;
    const cidr = asCidr("denyOut", entry);
    if (!cidr)
      throw wrong(
        "denyOut",
        entry,
        "denyOut takes addresses and CIDRs only",
        "Deny 0.0.0.0/0 and allow what you need.",
      );
    deny.push(cidr);
  }
  const closed = rules.allowInternet === false || covers(deny, EVERYTHING);
  if (domains.size > 0 && !closed)
    throw new AenvError("INVALID_ARGUMENT", "network.allowOut names domains, but everything else is allowed as well", {
      hint: 'Add "0.0.0.0/0" to denyOut (allTraffic in the SDKs), or set allow_internet_access to false.',
    });
  const transforms = parseTransforms(rules.rules ?? {});
  return {
    allowInternet: !closed,
    allow: mergeCidrs(allow).map(formatCidr),
    deny: closed ? [] : mergeCidrs(deny).map(formatCidr),
    domains: [...domains].sort(),
    ...(transforms.length > 0 ? { transforms } : {}),
    ...(rules.egressProxy ? { proxy: parseProxy(rules.egressProxy) } : {}),
  };
}

function checkLength(list: "allowOut" | "denyOut", entries: readonly string[] = []): readonly string[] {
  if (entries.length > MAX_EGRESS_ENTRIES)
    throw new AenvError("INVALID_ARGUMENT", `network.${list} has more than ${MAX_EGRESS_ENTRIES} entries`);
  return entries;
}

const wrong = (list: string, entry: string, why: string, hint: string): AenvError =>
  new AenvError("INVALID_ARGUMENT", `network.${list}: ${JSON.stringify(entry.slice(0, 80))}: ${why}`, { hint });

const isIpv6 = (entry: string): boolean => /^[0-9a-f.]*:[0-9a-f:.]*(\/\d{1,3})?$/i.test(entry) && /:.*:/.test(entry);

/** undefined: it does not look like numbers, so it may be a domain. */
function asCidr(list: string, entry: string): Cidr | undefined {
  if (!/^[\d.]+(\/.*)?$/.test(entry)) return undefined;
  try {
    return parseCidr(entry);
  } catch {
    throw wrong(list, entry, "is not an IPv4 address or CIDR", "Write it as 192.0.2.1 or 192.0.2.0/24.");
  }
}

/** In lower case and ASCII, without a final dot; `*.` may stand in front. */
export function parseDomain(text: string, list = "allowOut"): string {
  const fail = (why: string): never => {
    throw wrong(list, text, why, "Write a domain as example.com or *.example.com, without scheme, port and path.");
  };
  const wild = text.startsWith("*.");
  const given = (wild ? text.slice(2) : text).replace(/\.$/, "");
  // Punycode for people's spelling; everything else must be a plain name already.
  // domainToASCII() would take line breaks out.
  const name = /^[\x21-\x7e]*$/.test(given) ? given.toLowerCase() : /\s/.test(given) ? "" : domainToASCII(given);
  const labels = name.split(".");
  if (name.length === 0 || name.length > MAX_DOMAIN_LENGTH) fail("is not a domain, an IPv4 address or a CIDR");
  if (labels.length < 2 || !labels.every((l) => LABEL.test(l)) || /^\d+$/.test(labels.at(-1) ?? ""))
    fail("is not a domain, an IPv4 address or a CIDR");
  return wild ? `*.${name}` : name;
}

/** Of a user name or password (RFC 1929). */
const MAX_LOGIN_BYTES = 255;

function parseProxy({ address, username, password }: ProxyRule): SocksProxy {
  const fail = (why: string): never => {
    throw wrong(
      "egressProxy.address",
      address,
      why,
      "Write it as proxy.example.com:1080; the proxy must speak SOCKS5.",
    );
  };
  const [, host = "", digits = ""] =
    /^(?:socks5h?:\/\/)?([^:@/\s]+):(\d{1,5})$/i.exec(address) ?? fail("is not HOST:PORT");
  const port = Number(digits);
  if (port < 1 || port > 65_535) fail("has no port from 1 to 65535");
  const name = /^[\d.]+$/.test(host) ? formatIp(parseIp(host)) : parseDomain(host, "egressProxy.address");
  if (name.startsWith("*.")) fail("is not a host");
  const login = { ...(username ? { username } : {}), ...(password ? { password } : {}) };
  if (password && !username)
    throw new AenvError("INVALID_ARGUMENT", "network.egressProxy: a password needs a username");
  if (Object.values(login).some((l) => Buffer.byteLength(l) > MAX_LOGIN_BYTES))
    throw new AenvError("INVALID_ARGUMENT", "network.egressProxy: username and password have at most 255 bytes each");
  return { host: name, port, ...login };
}

export const MAX_TRANSFORMS = 100;
const MAX_HEADERS = 50;
const MAX_HEADER_VALUE = 8192;
/** They say how a message is read or where it goes, which is the gateway's business. */
const FIXED_HEADERS = new Set(
  "host connection keep-alive proxy-connection te trailer transfer-encoding upgrade content-length expect".split(" "),
);

function parseTransforms(rules: Readonly<Record<string, readonly TransformRule[]>>): HostTransform[] {
  const out: HostTransform[] = [];
  for (const [text, list] of Object.entries(rules)) {
    const domain = parseDomain(text, "rules");
    const headers: Record<string, string> = {};
    for (const { transform } of list) {
      for (const [name, value] of Object.entries(transform?.headers ?? {})) {
        const bad = badHeader(name, value);
        if (bad) throw wrong("rules", domain, `header ${JSON.stringify(name.slice(0, 80))} ${bad}`, "Correct it.");
        headers[name.toLowerCase()] = value;
      }
    }
    if (Object.keys(headers).length > MAX_HEADERS)
      throw wrong("rules", domain, `more than ${MAX_HEADERS} headers`, "Set fewer.");
    if (Object.keys(headers).length > 0) out.push({ domain, headers });
  }
  if (out.length > MAX_TRANSFORMS)
    throw new AenvError("INVALID_ARGUMENT", `network.rules has more than ${MAX_TRANSFORMS} domains`);
  if (new Set(out.map((t) => t.domain)).size < out.length)
    throw new AenvError("INVALID_ARGUMENT", "network.rules names a domain twice");
  return out.sort((a, b) => (a.domain < b.domain ? -1 : 1));
}

function badHeader(name: string, value: string): string | undefined {
  if (!/^[!#$%&'*+.^_`|~0-9A-Za-z-]{1,256}$/.test(name)) return "is not a header's name";
  if (FIXED_HEADERS.has(name.toLowerCase())) return "cannot be set: it says how the message is read";
  if (value.length > MAX_HEADER_VALUE || !/^[\t\x20-\x7e\x80-\xff]*$/.test(value))
    return "has a value that no header can have";
  if (value.includes("${e2b.")) return "holds a placeholder: this node has neither identities nor secrets to put there";
  return undefined;
}

/**
 * Whether a name (lower case, no final dot) is one of these domains. `*.example.com` is every name below example.com at
 * any depth, and not example.com itself.
 */
export function domainMatches(domains: ReadonlySet<string>, name: string): boolean {
  if (domains.has(name)) return true;
  for (let dot = name.indexOf("."); dot >= 0; dot = name.indexOf(".", dot + 1))
    if (domains.has(`*${name.slice(dot)}`)) return true;
  return false;
}

/** Whether the gateway answers the slot's questions for names. */
export const namesAreOurs = (p: EgressPolicy): boolean => p.proxy !== undefined || (p.domains ?? []).length > 0;

/** Whether some of the slot's connections go through the gateway. */
export const needsGateway = (p: EgressPolicy): boolean => namesAreOurs(p) || (p.transforms ?? []).length > 0;

/** IANA special-purpose space and the metadata addresses of clouds. */
const DENIED = [
  "0.0.0.0/8",
  "10.0.0.0/8",
  "100.64.0.0/10",
  "127.0.0.0/8",
  "168.63.129.16/32", // Azure's platform endpoint
  "169.254.0.0/16",
  "172.16.0.0/12",
  "192.0.0.0/24",
  "192.0.2.0/24",
  "192.88.99.0/24",
  "192.168.0.0/16",
  "198.18.0.0/15",
  "198.51.100.0/24",
  "203.0.113.0/24",
  "224.0.0.0/3", // multicast, reserved, broadcast
].map(parseCidr);

/** Not even the operator opens these: they are this host, its guests' own links, or no single machine. */
const NEVER_OPEN = ["0.0.0.0/8", "127.0.0.0/8", "169.254.0.20/30", "224.0.0.0/3"].map(parseCidr);

/**
 * What no rule of a sandbox opens. `opened`: ranges that the operator lets guests reach as if they were the internet;
 * `own`: the host's addresses, the slots' block and what else the operator denies, which win.
 */
export function alwaysDenied(opened: readonly Cidr[], own: readonly Cidr[]): Cidr[] {
  return mergeCidrs([...subtractCidrs(DENIED, opened), ...NEVER_OPEN, ...own]);
}

/** Throws INVALID_ARGUMENT for a range that cannot be opened to guests. */
export function parseOpened(text: string): Cidr {
  const cidr = parseCidr(text);
  const clash = NEVER_OPEN.find((n) => covers([n], cidr) || covers([cidr], n));
  if (clash)
    throw new AenvError("INVALID_ARGUMENT", `${text} cannot be opened to guests: ${formatCidr(clash)} is in it`, {
      hint: "Name the private range that they need, for example 10.1.0.0/16.",
    });
  return cidr;
}
