import { isToken, lowerName } from "./names.ts";

/** What a guest sent is not HTTP/1.x; `message` says what is wrong, for the answer and the log. */
export class MalformedResponse extends Error {
  override readonly name = "MalformedResponse";
}

/** How the end of a response body is found (RFC 9112, section 6.3). */
export type Framing = { kind: "none" } | { kind: "length"; bytes: number } | { kind: "chunked" } | { kind: "close" };

export interface ResponseHead {
  status: number;
  reason: string;
  /** name, value, name, value… without hop-by-hop and framing headers (Content-Length stays where it is a fact). */
  headers: string[];
  framing: Framing;
  /** The connection may serve another request after this response. */
  reusable: boolean;
  /** What the guest said about its patience: `Keep-Alive: timeout=N`, in milliseconds. */
  keepAliveMs: number | undefined;
  /** Value of the Upgrade header of a 101. */
  upgrade: string | undefined;
  hasDate: boolean;
}

const LF = 10;
const CR = 13;
const STATUS_LINE = /^HTTP\/1\.([01]) ([1-9][0-9]{2})(?: (.*))?$/;
// Visible characters, blanks and obs-text; no other control character.
// biome-ignore lint: the class is the definition
const VALUE = /^[\t\x20-\x7e\x80-\xff]*$/;
const LENGTH = /^[0-9]{1,15}$/;

/**
 * Collects bytes until a head is complete. `push` returns the head's text and how much of the chunk belongs to it, or
 * undefined while it wants more. Never holds more than `limit` bytes.
 */
export class HeadCollector {
  #buffer: Buffer | undefined;
  #length = 0;
  #left: number;

  constructor(limit: number) {
    this.#left = limit;
  }

  get started(): boolean {
    return this.#length > 0;
  }

