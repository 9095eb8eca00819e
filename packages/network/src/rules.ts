import { type Cidr, formatCidr, mergeCidrs, parseCidr } from "./address.ts";
import { alwaysDenied, namesAreOurs } from "./egress.ts";
import { type SlotPlan, tableName, vethPrefix } from "./names.ts";
import { type EgressPolicy, type GuestLimits, OPEN_POLICY } from "./types.ts";

export const GUEST_IP = "169.254.0.21";
export const GATEWAY_IP = "169.254.0.22";
export const GUEST_MAC = "02:fc:00:00:00:05";
/** The same in every slot: a resumed guest still has it in its neighbour table. */
export const GATEWAY_MAC = "02:fc:00:00:00:01";

/** Before conntrack (-200) and before raw (-300), after defragmentation (-400): what is refused here costs no state. */
const GUARD_PRIORITY = -310;

/** A guest that asks for what is never allowed is told so at once; one that floods is told no more often than this. */
const REFUSALS_PER_SECOND = 100;

export interface NodeRules {
  instance: string;
  block: Cidr;
  dns: readonly string[];
  /** Devices that lead to the internet. */
  uplinks: readonly string[];
  /** The host's own addresses and what else no guest may reach. */
  deny: readonly Cidr[];
  /** Ranges of always denied space that the operator opens. */
  open: readonly Cidr[];
  /** Most tracked connections per slot in the root netns. */
  flowsPerSlot: number;
  gateway?: GatewayPlace;
}

/** Where the egress gateway listens in the root netns. */
export interface GatewayPlace {
  /** Transparent TCP listener at 127.0.0.1. */
  tcpPort: number;
  /** DNS over UDP and TCP, at every address. */
  dnsPort: number;
  /** It runs as this user, which may reach no more than guests. */
  uid: number;
}

/**
 * How a slot tells the root netns which packets are for the gateway: a mark does not cross the veth. A guest that sets it
 * itself gets to the gateway too, which knows what it may.
 */
const GATED_DSCP = 43;
/** Mark of a slot's connections that go through the gateway. Epochs are smaller. */
const GATED_MARK = 0x80000000;

/** Mark and routing table, in the root netns, of what the gateway gets. */
export const gatewayMark = (instance: string): number => 0x0ae10000 + Number.parseInt(instance, 16);

const elements = (list: readonly string[]): string =>
  list.length > 0 ? `\n    elements = { ${list.join(", ")} }` : "";

/** What the rules of the node and of its slots have in common. */
export type Destinations = Pick<NodeRules, "block" | "dns" | "deny" | "open">;

const sets = (n: Destinations): string => `  set dns {
    type ipv4_addr${elements(n.dns)}
  }
  set denied {
    type ipv4_addr
    flags interval${elements(alwaysDenied(n.open, [n.block, ...n.deny]).map(formatCidr))}
  }`;

const newTable = (family: string, name: string, body: string): string => `table ${family} ${name} {\n${body}\n}\n`;

const replaceTable = (family: string, name: string, body: string): string =>
  `table ${family} ${name}\ndelete table ${family} ${name}\n${newTable(family, name, body)}`;

/**
 * The node's own table in the root netns, for `nft -f`; replaces the one before it in one transaction. It names no
 * single slot: making a slot changes nothing here. An accept here never overrides a drop of the operator's tables.
 */
