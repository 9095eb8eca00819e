import { CMD, MAX_PAYLOAD_BYTES, REQUEST_BYTES, REQUEST_MAGIC } from "./protocol.ts";

/** One request of the transmission phase. The decoder reuses the object: copy what must outlive the next call. */
export interface Request {
  flags: number;
  type: number;
  /** The cookie as two u32: it is only ever echoed. */
  cookieHigh: number;
  cookieLow: number;
  /** Not a safe integer when the client sent nonsense; such an offset is outside every disk. */
  offset: number;
  length: number;
  /** WRITE only; undefined when the announced length was over the limit (the bytes were skipped). */
  payload: Buffer | undefined;
}

/** The stream is not NBD: the only answer is to close it. */
export class ProtocolError extends Error {
  override readonly name = "ProtocolError";
}

/** Below this the general buffer serves: it may bring the next requests as well. */
const MIN_DIRECT_BYTES = 32 * 1024;
const EMPTY = Buffer.alloc(0);

/**
 * Incremental decoder, pulled by the server: `push` a chunk, then call `next` until it returns undefined. Between two
 * `next` calls the server may stop for as long as it likes; it must not push before `next` has returned undefined.
 *
 * Layout: magic u32 | flags u16 | type u16 | cookie u64 | offset u64 | length u32 | payload of WRITE.
 *
 * Memory: one payload buffer of at most MAX_PAYLOAD_BYTES, grown only as a WRITE with a legal length is announced.
 */
export class RequestDecoder {
  readonly #request: Request = {
    flags: 0,
    type: 0,
    cookieHigh: 0,
    cookieLow: 0,
    offset: 0,
    length: 0,
    payload: undefined,
  };
  readonly #header = Buffer.alloc(REQUEST_BYTES);
  #headerFill = 0;
  #chunk: Buffer = EMPTY;
  #at = 0;
  /** Bytes of the current request's payload still to come; they are dropped when #skipping. */
  #missing = 0;
  #skipping = false;
  #assembly: Buffer = EMPTY;
  /** `payloadFilled` brought the last byte. */
  #complete = false;

  /** True when every byte pushed so far belongs to a request that was returned. */
  get idle(): boolean {
    return this.#headerFill === 0 && this.#missing === 0 && this.#at === this.#chunk.length;
  }

  push(chunk: Buffer): void {
    if (this.#at !== this.#chunk.length) throw new Error("push before the last chunk was used up");
    this.#chunk = chunk;
    this.#at = 0;
  }

  /** The chunk's memory will be used again: what is left of it is copied. */
  keepRest(): void {
    this.#chunk = Buffer.from(this.#chunk.subarray(this.#at));
    this.#at = 0;
  }

  /** Where the next bytes of a payload belong: reading them there saves a copy. Undefined when few are missing. */
  payloadSpace(): Buffer | undefined {
    if (this.#skipping || this.#missing < MIN_DIRECT_BYTES || this.#at !== this.#chunk.length) return undefined;
    const { length } = this.#request;
    return this.#assembly.subarray(length - this.#missing, length);
  }

  /** So many bytes were put into `payloadSpace`. Call `next` as after a push. */
  payloadFilled(bytes: number): void {
    this.#missing -= bytes;
    this.#complete = this.#missing === 0;
  }

  /** The payload of the last WRITE is in use beyond the next call: the next one gets other memory. */
  detachPayload(): void {
    this.#assembly = EMPTY;
  }

  next(): Request | undefined {
    if (this.#complete) {
      this.#complete = false;
      return this.#withPayload();
    }
    if (this.#missing > 0) return this.#continuePayload();
    const left = this.#chunk.length - this.#at;
    if (this.#headerFill === 0 && left >= REQUEST_BYTES) {
      this.#parseHeader(this.#chunk, this.#at);
      this.#at += REQUEST_BYTES;
    } else {
      const take = Math.min(left, REQUEST_BYTES - this.#headerFill);
      this.#chunk.copy(this.#header, this.#headerFill, this.#at, this.#at + take);
      this.#headerFill += take;
      this.#at += take;
      if (this.#headerFill < REQUEST_BYTES) {
        // A stream that is not NBD is refused at its first wrong word, not when 28 bytes have come.
        if (this.#headerFill >= 4) checkMagic(this.#header, 0);
        return undefined;
      }
      this.#headerFill = 0;
      this.#parseHeader(this.#header, 0);
    }
    const request = this.#request;
    if (request.type !== CMD.WRITE || request.length === 0) return request;
    if (request.length <= MAX_PAYLOAD_BYTES && this.#chunk.length - this.#at >= request.length) {
      request.payload = this.#chunk.subarray(this.#at, this.#at + request.length);
      this.#at += request.length;
      return request;
    }
    this.#missing = request.length;
    this.#skipping = request.length > MAX_PAYLOAD_BYTES;
    if (!this.#skipping && this.#assembly.length < request.length) {
      this.#assembly = Buffer.allocUnsafeSlow(Math.min(MAX_PAYLOAD_BYTES, Math.ceil(request.length / 65536) * 65536));
    }
    return this.#continuePayload();
  }

  #parseHeader(b: Buffer, at: number): void {
    checkMagic(b, at);
    const r = this.#request;
    r.flags = b.readUInt16BE(at + 4);
    r.type = b.readUInt16BE(at + 6);
    r.cookieHigh = b.readUInt32BE(at + 8);
    r.cookieLow = b.readUInt32BE(at + 12);
    r.offset = b.readUInt32BE(at + 16) * 0x100000000 + b.readUInt32BE(at + 20);
    r.length = b.readUInt32BE(at + 24);
    r.payload = undefined;
  }

  #continuePayload(): Request | undefined {
    const request = this.#request;
    const take = Math.min(this.#missing, this.#chunk.length - this.#at);
    if (!this.#skipping) {
      this.#chunk.copy(this.#assembly, request.length - this.#missing, this.#at, this.#at + take);
    }
    this.#at += take;
    this.#missing -= take;
    return this.#missing > 0 ? undefined : this.#withPayload();
  }

  #withPayload(): Request {
    const request = this.#request;
    if (!this.#skipping) request.payload = this.#assembly.subarray(0, request.length);
    return request;
  }
}

function checkMagic(b: Buffer, at: number): void {
  if (b.readUInt32BE(at) !== REQUEST_MAGIC) throw new ProtocolError("request without the NBD magic");
}
