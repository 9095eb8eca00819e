/**
 * A small DNS server (RFC 1035, UDP) that knows one domain and everything below it, for machines whose operator has no DNS
 * for it. It refuses every other question, so that resolvers go on to their next server.
 */
import { createSocket, type RemoteInfo, type Socket } from "node:dgram";
import { once } from "node:events";
import { isIP } from "node:net";
import { AenvError, type Logger, messageOf } from "@aenv/base";
import { addressBytes } from "./address.ts";

const HEADER_BYTES = 12;
const TYPE = { A: 1, AAAA: 28, ANY: 255 } as const;
const CLASS = { IN: 1, ANY: 255 } as const;
const CODE = { ok: 0, format: 1, unimplemented: 4, refused: 5 } as const;
/** A pointer to the name of the question. */
const QUESTION_NAME = Buffer.from([0xc0, HEADER_BYTES]);
const TTL_SECONDS = 60;
const MAX_NAME_BYTES = 255;

export interface DnsAnswers {
  /** Without a port, in lower case. */
  domain: string;
  /** IPv4 and IPv6 addresses of the node. */
  addresses: readonly string[];
}

interface Question {
  name: string;
  type: number;
  class: number;
  /** Of the question in the packet, its end exclusive. */
  end: number;
}

function questionOf(packet: Buffer): Question | undefined {
  const labels: string[] = [];
  let at = HEADER_BYTES;
  for (;;) {
    const length = packet[at];
    // Pointers have no place in the only question of a packet.
    if (length === undefined || length > 63 || at + length - HEADER_BYTES > MAX_NAME_BYTES) return undefined;
    at++;
    if (length === 0) break;
    if (at + length > packet.length) return undefined;
    labels.push(packet.toString("latin1", at, at + length).toLowerCase());
    at += length;
  }
  if (at + 4 > packet.length) return undefined;
  return { name: labels.join("."), type: packet.readUInt16BE(at), class: packet.readUInt16BE(at + 2), end: at + 4 };
}

function record(type: number, data: Buffer): Buffer {
  const fixed = Buffer.alloc(10);
  fixed.writeUInt16BE(type, 0);
  fixed.writeUInt16BE(CLASS.IN, 2);
  fixed.writeUInt32BE(TTL_SECONDS, 4);
  fixed.writeUInt16BE(data.length, 8);
  return Buffer.concat([QUESTION_NAME, fixed, data]);
}

function reply(query: Buffer, code: number, question?: Question, answers: readonly Buffer[] = []): Buffer {
  const header = Buffer.alloc(HEADER_BYTES);
  query.copy(header, 0, 0, 2);
  const opcodeAndRecursionDesired = (query[2] ?? 0) & 0x79;
  const authoritative = code === CODE.ok ? 0x04 : 0;
  header[2] = 0x80 | opcodeAndRecursionDesired | authoritative;
  header[3] = code;
  header.writeUInt16BE(question ? 1 : 0, 4);
  header.writeUInt16BE(answers.length, 6);
  return Buffer.concat([header, ...(question ? [query.subarray(HEADER_BYTES, question.end)] : []), ...answers]);
}

/** The answer to one packet; undefined for what is no question and gets none. */
export function answerDns(packet: Buffer, { domain, addresses }: DnsAnswers): Buffer | undefined {
  // An answer to an answer could go on for ever.
  if (packet.length < HEADER_BYTES || (packet[2] as number) & 0x80) return undefined;
  if (((packet[2] as number) >> 3) & 0x0f) return reply(packet, CODE.unimplemented);
  if (packet.readUInt16BE(4) !== 1) return reply(packet, CODE.format);
  const question = questionOf(packet);
  if (!question) return reply(packet, CODE.format);
  const ours = question.name === domain || question.name.endsWith(`.${domain}`);
  if (!ours || (question.class !== CLASS.IN && question.class !== CLASS.ANY)) {
    return reply(packet, CODE.refused, question);
  }
  const answers = addresses.flatMap((a) => {
    const type = isIP(a) === 4 ? TYPE.A : TYPE.AAAA;
    return question.type === type || question.type === TYPE.ANY ? [record(type, addressBytes(a))] : [];
  });
  return reply(packet, CODE.ok, question, answers);
}

export interface DnsOptions extends DnsAnswers {
  /** `address:port`. */
  listen: string;
  logger: Logger;
}

export class DnsServer implements AsyncDisposable {
  readonly #socket: Socket;

  static async open(o: DnsOptions): Promise<DnsServer> {
    const colon = o.listen.lastIndexOf(":");
    const address = o.listen.slice(0, colon).replace(/^\[|\]$/g, "");
    const port = Number(o.listen.slice(colon + 1));
    const family = isIP(address);
    const hint = 'Write "dns": {"listen": "127.0.0.1:53", "answer": ["192.0.2.7"]} in config.json.';
    if (family === 0 || !Number.isInteger(port) || port < 0 || port > 65_535)
      throw new AenvError("INVALID_ARGUMENT", `dns.listen must be an address and a port, not ${o.listen}`, { hint });
    const wrong = o.addresses.find((a) => isIP(a) === 0);
    if (wrong !== undefined || o.addresses.length === 0)
      throw new AenvError("INVALID_ARGUMENT", `dns.answer must be addresses of this node, not ${wrong ?? "empty"}`, {
        hint,
      });
    const socket = createSocket(family === 4 ? "udp4" : "udp6");
    const answers = { domain: o.domain.toLowerCase().replace(/:[0-9]+$/, ""), addresses: o.addresses };
    socket.on("message", (packet: Buffer, from: RemoteInfo) => {
      const answer = answerDns(packet, answers);
      // Who cannot be answered asks again.
      if (answer) socket.send(answer, from.port, from.address, () => {});
    });
    try {
      socket.bind({ address, port });
      await once(socket, "listening");
    } catch (e) {
      socket.close();
      throw AenvError.from(e, `listen for DNS on ${o.listen}`);
    }
    socket.on("error", (e) => o.logger.error({ error: messageOf(e) }, "DNS"));
    return new DnsServer(socket);
  }

  private constructor(socket: Socket) {
    this.#socket = socket;
  }

  get port(): number {
    return this.#socket.address().port;
  }

  async [Symbol.asyncDispose](): Promise<void> {
    const closed = once(this.#socket, "close");
    this.#socket.close();
    await closed;
  }
}