export function nodeRules(n: NodeRules): string {
  const veth = `"${vethPrefix(n.instance)}*"`;
  const block = formatCidr(n.block);
  const gw = n.gateway;
  const mark = gatewayMark(n.instance);
  const toGateway = gw
    ? `
    meta mark ${mark} meta l4proto tcp accept
    fib daddr . iif type local udp dport ${gw.dnsPort} accept
    fib daddr . iif type local tcp dport ${gw.dnsPort} accept`
    : "";
  return replaceTable(
    "inet",
    tableName(n.instance),
    `${sets(n)}
  set opened {
    type ipv4_addr
    flags interval${elements(mergeCidrs(n.open).map(formatCidr))}
  }
  set uplink {
    type ifname${elements(n.uplinks.map((u) => `"${u}"`))}
  }
  set flows {
    type ipv4_addr
    size 8192
    flags dynamic
  }
  chain guard {
    type filter hook prerouting priority ${GUARD_PRIORITY}; policy accept;
    iifname ${veth} jump from_slot
  }
  chain from_slot {
    meta nfproto != ipv4 counter drop
    ip saddr != ${block} counter drop
    fib saddr . iif oif missing counter drop
    ip daddr ${block} return
    ip daddr @dns meta l4proto { tcp, udp } th dport 53 return
    ip daddr @denied counter drop
    fib daddr type != unicast counter drop
  }
  chain input {
    type filter hook input priority filter - 10; policy accept;
    iifname ${veth} jump to_host
  }
  chain to_host {
    ct state established ct direction reply accept
    ct state related meta l4proto icmp accept${toGateway}
    ip daddr @dns meta l4proto { tcp, udp } th dport 53 accept
    counter drop
  }
  chain forward {
    type filter hook forward priority filter - 10; policy accept;
    iifname ${veth} jump outbound
    oifname ${veth} jump inbound
  }
  chain outbound {
    ct state invalid counter drop
    ct state established accept
    ct state related meta l4proto icmp accept
    oifname ${veth} counter drop
    meta l4proto != { tcp, udp, icmp } counter drop
    add @flows { ip saddr ct count over ${n.flowsPerSlot} } counter drop
    tcp flags syn tcp option maxseg size set rt mtu
    ip daddr @dns meta l4proto { tcp, udp } th dport 53 accept
    ip daddr @denied counter drop
    ip daddr @opened accept
    oifname != @uplink counter drop
    accept
  }
  chain inbound {
    ct state established accept
    ct state related meta l4proto icmp accept
    counter drop
  }
  chain nat_out {
    type nat hook postrouting priority srcnat; policy accept;
    ip saddr ${block} oifname != ${veth} masquerade
  }${gw ? gatewayChains(gw, veth, mark) : ""}`,
  );
}

/** What is for the gateway never goes on without it, and the gateway gets no further than guests do. */
function gatewayChains(gw: GatewayPlace, veth: string, mark: number): string {
  return `
  chain gate {
    type filter hook prerouting priority mangle; policy accept;
    iifname ${veth} meta l4proto tcp ip dscp ${GATED_DSCP} jump to_gateway
  }
  chain to_gateway {
    meta l4proto tcp tproxy ip to 127.0.0.1:${gw.tcpPort} meta mark set ${mark} accept
    counter reject with tcp reset
  }
  chain gateway {
    type filter hook output priority filter - 10; policy accept;
    meta skuid ${gw.uid} jump from_gateway
  }
  chain from_gateway {
    ct direction reply accept
    meta nfproto != ipv4 counter reject
    ip daddr @dns meta l4proto { tcp, udp } th dport 53 accept
    ip daddr @denied counter reject
    fib daddr type != unicast counter reject
  }`;
}

/** Replaces the devices that lead to the internet, for `nft -f` in the root netns. */
export function uplinkRules(instance: string, uplinks: readonly string[]): string {
  const set = `inet ${tableName(instance)} uplink`;
  const list = uplinks.map((u) => `"${u}"`).join(", ");
  return `flush set ${set}\n${list === "" ? "" : `add element ${set} { ${list} }\n`}`;
}

