import { corrupt } from "./format.ts";
import { type Reads, wanted } from "./reads.ts";
import type { Sink } from "./sink.ts";

/**
 * A layer wrapped in a tar of one entry, as registries want it: an extended header that carries the size, the entry's
 * header (whose own size is 0), the payload, padding and two zero blocks.
 */
const TAR_BLOCK = 512;
const PAX_NAME = "overlaybd.pax";
const COMMIT_NAME = "overlaybd.commit";
/** Regular file and its mode; upstream keeps the type bits. */
const MODE = 0o100644;

/** Magic and version. */
const USTAR = "ustar\u000000";

/** Where the payload is. Bytes. */
export interface Payload {
  offset: number;
  length: number;
}

/** The payload of a file: all of it when it is not wrapped. Throws CORRUPT for a tar that cannot hold what it says. */
export function* readTar(size: number, name: string): Reads<Payload> {
  if (size < 2 * TAR_BLOCK) return { offset: 0, length: size };
  const first = yield* wanted(0, TAR_BLOCK);
  if (!isTarHeader(first)) return { offset: 0, length: size };
  const type = first.toString("latin1", 156, 157);
  let offset = TAR_BLOCK;
  let length = octal(first, 124, 12);
  if (type === "x") {
    if (size < 3 * TAR_BLOCK) throw corrupt(name, "is a tar that ends in its headers");
    const rest = yield* wanted(TAR_BLOCK, 2 * TAR_BLOCK);
    if (!(length >= 0 && length <= TAR_BLOCK)) throw corrupt(name, "is a tar with an extended header that is too long");
    const header = rest.subarray(TAR_BLOCK);
    if (!isTarHeader(header)) throw corrupt(name, "is a tar whose entry has no valid header");
    const own = octal(header, 124, 12);
    const paxSize = paxSizeOf(rest.toString("utf8", 0, length));
    offset = 3 * TAR_BLOCK;
    length = paxSize ?? own;
  } else if (type !== "0" && type !== "\0") throw corrupt(name, "is a tar whose first entry is not a file");
  if (!Number.isSafeInteger(length) || length <= 0 || offset + length > size) {
    throw corrupt(name, `is a tar whose entry of ${length} bytes does not fit`);
  }
  return { offset, length };
}

/** Writes the payload as one tar entry. `bytes` of it must follow through `write`, then `finish`. */
export class TarWriter implements Sink {
  readonly #sink: Sink;
  readonly #bytes: number;
  #written = 0;
  #started = false;

  constructor(sink: Sink, bytes: number) {
    this.#sink = sink;
    this.#bytes = bytes;
  }

  async write(data: Buffer): Promise<void> {
    await this.#start();
    this.#written += data.length;
    await this.#sink.write(data);
  }

  async finish(): Promise<void> {
    await this.#start();
    if (this.#written !== this.#bytes) throw new RangeError(`${this.#written} bytes were written, not ${this.#bytes}`);
    const padding = (TAR_BLOCK - (this.#bytes % TAR_BLOCK)) % TAR_BLOCK;
    await this.#sink.write(Buffer.alloc(padding + 2 * TAR_BLOCK));
  }

  async #start(): Promise<void> {
    if (this.#started) return;
    this.#started = true;
    const pax = paxRecord("size", String(this.#bytes));
    const block = Buffer.alloc(TAR_BLOCK);
    block.write(pax, "utf8");
    await this.#sink.write(Buffer.concat([header(PAX_NAME, "x", pax.length), block, header(COMMIT_NAME, "0", 0)]));
  }
}

/** Bytes of the tar around a payload of so many bytes. */
export function tarBytes(payload: number): number {
  return (5 + Math.ceil(payload / TAR_BLOCK)) * TAR_BLOCK;
}

function isTarHeader(b: Buffer): boolean {
  if (b.toString("latin1", 257, 265) !== USTAR) return false;
  const said = octal(b, 148, 8);
  let unsigned = 0;
  let signed = 0;
  for (let i = 0; i < TAR_BLOCK; i++) {
    const byte = i >= 148 && i < 156 ? 0x20 : (b[i] as number);
    unsigned += byte;
    signed += byte < 128 ? byte : byte - 256;
  }
  return said === unsigned || said === signed;
}

/** NaN for what is not an octal number. */
function octal(b: Buffer, at: number, length: number): number {
  const text = b
    .toString("latin1", at, at + length)
    .replaceAll("\0", " ")
    .trim();
  return /^[0-7]+$/.test(text) ? Number.parseInt(text, 8) : text === "" ? 0 : Number.NaN;
}

function paxSizeOf(records: string): number | undefined {
  const size = /^\d+ size=(\d{1,16})\n/m.exec(records)?.[1];
  const n = size === undefined ? 0 : Number(size);
  return n > 0 ? n : undefined;
}

/** `LENGTH KEY=VALUE\n`, where the length counts itself. */
function paxRecord(key: string, value: string): string {
  const rest = ` ${key}=${value}\n`;
  let length = rest.length + 1;
  while (String(length).length + rest.length !== length) length = String(length).length + rest.length;
  return `${length}${rest}`;
}

/** The entry of the payload has an owner and a mode; the extended header before it has none. */
function header(name: string, type: "x" | "0", size: number): Buffer {
  const b = Buffer.alloc(TAR_BLOCK);
  const short = (n: number, at: number): number => b.write(`${n.toString(8).padStart(6)} `, at, "latin1");
  const long = (n: number, at: number): number => b.write(`${n.toString(8).padStart(11)} `, at, "latin1");
  b.write(name, 0, "latin1");
  if (type === "0") {
    short(MODE, 100);
    short(0, 108);
    short(0, 116);
    long(0, 136);
    b.write("root", 265, "latin1");
    b.write("root", 297, "latin1");
  }
  long(size, 124);
  b.fill(0x20, 148, 156);
  b.write(type, 156, "latin1");
  b.write(USTAR, 257, "latin1");
  const sum = b.reduce((a, x) => a + x, 0);
  b.write(`${sum.toString(8).padStart(6)} \0`, 148, "latin1");
  return b;
}
