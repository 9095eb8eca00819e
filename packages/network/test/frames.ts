import { GATEWAY_MAC, GUEST_IP, GUEST_MAC } from "../src/rules.ts";

const ip4 = (text: string): Buffer => Buffer.from(text.split(".").map(Number));
const mac = (text: string): Buffer => Buffer.from(text.replaceAll(":", ""), "hex");

function checksum(...parts: Buffer[]): number {
  const data = Buffer.concat(parts);
  let sum = 0;
  for (let i = 0; i < data.length; i += 2) sum += (data[i] ?? 0) * 256 + (data[i + 1] ?? 0);
  while (sum > 0xffff) sum = (sum & 0xffff) + (sum >>> 16);
  return ~sum & 0xffff;
}

export interface Addressing {
  srcIp?: string;
  srcMac?: string;
  dstMac?: string;
}

function ethernet(type: number, payload: Buffer, a: Addressing): Buffer {
  const head = Buffer.concat([mac(a.dstMac ?? GATEWAY_MAC), mac(a.srcMac ?? GUEST_MAC), Buffer.alloc(2)]);
  head.writeUInt16BE(type, 12);
  return Buffer.concat([head, payload]);
}

function ipv4(protocol: number, dst: string, payload: Buffer, a: Addressing): Buffer {
  const head = Buffer.alloc(20);
  head[0] = 0x45;
  head.writeUInt16BE(20 + payload.length, 2);
  head[8] = 64;
  head[9] = protocol;
  ip4(a.srcIp ?? GUEST_IP).copy(head, 12);
  ip4(dst).copy(head, 16);
  head.writeUInt16BE(checksum(head), 10);
  return ethernet(0x0800, Buffer.concat([head, payload]), a);
}

/** A datagram without a checksum, as IPv4 allows. */
export function udp(dst: string, port: number, text: string, a: Addressing & { srcPort?: number } = {}): Buffer {
  const head = Buffer.alloc(8);
  head.writeUInt16BE(a.srcPort ?? 4000, 0);
  head.writeUInt16BE(port, 2);
  head.writeUInt16BE(8 + text.length, 4);
  return ipv4(17, dst, Buffer.concat([head, Buffer.from(text)]), a);
}

export function tcpSyn(dst: string, port: number, srcPort: number, a: Addressing = {}): Buffer {
  const head = Buffer.alloc(20);
  head.writeUInt16BE(srcPort, 0);
  head.writeUInt16BE(port, 2);
  head[12] = 0x50;
  head[13] = 0x02;
  head.writeUInt16BE(64000, 14);
  const pseudo = Buffer.concat([ip4(a.srcIp ?? GUEST_IP), ip4(dst), Buffer.from([0, 6, 0, head.length])]);
  head.writeUInt16BE(checksum(pseudo, head), 16);
  return ipv4(6, dst, head, a);
}

export function ping(dst: string, id: number, a: Addressing = {}): Buffer {
  const body = Buffer.alloc(16);
  body[0] = 8;
  body.writeUInt16BE(id, 4);
  body.writeUInt16BE(checksum(body), 2);
  return ipv4(1, dst, body, a);
}

/** An IP packet of a protocol that is none of tcp, udp, icmp. */
export const otherProtocol = (dst: string, protocol: number): Buffer => ipv4(protocol, dst, Buffer.alloc(24), {});

export function arp(op: "request" | "reply", senderMac: string, senderIp: string, targetIp: string): Buffer {
  const body = Buffer.concat([
    Buffer.from([0, 1, 8, 0, 6, 4, 0, op === "request" ? 1 : 2]),
    mac(senderMac),
    ip4(senderIp),
    Buffer.alloc(6),
    ip4(targetIp),
  ]);
  return ethernet(0x0806, body, { srcMac: senderMac, dstMac: "ff:ff:ff:ff:ff:ff" });
}

/** An ICMPv6 echo request to all nodes on the link. */
export function ping6(): Buffer {
  const head = Buffer.alloc(40 + 8);
  head[0] = 0x60;
  head.writeUInt16BE(8, 4);
  head[6] = 58;
  head[7] = 64;
  Buffer.from("fe80000000000000000000fffe000005", "hex").copy(head, 8);
  Buffer.from("ff020000000000000000000000000001", "hex").copy(head, 24);
  head[40] = 128;
  return ethernet(0x86dd, head, { dstMac: "33:33:00:00:00:01" });
}

export interface Seen {
  kind: "tcp" | "udp" | "icmp" | "arp" | "other";
  src: string;
  /** Of TCP and UDP. */
  srcPort: number;
  dstPort: number;
  /** TCP flags, ICMP type or ARP operation. */
  code: number;
}

/** What a frame that reached the guest is. */
export function decode(frame: Buffer): Seen {
  const type = frame.readUInt16BE(12);
  const none = { src: "", srcPort: 0, dstPort: 0, code: 0 };
  const dotted = (at: number): string => [...frame.subarray(at, at + 4)].join(".");
  if (type === 0x0806) return { ...none, kind: "arp", src: dotted(28), code: frame.readUInt16BE(20) };
  if (type !== 0x0800) return { ...none, kind: "other" };
  const src = dotted(26);
  const at = 14 + ((frame[14] ?? 0) & 15) * 4;
  const protocol = frame[23];
  if (protocol === 1) return { ...none, kind: "icmp", src, code: frame[at] ?? 0 };
  if (protocol !== 6 && protocol !== 17) return { ...none, kind: "other", src };
  const ports = { srcPort: frame.readUInt16BE(at), dstPort: frame.readUInt16BE(at + 2) };
  if (protocol === 17) return { kind: "udp", src, ...ports, code: 0 };
  return { kind: "tcp", src, ...ports, code: frame[at + 13] ?? 0 };
}