  push(chunk: Buffer): { text: string; used: number } | undefined {
    const used = this.#endIn(chunk);
    if (used > this.#left || (used < 0 && chunk.length > this.#left)) {
      throw new MalformedResponse("its response head is too large");
    }
    if (used < 0) {
      this.#append(chunk);
      return undefined;
    }
    this.#left -= used;
    if (this.#length === 0) return { text: chunk.toString("latin1", 0, used), used };
    const text = (this.#buffer as Buffer).toString("latin1", 0, this.#length) + chunk.toString("latin1", 0, used);
    this.#length = 0;
    return { text, used };
  }

  #append(chunk: Buffer): void {
    this.#left -= chunk.length;
    const need = this.#length + chunk.length;
    if (!this.#buffer || this.#buffer.length < need) {
      const grown = Buffer.allocUnsafe(Math.max(1024, need * 2));
      this.#buffer?.copy(grown, 0, 0, this.#length);
      this.#buffer = grown;
    }
    chunk.copy(this.#buffer, this.#length);
    this.#length = need;
  }

  #at(chunk: Buffer, i: number): number | undefined {
    return i >= 0 ? chunk[i] : this.#length + i >= 0 ? this.#buffer?.[this.#length + i] : undefined;
  }

  /** Index after the empty line that ends the head, or -1. Lines may end in a bare LF. */
  #endIn(chunk: Buffer): number {
    for (let lf = chunk.indexOf(LF); lf >= 0; lf = chunk.indexOf(LF, lf + 1)) {
      const before = this.#at(chunk, lf - 1) === CR ? lf - 2 : lf - 1;
      if (this.#at(chunk, before) === LF) return lf + 1;
    }
    return -1;
  }
}

function parseLength(previous: number | undefined, value: string): number {
  // A list of equal values is one value (RFC 9112, 6.3).
  if (previous === undefined && LENGTH.test(value)) return Number(value);
  let length = previous;
  for (const part of value.split(",")) {
    const text = part.trim();
    if (!LENGTH.test(text)) throw new MalformedResponse("its Content-Length is not a number");
    const n = Number(text);
    if (length !== undefined && n !== length) throw new MalformedResponse("it has two values of Content-Length");
    length = n;
  }
  return length as number;
}

function listOf(value: string): string[] {
  return value.split(",").map((s) => s.trim().toLowerCase());
}

/** No control character, and a carriage return only before a line feed. */
// biome-ignore lint: the class is the definition
const BAD_HEAD = /[^\t\r\n\x20-\x7e\x80-\xff]|\r[^\n]/;

/** Parses one head (interim or final). Throws MalformedResponse for everything a client must not be shown. */
export function parseResponseHead(text: string, method: string): ResponseHead {
  let at = text.indexOf("\n");
  const match = STATUS_LINE.exec(text.slice(0, text[at - 1] === "\r" ? at - 1 : at));
  if (!match) throw new MalformedResponse("it did not answer with HTTP/1.x");
  const status = Number(match[2]);
  const reason = match[3] ?? "";
  if (!VALUE.test(reason)) throw new MalformedResponse("its status line has control characters");
  if (BAD_HEAD.test(text)) throw new MalformedResponse("it has an invalid header line");

  const headers: string[] = [];
  let close = match[1] === "0";
  let chunked = false;
  let length: number | undefined;
  let keepAliveMs: number | undefined;
  let upgrade: string | undefined;
  let hasDate = false;
  let dropped: Set<string> | undefined;

  for (;;) {
    const start = at + 1;
    at = text.indexOf("\n", start);
    if (at < 0) break;
    const end = text[at - 1] === "\r" ? at - 1 : at;
    if (end <= start) break;
    const colon = text.indexOf(":", start);
    const name = colon < 0 || colon > end ? "" : text.slice(start, colon).trimEnd();
    const value = text.slice(colon + 1, end).trim();
    // A folded line starts with a blank, which no token has.
    if (!isToken(name)) throw new MalformedResponse("it has an invalid header line");
    switch (lowerName(name)) {
      case "connection":
      case "proxy-connection":
        if (value === "keep-alive") continue;
        for (const token of listOf(value)) {
          if (token === "close") close = true;
          else if (token !== "keep-alive" && token !== "upgrade") (dropped ??= new Set()).add(token);
        }
        continue;
      case "keep-alive": {
        const seconds = /(?:^|[ ,])timeout=([0-9]{1,6})/i.exec(value)?.[1];
        if (seconds !== undefined) keepAliveMs = Number(seconds) * 1000;
        continue;
      }
      case "transfer-encoding":
        if (chunked || value.toLowerCase() !== "chunked")
          throw new MalformedResponse("its Transfer-Encoding is not chunked");
        chunked = true;
        continue;
      case "content-length":
        length = parseLength(length, value);
        continue;
      case "upgrade":
        upgrade = value;
        continue;
      case "te":
      case "proxy-authenticate":
        continue;
      case "date":
        hasDate = true;
        break;
      default:
    }
    headers.push(name, value);
  }
  if (chunked && length !== undefined) throw new MalformedResponse("it has both Content-Length and Transfer-Encoding");
  const kept = dropped ? without(headers, dropped) : headers;

  let framing: Framing;
  if (status < 200 || status === 204) framing = { kind: "none" };
  else if (method === "HEAD" || status === 304) {
    framing = { kind: "none" };
    if (length !== undefined) kept.push("Content-Length", String(length));
  } else if (chunked) framing = { kind: "chunked" };
  else if (length !== undefined) {
    framing = { kind: "length", bytes: length };
    kept.push("Content-Length", String(length));
  } else framing = { kind: "close" };
  return {
    status,
    reason,
    headers: kept,
    framing,
    reusable: !close && framing.kind !== "close",
    keepAliveMs,
    upgrade,
    hasDate,
  };
}

function without(headers: readonly string[], dropped: ReadonlySet<string>): string[] {
  const kept: string[] = [];
  for (let i = 0; i < headers.length; i += 2) {
    const name = headers[i] as string;
    if (!dropped.has(name.toLowerCase())) kept.push(name, headers[i + 1] as string);
  }
  return kept;
}

/** Trailer lines of a chunked body, as name and value pairs; framing and connection fields are dropped. */
export function parseTrailers(text: string): [string, string][] {
  const out: [string, string][] = [];
  for (const raw of text.split("\n")) {
    const line = raw.endsWith("\r") ? raw.slice(0, -1) : raw;
    if (line === "") continue;
    const colon = line.indexOf(":");
    const name = colon < 0 ? "" : line.slice(0, colon).trimEnd();
    const value = line.slice(colon + 1).trim();
    if (!isToken(name) || !VALUE.test(value)) throw new MalformedResponse("it has an invalid trailer line");
    if (!NEVER_TRAILER.has(name.toLowerCase())) out.push([name, value]);
  }
  return out;
}

/** RFC 9110, 6.5.1: fields that frame, route or authenticate a message. */
export const NEVER_TRAILER: ReadonlySet<string> = new Set(
  "transfer-encoding content-length host connection keep-alive te trailer upgrade content-encoding content-type content-range authorization set-cookie cookie e2b-traffic-access-token x-access-token".split(
    " ",
  ),
);
