import { isIP } from "node:net";

/** The 4 or 16 bytes of an IP address. */
export function addressBytes(address: string): Buffer {
  if (isIP(address) === 4) return Buffer.from(address.split(".").map(Number));
  // The URL parser writes an embedded IPv4 address as groups and leaves one "::" at most.
  const [head = "", tail = ""] = new URL(`http://[${address}]`).hostname.slice(1, -1).split("::");
  const groups = (text: string): number[] => (text === "" ? [] : text.split(":").map((g) => Number.parseInt(g, 16)));
  const [before, after] = [groups(head), groups(tail)];
  const zeros = Array<number>(8 - before.length - after.length).fill(0);
  return Buffer.from([...before, ...zeros, ...after].flatMap((g) => [g >> 8, g & 255]));
}
