import { readFile } from "node:fs/promises";

/** Used when the host's own resolvers are on its loopback, where no guest reaches them. */
const FALLBACK = ["1.1.1.1", "8.8.8.8"];

/** IPv4 resolvers of a resolv.conf text that a guest could reach, else public ones. */
export function usableResolvers(resolvConf: string): string[] {
  const found = [...resolvConf.matchAll(/^\s*nameserver\s+(\d{1,3}(?:\.\d{1,3}){3})\s*$/gm)].map((m) => m[1] ?? "");
  const usable = found.filter((ip) => !/^(127|0)\.|^169\.254\./.test(ip));
  return usable.length > 0 ? usable : FALLBACK;
}

/** The resolvers that guests of this host ask. */
export async function guestResolvers(): Promise<string[]> {
  return usableResolvers(await readFile("/etc/resolv.conf", "utf8").catch(() => ""));
}
