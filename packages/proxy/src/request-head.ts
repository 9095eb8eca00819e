import type { IncomingMessage } from "node:http";
import { isIP } from "node:net";
import type { TLSSocket } from "node:tls";
import { lowerName } from "./names.ts";

export type RequestFraming = { kind: "none" } | { kind: "length"; bytes: string } | { kind: "chunked" };

/** Raised for a request that node's parser let pass and no guest should see: 400. */
export class BadRequest extends Error {
  override readonly name = "BadRequest";
}

// biome-ignore lint: the class is the definition
const VALUE = /^[\t\x20-\x7e\x80-\xff]*$/;
const TARGET = /^[\x21-\x7e\x80-\xff]+$/;

/** node's parser has refused ambiguous framing (both, or repeated, or not ending in chunked) before. */
export function framingOf(req: IncomingMessage): RequestFraming {
  // The parser takes "GET /" for HTTP/0.9, which has neither headers nor a status line.
  if (req.httpVersionMajor !== 1) throw new BadRequest("HTTP/1.0 or 1.1 is required");
  const coding = req.headers["transfer-encoding"];
  if (coding !== undefined) {
    // "gzip, chunked" is legal, but a guest would see one coding taken off; nobody sends it.
    if (coding.trim().toLowerCase() !== "chunked") throw new BadRequest("Transfer-Encoding must be chunked");
    return { kind: "chunked" };
  }
  const length = req.headers["content-length"];
  if (length === undefined) return { kind: "none" };
  if (!/^[0-9]{1,15}$/.test(length)) throw new BadRequest("Content-Length is not a number");
  return { kind: "length", bytes: length };
}

export interface RequestHeadOptions {
  path: string;
  authority: string;
  /** The Host header for the guest; the authority when left out. */
  host?: string;
  framing: RequestFraming;
  /** Pass `Expect: 100-continue` on. */
  expectContinue: boolean;
  /** Protocol of an upgrade request, passed on as the client wrote it. */
  upgrade: string | undefined;
}

/**
 * The request head for the guest. Hop-by-hop headers go, framing is written anew from what was parsed, X-Forwarded-* say
 * what the edge knows itself.
 */
export function requestHead(req: IncomingMessage, o: RequestHeadOptions): string {
  if (!TARGET.test(o.path)) throw new BadRequest("Invalid request target");
  if (!VALUE.test(o.authority)) throw new BadRequest("Invalid host");
  const raw = req.rawHeaders;
  const connection = req.headers.connection;
  const dropped = connection === undefined ? undefined : listed(connection);
  let head = `${req.method} ${o.path} HTTP/1.1\r\nHost: ${o.host ?? o.authority}\r\n`;
  let forwardedFor = "";
  let hosts = 0;
  for (let i = 0; i < raw.length; i += 2) {
    const name = raw[i] as string;
    const value = raw[i + 1] as string;
    const lower = lowerName(name);
    switch (lower) {
      case "host":
        if (++hosts > 1) throw new BadRequest("More than one Host header");
        continue;
      case "x-forwarded-for":
        if (VALUE.test(value)) forwardedFor += `${value}, `;
        continue;
      case "te":
        if (/(?:^|[ ,])trailers(?:$|[ ,;])/i.test(value)) head += "TE: trailers\r\n";
        continue;
      case "expect":
        if (o.expectContinue) head += "Expect: 100-continue\r\n";
        continue;
      case "connection":
      case "keep-alive":
      case "proxy-connection":
      case "proxy-authorization":
      case "transfer-encoding":
      case "content-length":
      case "upgrade":
      case "http2-settings":
      case "x-forwarded-host":
      case "x-forwarded-proto":
      case "e2b-traffic-access-token":
        continue;
      default:
    }
    if (dropped?.has(lower)) continue;
    if (!VALUE.test(value)) throw new BadRequest("A header has control characters");
    head += `${name}: ${value}\r\n`;
  }
  const encrypted = (req.socket as Partial<TLSSocket>).encrypted === true;
  const client = clientAddress(req.socket.remoteAddress);
  head += `X-Forwarded-For: ${forwardedFor}${client}\r\nX-Forwarded-Host: ${o.authority}\r\nX-Forwarded-Proto: ${encrypted ? "https" : "http"}\r\n`;
  if (o.framing.kind === "length") head += `Content-Length: ${o.framing.bytes}\r\n`;
  else if (o.framing.kind === "chunked") head += "Transfer-Encoding: chunked\r\n";
  if (o.upgrade !== undefined) head += `Connection: Upgrade\r\nUpgrade: ${o.upgrade}\r\n`;
  return `${head}\r\n`;
}

/** Names that the Connection header takes off the message; undefined in the usual cases. */
function listed(connection: string): ReadonlySet<string> | undefined {
  const plain = connection.toLowerCase();
  if (plain === "keep-alive" || plain === "close" || plain === "upgrade") return undefined;
  return new Set(plain.split(",").map((s) => s.trim()));
}

function clientAddress(address: string | undefined): string {
  const plain = address?.startsWith("::ffff:") ? address.slice(7) : (address ?? "");
  return isIP(plain) ? plain : "unknown";
}
