/** What the first bytes of a connection say about where it wants to go. The bytes come from guests. */

export type Sniffed =
  /** More bytes are needed. */
  | { kind: "more" }
  /** `name` in lower case without a final dot; absent where there is none, or none that can be read in one way. */
  | { kind: "tls" | "http"; name?: string }
  | { kind: "other" };

/** Most bytes that are looked at; whoever needs more for a first word is refused. */
export const MAX_SNIFF = 32 * 1024;

const HANDSHAKE = 22;
const CLIENT_HELLO = 1;
const MAX_RECORD = 16_384;
const SERVER_NAME = 0;

export function sniff(data: Buffer): Sniffed {
  const first = data[0];
  if (first === undefined) return { kind: "more" };
  const said = first === HANDSHAKE ? sniffTls(data) : sniffHttp(data);
  return said.kind === "more" && data.length >= MAX_SNIFF ? { kind: "other" } : said;
}

/** A host name as a rule can be compared with, or undefined: an address, a wrong name. */
export function plainName(text: string): string | undefined {
  const name = text.toLowerCase().replace(/\.$/, "");
  if (name.length === 0 || name.length > 253 || /^[\d.]+$/.test(name)) return undefined;
  return name.split(".").every((l) => /^(?!-)[a-z0-9_-]{1,63}(?<!-)$/.test(l)) ? name : undefined;
}

function sniffTls(data: Buffer): Sniffed {
  const parts: Buffer[] = [];
  let have = 0;
  // The hello may be spread over records.
  for (let at = 0; ; ) {
    if (data.length < at + 5) return { kind: "more" };
    const length = data.readUInt16BE(at + 3);
    if (data[at] !== HANDSHAKE || data[at + 1] !== 3 || length === 0 || length > MAX_RECORD) return { kind: "other" };
    const part = data.subarray(at + 5, at + 5 + length);
    parts.push(part);
    have += part.length;
    const hello = Buffer.concat(parts);
    if (hello.length >= 1 && hello[0] !== CLIENT_HELLO) return { kind: "other" };
    if (hello.length >= 4) {
      const size = hello.readUIntBE(1, 3);
      if (size > MAX_SNIFF) return { kind: "other" };
      if (have >= 4 + size) return { kind: "tls", ...serverName(hello.subarray(4, 4 + size)) };
    }
    if (part.length < length) return { kind: "more" };
    at += 5 + length;
  }
}

/** Reads length-prefixed fields; reading past the end throws. */
class Reader {
  readonly #data: Buffer;
  #at = 0;

  constructor(data: Buffer) {
    this.#data = data;
  }

  get left(): number {
    return this.#data.length - this.#at;
  }

  take(size: number): Buffer {
    if (size > this.left) throw new RangeError("short");
    this.#at += size;
    return this.#data.subarray(this.#at - size, this.#at);
  }

  number(size: 1 | 2): number {
    return this.take(size).readUIntBE(0, size);
  }

  /** A field with its length before it. */
  field(lengthSize: 1 | 2): Buffer {
    return this.take(this.number(lengthSize));
  }
}

function serverName(hello: Buffer): { name?: string } {
  try {
    const r = new Reader(hello);
    r.take(2 + 32);
    r.field(1);
    r.field(2);
    r.field(1);
    if (r.left === 0) return {};
    const extensions = new Reader(r.field(2));
    let found: string | undefined;
    while (extensions.left > 0) {
      const type = extensions.number(2);
      const body = extensions.field(2);
      if (type !== SERVER_NAME) continue;
      const list = new Reader(new Reader(body).field(2));
      const nameType = list.number(1);
      const name = plainName(list.field(2).toString("latin1"));
      // Two names could be read as either.
      if (found !== undefined || nameType !== 0 || list.left > 0 || name === undefined) return {};
      found = name;
    }
    return found === undefined ? {} : { name: found };
  } catch {
    return {};
  }
}

function sniffHttp(data: Buffer): Sniffed {
  const text = data.subarray(0, MAX_SNIFF).toString("latin1");
  const line = text.indexOf("\n");
  const start = line < 0 ? text : text.slice(0, line);
  // A method and the beginning of a target; whatever cannot become that is something else at once.
  if (!/^[A-Z]{1,16}( |$)/.test(start)) return { kind: "other" };
  if (line < 0) return { kind: "more" };
  if (!/^[A-Z]{1,16} [\x21-\x7e]+ HTTP\/1\.[01]\r$/.test(start)) return { kind: "other" };
  const end = text.indexOf("\r\n\r\n");
  if (end < 0) return { kind: "more" };
  const target = start.split(" ")[1] ?? "";
  const lines = text.slice(line + 1, end).split("\r\n");
  // Folded, bare or spaced names may be read by the server in another way than here.
  if (lines.some((l) => !/^[!#$%&'*+.^_`|~0-9A-Za-z-]+:[^\r\n\0]*$/.test(l))) return { kind: "http" };
  const hosts = lines.flatMap((l) => /^host:[ \t]*(.*?)[ \t]*$/i.exec(l)?.[1] ?? []);
  const name = hosts.length === 1 ? hostName(hosts[0] ?? "") : undefined;
  const other = /^https?:\/\/([^/?#]*)/i.exec(target)?.[1];
  const agrees = target.startsWith("/") || target === "*" || (other !== undefined && hostName(other) === name);
  return { kind: "http", ...(name !== undefined && agrees ? { name } : {}) };
}

const hostName = (host: string): string | undefined => plainName(host.replace(/:\d{1,5}$/, ""));
