import { coverIps, formatCidr, parseIp } from "./address.ts";
import type { SlotPlan } from "./names.ts";
import { GATEWAY_IP, GATEWAY_MAC, GUEST_IP, GUEST_MAC } from "./rules.ts";

/** Ends of the veth; one pair per slot, so the same everywhere. */
const HOST_MAC = "02:fc:00:00:00:02";
const UP_MAC = "02:fc:00:00:00:03";

/** Plus the instance number: the group of devices about to be deleted. */
const GROUP_BASE = 0x0ae10000;

/** How many netns are worked on at once. The work is mostly waiting for the kernel's grace periods. */
const PARALLEL = 16;

/** Lines of `ip -batch` in the root netns that make the netns and the veth of the slots. */
export function ipMake(slots: readonly SlotPlan[]): string {
  return slots
    .flatMap((s) => [
      `netns add ${s.netns}`,
      `link add ${s.veth} address ${HOST_MAC} type veth peer name up0 address ${UP_MAC} netns ${s.netns}`,
      `link set ${s.veth} addrgenmode none`,
      `addr add ${s.hostSide}/31 dev ${s.veth}`,
      `neigh replace ${s.hostIp} lladdr ${UP_MAC} dev ${s.veth} nud permanent`,
      // Without effect until the other end is up, which comes last.
      `link set ${s.veth} up`,
    ])
    .join("\n");
}

/** Lines of `ip -batch` inside the slot's netns. */
export function ipInside(s: SlotPlan): string {
  return [
    `tuntap add tap0 mode tap user ${s.uid} group ${s.gid}`,
    `link set tap0 address ${GATEWAY_MAC} addrgenmode none`,
    "link set up0 addrgenmode none",
    `addr add ${GATEWAY_IP}/30 dev tap0`,
    `addr add ${s.hostIp}/31 dev up0`,
    "link set tap0 up",
    "link set up0 up",
    `neigh replace ${GUEST_IP} lladdr ${GUEST_MAC} dev tap0 nud permanent`,
    `neigh replace ${s.hostSide} lladdr ${HOST_MAC} dev up0 nud permanent`,
    `route add default via ${s.hostSide} dev up0`,
  ].join("\n");
}

const set = (value: number, path: string): string => `echo ${value} > /proc/sys/net/${path}`;

/** For the host side of a veth. The kernel may have no IPv6 at all. */
const sysctlsOutside = (veth: string): string =>
  [
    set(1, `ipv4/conf/${veth}/forwarding`),
    set(1, `ipv4/conf/${veth}/rp_filter`),
    set(0, `ipv4/conf/${veth}/accept_redirects`),
    set(0, `ipv4/conf/${veth}/send_redirects`),
    set(1, `ipv4/conf/${veth}/arp_ignore`),
    set(0, `ipv4/conf/${veth}/proxy_arp`),
    `[ ! -e /proc/sys/net/ipv6/conf/${veth} ] || ${set(1, `ipv6/conf/${veth}/disable_ipv6`)}`,
  ].join("\n");

/** For the netns; ip_forward first, because it resets others. */
const SYSCTLS_INSIDE = [
  set(1, "ipv4/ip_forward"),
  ...["all", "default", "up0", "tap0"].flatMap((dev) => [
    set(1, `ipv4/conf/${dev}/rp_filter`),
    set(0, `ipv4/conf/${dev}/accept_redirects`),
    set(0, `ipv4/conf/${dev}/secure_redirects`),
    set(0, `ipv4/conf/${dev}/send_redirects`),
    set(0, `ipv4/conf/${dev}/accept_source_route`),
    set(0, `ipv4/conf/${dev}/proxy_arp`),
    set(1, `ipv4/conf/${dev}/arp_ignore`),
  ]),
  // Half-sent fragments of a guest hold at most this much of the host's memory.
  set(196608, "ipv4/ipfrag_low_thresh"),
  set(262144, "ipv4/ipfrag_high_thresh"),
  `[ ! -e /proc/sys/net/ipv6/conf/all ] || { ${set(1, "ipv6/conf/all/disable_ipv6")}; ${set(1, "ipv6/conf/default/disable_ipv6")}; }`,
].join("\n");

const heredoc = (command: string, tag: string, text: string, after = ""): string =>
  `${command} <<'${tag}'${after}\n${text.trimEnd()}\n${tag}\n`;

const quietly = (command: string): string => `${command} >/dev/null 2>&1 || :`;

/**
 * A script for one `sh` that makes the slots. Prints `ok INDEX` for each that is complete; errors go to stderr.
 * `rules` gives the nft text of a slot.
 */
export function makeScript(slots: readonly SlotPlan[], rules: (slot: SlotPlan) => string): string {
  const out = ["set -e", heredoc("ip -batch -", "HOST", ipMake(slots))];
  for (const s of slots) out.push(sysctlsOutside(s.veth));
  out.push("set +e");
  slots.forEach((s, i) => {
    const inside = [
      "set -e",
      heredoc("ip -batch -", "IP", ipInside(s)),
      SYSCTLS_INSIDE,
      heredoc("nft -f -", "NFT", rules(s)),
      `echo ok ${s.index}`,
    ].join("\n");
    out.push(heredoc(`nsenter --net=/run/netns/${s.netns} sh -s`, "SLOT", inside, " &"));
    if (i % PARALLEL === PARALLEL - 1) out.push("wait");
  });
  out.push("wait");
  return out.join("\n");
}

/**
 * A script that removes the slots, whatever part of them exists, and forgets their connections. Prints `gone INDEX`
 * for each of which no name is left.
 */
export function removeScript(instance: string, slots: readonly SlotPlan[]): string {
  // Deleting a group of devices waits for one grace period of the kernel, not for one per device.
  const group = GROUP_BASE + Number.parseInt(instance, 16);
  const lines = [
    ...slots.map((s) => `link set dev ${s.veth} group ${group}`),
    `link del group ${group}`,
    ...slots.map((s) => `netns del ${s.netns}`),
  ];
  const out = [heredoc("ip -force -batch - >/dev/null 2>&1", "HOST", lines.join("\n"), " || :")];
  const stale = coverIps(slots.map((s) => parseIp(s.hostIp))).map((c) => quietly(`conntrack -D -s ${formatCidr(c)}`));
  out.push("if command -v conntrack >/dev/null; then", ...stale, "fi");
  for (const s of slots) {
    // A crash between open() and mount() of `ip netns add` leaves a plain file, which `ip netns del` removes as well.
    out.push(`[ -e /run/netns/${s.netns} ] || [ -e /proc/sys/net/ipv4/conf/${s.veth} ] || echo gone ${s.index}`);
  }
  return out.join("\n");
}
