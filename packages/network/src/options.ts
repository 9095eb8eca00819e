import { AenvError } from "@aenv/base";
import {
  blockOf,
  type Cidr,
  chooseBlock,
  formatCidr,
  MAX_SLOTS,
  overlaps,
  parseBlock,
  parseCidr,
  parseIp,
} from "./address.ts";
import { parseOpened } from "./egress.ts";
import type { HostAddresses } from "./host.ts";
import { checkInstanceId } from "./names.ts";
import type { NetworkOptions } from "./types.ts";

/** Throws INVALID_ARGUMENT for the first option that is wrong. */
export function checkOptions(options: NetworkOptions): void {
  checkInstanceId(options.instance);
  if (!Number.isInteger(options.limit) || options.limit < 1 || options.limit > MAX_SLOTS)
    throw new AenvError("INVALID_ARGUMENT", `the limit of network slots must be 1..${MAX_SLOTS}`);
  if (options.uplink !== undefined && !/^[^\s/"]{1,15}$/.test(options.uplink))
    throw new AenvError("INVALID_ARGUMENT", `${JSON.stringify(options.uplink)} is not a network device`);
  for (const dns of options.dns) checkResolver(dns);
  for (const cidr of options.deny ?? []) parseCidr(cidr);
  for (const cidr of options.open ?? []) parseOpened(cidr);
  for (const [name, value] of Object.entries(options.limits ?? {}))
    if (!Number.isInteger(value) || value < 1 || value > 2 ** 40)
      throw new AenvError("INVALID_ARGUMENT", `the limit ${name} of sandboxes is not a positive whole number`);
  if (options.block !== undefined) parseBlock(options.block);
}

function checkResolver(text: string): void {
  const first = Math.floor(parseIp(text) / 2 ** 24);
  if (first === 0 || first === 127 || first >= 224)
    throw new AenvError("INVALID_ARGUMENT", `guests cannot reach the resolver ${text}`, {
      hint: "Name a resolver that is not on the loopback device.",
    });
}

/** The block of host-side addresses for this instance on this host. */
export function findBlock(id: string, options: NetworkOptions, { taken: hosts, own }: HostAddresses): Cidr {
  const taken = [...hosts, ...options.dns.map(parseCidr)];
  const used = own[0] === undefined ? undefined : blockOf(parseIp(own[0]));
  const given = options.block === undefined ? undefined : parseBlock(options.block);
  // Running VMs keep their addresses, whatever the options and the host's routes say now.
  if (used) return used;
  const clash = given && taken.find((t) => overlaps(t, given));
  if (given && !clash) return given;
  const chosen = chooseBlock(id, taken);
  if (given && clash)
    options.logger.warn(
      { block: formatCidr(given), clash: formatCidr(clash), chosen: formatCidr(chosen) },
      "the host now uses the slots' addresses itself: another block is used",
    );
  return chosen;
}
