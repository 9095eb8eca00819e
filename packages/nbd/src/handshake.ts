import {
  HANDSHAKE_FIXED_NEWSTYLE,
  HANDSHAKE_NO_ZEROES,
  INFO,
  MAX_NAME_BYTES,
  MAX_PAYLOAD_BYTES,
  NBD_MAGIC,
  OPT,
  OPTION_MAGIC,
  OPTION_REPLY_MAGIC,
  REP,
  TRANSMISSION,
} from "./protocol.ts";
import { ProtocolError } from "./requests.ts";

export interface ExportInfo {
  name: string;
  description: string;
  size: number;
  readOnly: boolean;
}

/** What the two sides agreed on. */
export interface Session {
  export: ExportInfo;
  structured: boolean;
  /** base:allocation was selected for this export, under ALLOCATION_CONTEXT_ID. */
  allocation: boolean;
}

export type HandshakeStep =
  | { kind: "reply"; bytes: Buffer }
  | { kind: "start"; bytes: Buffer; session: Session }
  | { kind: "end"; bytes: Buffer };

export const ALLOCATION_CONTEXT = "base:allocation";
export const ALLOCATION_CONTEXT_ID = 1;
export const MINIMUM_BLOCK_BYTES = 512;
export const PREFERRED_BLOCK_BYTES = 4096;

const CLIENT_FLAG_BYTES = 4;
const OPTION_HEADER_BYTES = 16;
/** A name, and a few dozen context queries; longer options are skipped and answered with ERR_TOO_BIG. */
const MAX_OPTION_BYTES = 4 * MAX_NAME_BYTES;
/** A client that only haggles is cut off. */
const MAX_OPTIONS = 256;
const EMPTY = Buffer.alloc(0);

/** First bytes of the server: NBDMAGIC | IHAVEOPT | handshake flags u16. */
export function greeting(): Buffer {
  const b = Buffer.alloc(18);
  putMagic(b, 0, NBD_MAGIC);
  putMagic(b, 8, OPTION_MAGIC);
  b.writeUInt16BE(HANDSHAKE_FIXED_NEWSTYLE | HANDSHAKE_NO_ZEROES, 16);
  return b;
}

/** Transmission flags of an export. DF may only be offered with structured replies. */
export function transmissionFlags(info: ExportInfo, structured: boolean): number {
  const T = TRANSMISSION;
  let flags = T.HAS_FLAGS | T.SEND_FLUSH | T.SEND_FUA | T.CAN_MULTI_CONN | T.SEND_CACHE;
  if (info.readOnly) flags |= T.READ_ONLY;
  else flags |= T.SEND_TRIM | T.SEND_WRITE_ZEROES | T.SEND_FAST_ZERO;
  if (structured) flags |= T.SEND_DF;
  return flags;
}

/**
 * Fixed newstyle negotiation as a decoder: `push` bytes, `next` until undefined. Once it returned "start" or "end" it is
 * done and `rest()` holds the bytes that came after. Option: IHAVEOPT | option u32 | length u32 | data.
 */
export class Handshake {
  readonly #exports: readonly ExportInfo[];
  #buffer: Buffer = EMPTY;
  #phase: "flags" | "options" | "done" = "flags";
  #noZeroes = false;
  #skip = 0;
  #skippedOption = 0;
  #options = 0;
  #structured = false;
  /** Export for which base:allocation was selected. */
  #allocationFor: ExportInfo | undefined;

  constructor(exports: readonly ExportInfo[]) {
    this.#exports = exports;
  }

  /** Keeps no reference to the chunk. */
  push(chunk: Buffer): void {
    this.#buffer = Buffer.concat([this.#buffer, chunk]);
  }

  rest(): Buffer {
    return this.#buffer;
  }

