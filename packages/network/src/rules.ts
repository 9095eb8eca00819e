import { type Cidr, formatCidr, mergeCidrs, parseCidr } from "./address.ts";
import { type SlotPlan, tableName, vethPrefix } from "./names.ts";
import type { EgressPolicy, GuestLimits } from "./types.ts";

export const GUEST_IP = "169.254.0.21";
export const GATEWAY_IP = "169.254.0.22";
export const GUEST_MAC = "02:fc:00:00:00:05";
/** The same in every slot: a resumed guest still has it in its neighbour table. */
export const GATEWAY_MAC = "02:fc:00:00:00:01";

/** No rule of a sandbox opens these. IANA special-purpose space and the metadata addresses of clouds. */
const ALWAYS_DENIED = [
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

/** Before conntrack (-200) and before raw (-300), after defragmentation (-400): what is refused here costs no state. */
const GUARD_PRIORITY = -310;

export interface NodeRules {
  instance: string;
  block: Cidr;
  dns: readonly string[];
  /** Devices that lead to the internet. */
  uplinks: readonly string[];
  deny: readonly Cidr[];
  /** Most tracked connections per slot in the root netns. */
  flowsPerSlot: number;
}

const elements = (list: readonly string[]): string =>
  list.length > 0 ? `\n    elements = { ${list.join(", ")} }` : "";

const sets = (n: Pick<NodeRules, "dns" | "deny">): string => `  set dns {
    type ipv4_addr${elements(n.dns)}
  }
  set denied {
    type ipv4_addr
    flags interval${elements(mergeCidrs([...ALWAYS_DENIED, ...n.deny]).map(formatCidr))}
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
  return replaceTable(
    "inet",
    tableName(n.instance),
    `${sets(n)}
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
    ct state related meta l4proto icmp accept
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
    oifname != @uplink counter drop
    ip daddr @denied counter drop
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
  }`,
  );
}

/** Replaces the devices that lead to the internet, for `nft -f` in the root netns. */
export function uplinkRules(instance: string, uplinks: readonly string[]): string {
  const set = `inet ${tableName(instance)} uplink`;
  const list = uplinks.map((u) => `"${u}"`).join(", ");
  return `flush set ${set}\n${list === "" ? "" : `add element ${set} { ${list} }\n`}`;
}

/** The tables inside a slot's netns, for `nft -f` there; the netns is new. */
export function slotRules(
  instance: string,
  slot: SlotPlan,
  node: Pick<NodeRules, "dns" | "deny">,
  limits: GuestLimits,
  policy: EgressPolicy,
): string {
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
    flags interval${elements(cidrs(policy.allow))}
  }
  set refused {
    type ipv4_addr
    flags interval${elements(cidrs(policy.deny))}
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
    ip daddr @denied counter drop
    fib daddr type != unicast counter drop
    accept
  }
  chain to_guest {
    type nat hook prerouting priority dstnat; policy accept;
    iifname "up0" ip saddr ${slot.hostSide} ip daddr ${slot.hostIp} dnat ip to ${GUEST_IP}
  }
  chain to_src {
    type nat hook postrouting priority srcnat; policy accept;
    oifname "tap0" snat ip to ${GATEWAY_IP}
    oifname "up0" snat ip to ${slot.hostIp}
  }
  chain input {
    type filter hook input priority filter; policy drop;
  }
  chain output {
    type filter hook output priority filter; policy drop;
    meta l4proto icmp accept
  }
  chain forward {
    type filter hook forward priority filter; policy drop;
    ct state invalid counter drop
    ct state established accept
    ct state related meta l4proto icmp accept
    iifname "up0" oifname "tap0" ct status dnat accept
    iifname "tap0" oifname "up0" jump new_flow
  }
  chain new_flow {
    meta l4proto != { tcp, udp, icmp } counter drop
    meta l4proto icmp icmp type != echo-request counter drop
    limit rate over ${limits.newPerSecond}/second burst ${limits.newBurst} packets counter drop
    ct count over ${limits.connections} counter drop
    jump sandbox
  }
  chain sandbox {
${policyLines(policy)
  .map((l) => `    ${l}`)
  .join("\n")}
  }`,
  );
  return tap + inet;
}

/** Replaces a slot's policy in one transaction, for `nft -f` in its netns. Holds for new connections. */
export function policyRules(instance: string, policy: EgressPolicy): string {
  const table = `inet ${tableName(instance)}`;
  const fill = (set: string, list: readonly string[]): string =>
    `flush set ${table} ${set}\n${list.length > 0 ? `add element ${table} ${set} { ${list.join(", ")} }\n` : ""}`;
  const rules = policyLines(policy).map((l) => `add rule ${table} sandbox ${l}\n`);
  return `flush chain ${table} sandbox\n${fill("allowed", cidrs(policy.allow))}${fill("refused", cidrs(policy.deny))}${rules.join("")}`;
}

const cidrs = (list: readonly string[] | undefined): string[] =>
  mergeCidrs((list ?? []).map(parseCidr)).map(formatCidr);

function policyLines(policy: EgressPolicy): string[] {
  // A program in the guest learns at once that it may not, instead of waiting for its own timeout.
  const refuse = "counter reject with icmp type admin-prohibited";
  if (!policy.allowInternet) return ["ip daddr @allowed accept", refuse];
  return [
    "ip daddr @dns meta l4proto { tcp, udp } th dport 53 accept",
    "ip daddr @allowed accept",
    `ip daddr @refused ${refuse}`,
    "accept",
  ];
}
