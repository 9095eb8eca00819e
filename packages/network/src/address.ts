import { AenvError } from "@aenv/base";

/** An IPv4 prefix; `base` has no bits below the prefix. */
export interface Cidr {
  base: number;
  bits: number;
}

/** Throws INVALID_ARGUMENT unless the text is four decimal numbers without leading zeros. */
export function parseIp(text: string): number {
  const parts = text.split(".");
  const ok = parts.length === 4 && parts.every((p) => /^(0|[1-9]\d{0,2})$/.test(p) && Number(p) < 256);
  if (!ok) throw new AenvError("INVALID_ARGUMENT", `${JSON.stringify(text.slice(0, 64))} is not an IPv4 address`);
  return parts.reduce((n, p) => n * 256 + Number(p), 0);
}

export function formatIp(ip: number): string {
  return [24, 16, 8, 0].map((shift) => Math.floor(ip / 2 ** shift) % 256).join(".");
}

/** `a.b.c.d/n` or a bare address (= /32). Host bits are cleared: `10.1.2.3/8` is 10.0.0.0/8. */
export function parseCidr(text: string): Cidr {
  const [ip = "", bits = "32", rest] = text.split("/");
  if (rest !== undefined || !/^\d{1,2}$/.test(bits) || Number(bits) > 32)
    throw new AenvError("INVALID_ARGUMENT", `${JSON.stringify(text.slice(0, 64))} is not an IPv4 CIDR`);
  const size = 2 ** (32 - Number(bits));
  return { base: Math.floor(parseIp(ip) / size) * size, bits: Number(bits) };
}

export const formatCidr = (c: Cidr): string => `${formatIp(c.base)}/${c.bits}`;

export const lastOf = (c: Cidr): number => c.base + 2 ** (32 - c.bits) - 1;

export const overlaps = (a: Cidr, b: Cidr): boolean => a.base <= lastOf(b) && b.base <= lastOf(a);

/** Sorted, without duplicates or prefixes inside others: an nft interval set refuses overlapping elements. */
export function mergeCidrs(list: readonly Cidr[]): Cidr[] {
  const out: Cidr[] = [];
  for (const c of [...list].sort((a, b) => a.base - b.base || a.bits - b.bits)) {
    const top = out.at(-1);
    if (!top || lastOf(top) < c.base) out.push(c);
  }
  return out;
}

/** Whether every address of `c` is in one of these. */
export function covers(list: readonly Cidr[], c: Cidr): boolean {
  let next = c.base;
  for (const m of mergeCidrs(list)) {
    if (lastOf(m) < next) continue;
    if (m.base > next) return false;
    next = lastOf(m) + 1;
    if (next > lastOf(c)) return true;
  }
  return false;
}

/** Whether an address, given as text, is in one of these; false for what is no IPv4 address. */
export function addressSet(list: readonly string[]): (ip: string) => boolean {
  const ranges = mergeCidrs(list.map(parseCidr));
  return (text) => {
    if (!/^\d+(\.\d+){3}$/.test(text)) return false;
    const ip = parseIp(text);
    let low = 0;
    for (let high = ranges.length; low < high; ) {
      const mid = (low + high) >> 1;
      if (lastOf(ranges[mid] as Cidr) < ip) low = mid + 1;
      else high = mid;
    }
    const range = ranges[low];
    return range !== undefined && range.base <= ip;
  };
}

/** The addresses of `list` that are in none of `holes`. */
export function subtractCidrs(list: readonly Cidr[], holes: readonly Cidr[]): Cidr[] {
  const without = (c: Cidr): Cidr[] => {
    const inside = holes.filter((h) => overlaps(h, c));
    if (inside.length === 0) return [c];
    if (inside.some((h) => h.bits <= c.bits)) return [];
    const half: Cidr = { base: c.base, bits: c.bits + 1 };
    return [half, { base: c.base + 2 ** (32 - half.bits), bits: half.bits }].flatMap(without);
  };
  return mergeCidrs(list).flatMap(without);
}

/**
 * Fewest prefixes that hold all these host-side addresses of slots (every second address of a block) and no other
 * slot's.
 */
export function coverIps(ips: readonly number[]): Cidr[] {
  const out: Cidr[] = [];
  for (const ip of [...new Set(ips)].sort((a, b) => a - b)) {
    // The slot's pair of addresses.
    let c: Cidr = { base: ip - (ip % 2), bits: 31 };
    for (let last = out.at(-1); last?.bits === c.bits && last.base + 2 ** (32 - c.bits) === c.base; last = out.at(-1)) {
      if (last.base % 2 ** (33 - c.bits) !== 0) break;
      out.pop();
      c = { base: last.base, bits: c.bits - 1 };
    }
    out.push(c);
  }
  return out;
}

/** 4096 slots of two addresses each. */
const BLOCK_BITS = 19;
export const MAX_SLOTS = 4096;

/** Searched in this order: upper 10/8, carrier-grade NAT space, benchmarking space. */
const POOLS = ["10.128.0.0/9", "100.64.0.0/10", "198.18.0.0/15"].map(parseCidr);

export function parseBlock(text: string): Cidr {
  const c = parseCidr(text);
  if (c.bits !== BLOCK_BITS || formatCidr(c) !== text)
    throw new AenvError("INVALID_ARGUMENT", `the address block ${text} is not a /${BLOCK_BITS}`);
  return c;
}

/** The block that holds this host-side address. */
export const blockOf = (ip: number): Cidr => {
  const size = 2 ** (32 - BLOCK_BITS);
  return { base: Math.floor(ip / size) * size, bits: BLOCK_BITS };
};

/**
 * A block that overlaps nothing in `taken`. Where to start looking follows from the instance, so that two
 * instances rarely even look at the same one.
 */
export function chooseBlock(instance: string, taken: readonly Cidr[]): Cidr {
  const size = 2 ** (32 - BLOCK_BITS);
  for (const pool of POOLS) {
    const count = 2 ** (BLOCK_BITS - pool.bits);
    // An odd multiplier spreads neighbouring instance numbers; every block is still visited once.
    const start = (Number.parseInt(instance, 16) * 40503) % count;
    for (let i = 0; i < count; i++) {
      const c: Cidr = { base: pool.base + ((start + i) % count) * size, bits: BLOCK_BITS };
      if (!taken.some((t) => overlaps(t, c))) return c;
    }
  }
  throw new AenvError("UNAVAILABLE", "no free address block for network slots", {
    hint: "The host's routes cover 10.128/9, 100.64/10 and 198.18/15; name a free /19 as the network's block.",
  });
}