  next(): HandshakeStep | undefined {
    if (this.#phase === "done") return undefined;
    if (this.#phase === "flags" && !this.#takeFlags()) return undefined;
    if (this.#skip > 0) {
      const take = Math.min(this.#skip, this.#buffer.length);
      this.#buffer = this.#buffer.subarray(take);
      this.#skip -= take;
      if (this.#skip > 0) return undefined;
      return { kind: "reply", bytes: optionError(this.#skippedOption, REP.ERR_TOO_BIG, "the option is too long") };
    }
    const b = this.#buffer;
    if (b.length >= 8) checkMagic(b, 0, OPTION_MAGIC, "option");
    if (b.length < OPTION_HEADER_BYTES) return undefined;
    const option = b.readUInt32BE(8);
    const length = b.readUInt32BE(12);
    if (length > MAX_OPTION_BYTES) {
      this.#countOption();
      if (option === OPT.EXPORT_NAME) throw new ProtocolError("the export name is too long");
      this.#skip = length;
      this.#skippedOption = option;
      this.#buffer = b.subarray(OPTION_HEADER_BYTES);
      return this.next();
    }
    if (b.length < OPTION_HEADER_BYTES + length) return undefined;
    this.#countOption();
    this.#buffer = b.subarray(OPTION_HEADER_BYTES + length);
    const step = this.#option(option, b.subarray(OPTION_HEADER_BYTES, OPTION_HEADER_BYTES + length));
    if (step.kind !== "reply") this.#phase = "done";
    return step;
  }

  #countOption(): void {
    if (++this.#options > MAX_OPTIONS) throw new ProtocolError("too many options");
  }

  #takeFlags(): boolean {
    if (this.#buffer.length < CLIENT_FLAG_BYTES) return false;
    const flags = this.#buffer.readUInt32BE(0);
    if ((flags & ~(HANDSHAKE_FIXED_NEWSTYLE | HANDSHAKE_NO_ZEROES)) !== 0) {
      throw new ProtocolError(`unknown client flags ${flags.toString(16)}`);
    }
    this.#noZeroes = (flags & HANDSHAKE_NO_ZEROES) !== 0;
    this.#buffer = this.#buffer.subarray(CLIENT_FLAG_BYTES);
    this.#phase = "options";
    return true;
  }

  #option(option: number, data: Buffer): HandshakeStep {
    switch (option) {
      case OPT.EXPORT_NAME:
        return this.#exportName(data);
      case OPT.ABORT:
        return { kind: "end", bytes: optionReply(option, REP.ACK, EMPTY) };
      case OPT.LIST:
        if (data.length > 0) return error(option, REP.ERR_INVALID, "LIST takes no data");
        return { kind: "reply", bytes: Buffer.concat([...this.#exports.map(listed), ack(option)]) };
      case OPT.INFO:
      case OPT.GO:
        return this.#infoOrGo(option, data);
      case OPT.STRUCTURED_REPLY:
        if (data.length > 0) return error(option, REP.ERR_INVALID, "STRUCTURED_REPLY takes no data");
        this.#structured = true;
        return { kind: "reply", bytes: ack(option) };
      case OPT.LIST_META_CONTEXT:
      case OPT.SET_META_CONTEXT:
        return this.#metaContext(option, data);
      default:
        return error(option, REP.ERR_UNSUP, "the option is not known here");
    }
  }

  /** The empty name means the default export. */
  #find(name: string): ExportInfo | undefined {
    return name === "" ? this.#exports[0] : this.#exports.find((e) => e.name === name);
  }

  #session(info: ExportInfo): Session {
    return { export: info, structured: this.#structured, allocation: this.#structured && this.#allocationFor === info };
  }

  #exportName(data: Buffer): HandshakeStep {
    const info = this.#find(data.toString());
    // This option has no error reply: the protocol wants the connection closed.
    if (!info) return { kind: "end", bytes: EMPTY };
    const b = Buffer.alloc(this.#noZeroes ? 10 : 134);
    b.writeBigUInt64BE(BigInt(info.size), 0);
    b.writeUInt16BE(transmissionFlags(info, this.#structured), 8);
    return { kind: "start", bytes: b, session: this.#session(info) };
  }

  /** name length u32 | name | number of infos u16 | infos u16 each */
  #infoOrGo(option: number, data: Buffer): HandshakeStep {
    const name = takeName(data, 0);
    if (!name || data.length < name.end + 2) return error(option, REP.ERR_INVALID, "malformed option");
    const count = data.readUInt16BE(name.end);
    if (data.length !== name.end + 2 + count * 2) return error(option, REP.ERR_INVALID, "malformed option");
    const info = this.#find(name.text);
    if (!info) return error(option, REP.ERR_UNKNOWN, "no such export");
    const out: Buffer[] = [];
    for (let i = 0; i < count; i++) {
      const wanted = data.readUInt16BE(name.end + 2 + i * 2);
      if (wanted === INFO.NAME) out.push(infoText(option, INFO.NAME, info.name));
      if (wanted === INFO.DESCRIPTION) out.push(infoText(option, INFO.DESCRIPTION, info.description));
    }
    const blocks = Buffer.alloc(14);
    blocks.writeUInt16BE(INFO.BLOCK_SIZE, 0);
    blocks.writeUInt32BE(MINIMUM_BLOCK_BYTES, 2);
    blocks.writeUInt32BE(PREFERRED_BLOCK_BYTES, 6);
    blocks.writeUInt32BE(MAX_PAYLOAD_BYTES, 10);
    const size = Buffer.alloc(12);
    size.writeUInt16BE(INFO.EXPORT, 0);
    size.writeBigUInt64BE(BigInt(info.size), 2);
    size.writeUInt16BE(transmissionFlags(info, this.#structured), 10);
    out.push(optionReply(option, REP.INFO, blocks), optionReply(option, REP.INFO, size), ack(option));
    const bytes = Buffer.concat(out);
    return option === OPT.GO ? { kind: "start", bytes, session: this.#session(info) } : { kind: "reply", bytes };
  }

  /** name length u32 | name | number of queries u32 | queries: length u32 + text each */
  #metaContext(option: number, data: Buffer): HandshakeStep {
    const set = option === OPT.SET_META_CONTEXT;
    if (set) this.#allocationFor = undefined;
    if (!this.#structured) return error(option, REP.ERR_INVALID, "negotiate structured replies first");
    const name = takeName(data, 0);
    if (!name || data.length < name.end + 4) return error(option, REP.ERR_INVALID, "malformed option");
    const queries: string[] = [];
    const count = data.readUInt32BE(name.end);
    let at = name.end + 4;
    for (let i = 0; i < count; i++) {
      const query = takeName(data, at);
      if (!query) return error(option, REP.ERR_INVALID, "malformed option");
      queries.push(query.text);
      at = query.end;
    }
    if (at !== data.length) return error(option, REP.ERR_INVALID, "malformed option");
    const info = this.#find(name.text);
    if (!info) return error(option, REP.ERR_UNKNOWN, "no such export");
    const listAll = !set && count === 0;
    const match = listAll || queries.some((q) => q === ALLOCATION_CONTEXT || (!set && q === "base:"));
    if (!match) return { kind: "reply", bytes: ack(option) };
    if (set) this.#allocationFor = info;
    const b = Buffer.alloc(4 + ALLOCATION_CONTEXT.length);
    b.writeUInt32BE(set ? ALLOCATION_CONTEXT_ID : 0, 0);
    b.write(ALLOCATION_CONTEXT, 4);
    return { kind: "reply", bytes: Buffer.concat([optionReply(option, REP.META_CONTEXT, b), ack(option)]) };
  }
}

function takeName(data: Buffer, at: number): { text: string; end: number } | undefined {
  if (data.length < at + 4) return undefined;
  const length = data.readUInt32BE(at);
  if (length > MAX_NAME_BYTES || data.length < at + 4 + length) return undefined;
  return { text: data.toString("utf8", at + 4, at + 4 + length), end: at + 4 + length };
}

/** magic u64 | option u32 | type u32 | length u32 | data */
function optionReply(option: number, type: number, data: Buffer): Buffer {
  const b = Buffer.alloc(20 + data.length);
  putMagic(b, 0, OPTION_REPLY_MAGIC);
  b.writeUInt32BE(option, 8);
  b.writeUInt32BE(type, 12);
  b.writeUInt32BE(data.length, 16);
  data.copy(b, 20);
  return b;
}

const ack = (option: number): Buffer => optionReply(option, REP.ACK, EMPTY);
const optionError = (option: number, type: number, text: string): Buffer =>
  optionReply(option, type, Buffer.from(text));
const error = (option: number, type: number, text: string): HandshakeStep => ({
  kind: "reply",
  bytes: optionError(option, type, text),
});

function listed(info: ExportInfo): Buffer {
  const name = Buffer.from(info.name);
  const b = Buffer.alloc(4 + name.length);
  b.writeUInt32BE(name.length, 0);
  name.copy(b, 4);
  return optionReply(OPT.LIST, REP.SERVER, b);
}

function infoText(option: number, type: number, text: string): Buffer {
  const b = Buffer.alloc(2 + Buffer.byteLength(text));
  b.writeUInt16BE(type, 0);
  b.write(text, 2);
  return optionReply(option, REP.INFO, b);
}

function putMagic(b: Buffer, at: number, magic: readonly [number, number]): void {
  b.writeUInt32BE(magic[0], at);
  b.writeUInt32BE(magic[1], at + 4);
}

function checkMagic(b: Buffer, at: number, magic: readonly [number, number], what: string): void {
  if (b.readUInt32BE(at) !== magic[0] || b.readUInt32BE(at + 4) !== magic[1]) {
    throw new ProtocolError(`${what} without its magic`);
  }
}