/** The tables inside a slot's netns, for `nft -f` there; the netns is new. */
export function slotRules(instance: string, slot: SlotPlan, node: Destinations, limits: GuestLimits): string {
  const name = tableName(instance);
  const tap = newTable(
    "netdev",
    name,
    `  chain from_tap {
    type filter hook ingress device "tap0" priority -500; policy drop;
    ether saddr != ${GUEST_MAC} counter drop
    ether daddr ${GATEWAY_MAC} ether type ip ip saddr ${GUEST_IP} accept
    ether type arp arp operation { request, reply } arp saddr ether ${GUEST_MAC} arp saddr ip ${GUEST_IP} arp daddr ip ${GATEWAY_IP} limit rate 50/second burst 50 packets accept
    counter drop
  }`,
  );
  const inet = newTable(
    "inet",
    name,
    `${sets(node)}
  set allowed {
    type ipv4_addr
    flags interval
  }
  set refused {
    type ipv4_addr
    flags interval
  }
  chain guard {
    type filter hook prerouting priority ${GUARD_PRIORITY}; policy drop;
    meta nfproto != ipv4 drop
    iifname "tap0" jump from_guest
    iifname "up0" ip daddr ${slot.hostIp} accept
  }
  chain from_guest {
    ip daddr ${GATEWAY_IP} accept
    ip daddr @dns meta l4proto { tcp, udp } th dport 53 accept
    fib daddr type != unicast counter drop
    ip daddr @denied jump forbidden
    accept
  }
  chain forbidden {
    limit rate over ${REFUSALS_PER_SECOND}/second burst ${REFUSALS_PER_SECOND} packets counter drop
    meta l4proto tcp counter reject with tcp reset
    counter reject with icmp type admin-prohibited
  }
  chain to_guest {
    type nat hook prerouting priority dstnat; policy accept;
    iifname "up0" ip saddr ${slot.hostSide} ip daddr ${slot.hostIp} dnat ip to ${GUEST_IP}
    iifname "tap0" jump questions
  }
  chain to_src {
    type nat hook postrouting priority srcnat; policy accept;
    oifname "tap0" snat ip to ${GATEWAY_IP}
    oifname "up0" snat ip to ${slot.hostIp}
  }
  chain input {
    type filter hook input priority filter; policy drop;
    iifname "tap0" udp dport 53 reject with icmp type admin-prohibited
    iifname "tap0" tcp dport 53 reject with tcp reset
  }
  chain output {
    type filter hook output priority filter; policy drop;
    meta l4proto { icmp, tcp } accept
  }
  chain forward {
    type filter hook forward priority filter; policy drop;
    ct state invalid counter drop
    ct original ip saddr ${slot.hostSide} ct status dnat accept${bandwidth(limits)}
    ct state established jump judged
    ct state related meta l4proto icmp accept
    iifname "tap0" oifname "up0" ct state new jump new_flow
  }
  chain new_flow {
    meta l4proto != { tcp, udp, icmp } counter drop
    meta l4proto icmp icmp type != echo-request counter drop
    limit rate over ${limits.newPerSecond}/second burst ${limits.newBurst} packets counter drop
    ct count over ${limits.connections} counter drop
    jump sandbox
  }
${POLICY_CHAINS.map((c) => `  chain ${c} {\n  }`).join("\n")}`,
  );
  return tap + inet + policyRules(instance, OPEN_POLICY, 1, { resolvers: node.dns });
}

/** How much may pass at once after a quiet time, in seconds of the limit: TCP needs room for its bursts. */
const BURST_SECONDS = 0.25;

function bandwidth({ bytesPerSecond }: GuestLimits): string {
  if (bytesPerSecond === undefined) return "";
  const over = `limit rate over ${bytesPerSecond} bytes/second burst ${Math.ceil(bytesPerSecond * BURST_SECONDS)} bytes`;
  return ["iifname", "oifname"].map((way) => `\n    ${way} "tap0" ${over} counter drop`).join("");
}

/** What a policy rewrites. */
const POLICY_CHAINS = ["questions", "judged", "through", "gate", "pass", "reach", "sandbox"] as const;

/** Who answers a slot's questions for names. */
export interface DnsPlaces {
  /** Of the node. A guest may ask these, or its own gateway, which stands for them. */
  resolvers: readonly string[];
  /** The egress gateway, for policies that need it. */
  gateway?: { ip: string; port: number } | undefined;
}

/**
 * Replaces a slot's policy in one transaction, for `nft -f` in its netns. `epoch` marks the connections that this policy
 * lets pass and must differ from that of every policy before: connections with another mark are judged anew at their
 * next packet in either direction, so that what is denied now is cut at once and what is allowed goes on. Those that
 * go through the gateway stay there: it judges them.
 */
export function policyRules(instance: string, policy: EgressPolicy, epoch: number, dns: DnsPlaces): string {
  const table = `inet ${tableName(instance)}`;
  const fill = (set: string, list: readonly string[]): string =>
    `flush set ${table} ${set}\n${list.length > 0 ? `add element ${table} ${set} { ${list.join(", ")} }\n` : ""}`;
  const chains: Record<(typeof POLICY_CHAINS)[number], string[]> = {
    questions: questionLines(policy, dns),
    judged: [`ct mark ${GATED_MARK} goto through`, `ct mark ${epoch} accept`, "jump sandbox"],
    through: [`ip dscp set ${GATED_DSCP} accept`],
    gate: [`ct state new ct mark set ${GATED_MARK} goto through`, ...refuse("")],
    pass: [`ct mark set ${epoch} accept`],
    reach: reachLines(policy),
    sandbox: policyLines(policy, dns),
  };
  return [
    ...POLICY_CHAINS.map((c) => `flush chain ${table} ${c}\n`),
    // The node may have other resolvers than when the slot was made.
    fill("dns", dns.resolvers),
    fill("allowed", cidrs(policy.allow)),
    fill("refused", cidrs(policy.deny)),
    ...POLICY_CHAINS.flatMap((c) => chains[c].map((l) => `add rule ${table} ${c} ${l}\n`)),
  ].join("");
}

const cidrs = (list: readonly string[] | undefined): string[] =>
  mergeCidrs((list ?? []).map(parseCidr)).map(formatCidr);

const UNREACHABLE = "counter reject with icmp type admin-prohibited";

const refuse = (what: string): string[] => [
  `${what}ct state established meta l4proto tcp counter reject with tcp reset`,
  // A program in the guest learns at once that it may not, instead of waiting for its own timeout.
  `${what}${UNREACHABLE}`,
];

/** Questions for names that go elsewhere than their guest sent them, before the policy judges them. */
function questionLines(policy: EgressPolicy, { resolvers, gateway }: DnsPlaces): string[] {
  const protocols = ["udp", "tcp"];
  if (namesAreOurs(policy) && gateway)
    return protocols.map((l4) => `${l4} dport 53 dnat ip to ${gateway.ip}:${gateway.port}`);
  const [first, ...others] = resolvers;
  if (!policy.allowInternet || first === undefined) return [];
  // A guest that asks again may get another one.
  const to =
    others.length === 0
      ? first
      : `numgen random mod ${resolvers.length} map { ${resolvers.map((r, i) => `${i} : ${r}`).join(", ")} }`;
  return protocols.map((l4) => `ip daddr ${GATEWAY_IP} ${l4} dport 53 dnat ip to ${to}`);
}

/** A connection is judged by where its guest sent it, whichever way the packet at hand goes. */
function policyLines(policy: EgressPolicy, { gateway }: DnsPlaces): string[] {
  // Questions that were sent elsewhere go on where this policy sends them as well.
  const there = namesAreOurs(policy) ? (gateway?.ip ?? "0.0.0.0") : policy.allowInternet ? "@dns" : undefined;
  const questions = [
    ...(there === undefined ? [] : [`ct status dnat ct reply ip saddr ${there} jump pass`]),
    ...refuse("ct status dnat "),
  ];
  const allowed = "ct original ip daddr @allowed jump reach";
  if (!policy.allowInternet) {
    const byName = (policy.domains ?? []).length > 0 ? ["meta l4proto tcp jump gate"] : [];
    return [...questions, allowed, ...byName, ...refuse("")];
  }
  // One protocol each: nft cannot read back what it prints for a port of either.
  const resolvers = ["tcp", "udp"].map(
    (l4) => `ct original ip daddr @dns meta l4proto ${l4} ct original proto-dst 53 jump pass`,
  );
  return [
    ...questions,
    ...(namesAreOurs(policy) ? [] : resolvers),
    allowed,
    ...refuse("ct original ip daddr @refused "),
    "jump reach",
  ];
}

/** How what is allowed by its address gets there. */
function reachLines(policy: EgressPolicy): string[] {
  // Nothing that a proxy cannot carry leaves past it.
  if (policy.proxy) return ["meta l4proto tcp jump gate", ...refuse("")];
  if ((policy.transforms ?? []).length > 0)
    return [
      "meta l4proto tcp ct original proto-dst 443 jump gate",
      // HTTP/3 would go past the transforms; clients fall back to TCP.
      `meta l4proto udp ct original proto-dst 443 ${UNREACHABLE}`,
      "jump pass",
    ];
  return ["jump pass"];
}
