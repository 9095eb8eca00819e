import type { Socket } from "node:net";
import { type Logger, messageOf } from "@aenv/base";
import { type BufferPool, ReplyBuffer } from "./buffers.ts";
import { directSocket } from "./direct-socket.ts";
import { ALLOCATION_CONTEXT_ID, type ExportInfo, greeting, Handshake, type Session } from "./handshake.ts";
import {
  CHUNK,
  CHUNK_HEADER_BYTES,
  CMD,
  CMD_FLAG,
  ERRNO,
  type Errno,
  MAX_PAYLOAD_BYTES,
  SIMPLE_REPLY_BYTES,
} from "./protocol.ts";
import {
  ERROR_CHUNK_BYTES,
  HOLE_CHUNK_BYTES,
  putChunkHeader,
  putErrorChunk,
  putHoleChunk,
  putSimpleReply,
  putStatusChunk,
  putU64,
  statusChunkBytes,
} from "./replies.ts";
import { ProtocolError, type Request, RequestDecoder } from "./requests.ts";
import { type BlockTarget, type Pending, wireErrno } from "./target.ts";

export interface ServedExport {
  info: ExportInfo;
  target: BlockTarget;
}

export interface ConnectionOptions {
  exports: readonly ServedExport[];
  pool: BufferPool;
  logger: Logger;
  /** Requests that wait for the disk at the same time. Default 256. */
  maxInflight?: number;
  /** Bytes of reads and writes that wait for the disk. Default 32 MiB: one request of the largest size. */
  maxInflightBytes?: number;
  /** Reply bytes that wait for the client before we stop reading its requests. Default 4 MiB. */
  maxQueuedBytes?: number;
}

/** Holds a batch of 4 KiB writes at depth 32; pages of it that no request reaches are never touched. */
const INPUT_BYTES = 256 * 1024;
/** The protocol wants fewer than 2^32 bytes; more extents than this help nobody. */
const MAX_STATUS_EXTENTS = 512;
/** A read this short is answered as data even where it is a hole: looking costs more than sending. */
const HOLE_WORTH_BYTES = 32 * 1024;
const KNOWN_FLAGS = CMD_FLAG.FUA | CMD_FLAG.NO_HOLE | CMD_FLAG.DF | CMD_FLAG.REQ_ONE | CMD_FLAG.FAST_ZERO;

/**
 * One client. Requests that the target finishes at once are answered in the order they came, as one write per turn;
 * the others are answered as they finish. We stop reading the client while too much is in flight either way.
 */
export class Connection {
  readonly #socket: Socket;
  readonly #options: ConnectionOptions;
  readonly #handshake: Handshake;
  readonly #decoder = new RequestDecoder();
  readonly #replies: ReplyBuffer;
  readonly #maxInflight: number;
  readonly #maxInflightBytes: number;
  readonly #maxQueued: number;
  readonly #done = Promise.withResolvers<void>();
  #input: Buffer | undefined;
  /** The memory that `#space` gave last, when it is a payload's. */
  #direct: Uint8Array | undefined;
  #session: Session | undefined;
  #target: BlockTarget | undefined;
  #inflight = 0;
  #inflightBytes = 0;
  #paused = false;
  /** No further requests are taken: DISC, end of the stream or shutdown. */
  #draining = false;
  #flushScheduled = false;
  #closed = false;

  /** `accepted` comes from a server with `pauseOnConnect`. */
  constructor(accepted: Socket, options: ConnectionOptions) {
    const socket = directSocket(accepted, {
      space: () => this.#space(),
      filled: (bytes, buffer) => this.#onRead(bytes, buffer),
    });
    this.#socket = socket;
    this.#options = options;
    this.#handshake = new Handshake(options.exports.map((e) => e.info));
    this.#replies = new ReplyBuffer(options.pool);
    this.#maxInflight = options.maxInflight ?? 256;
    this.#maxInflightBytes = options.maxInflightBytes ?? MAX_PAYLOAD_BYTES;
    this.#maxQueued = options.maxQueuedBytes ?? 4 * 1024 * 1024;
    socket.on("drain", () => this.#resume());
    socket.on("end", () => this.drain());
    socket.on("error", (e) => options.logger.debug({ error: messageOf(e) }, "NBD client connection broke"));
    socket.on("close", () => {
      this.#closed = true;
      this.#draining = true;
      this.#settle();
    });
    socket.write(greeting());
  }

  /** Resolves when the socket is closed and no request of it is in the target any more. */
  get done(): Promise<void> {
    return this.#done.promise;
  }

  /** Takes no further request, answers those in flight, then closes. */
  drain(): void {
    if (this.#draining) return;
    this.#draining = true;
    this.#socket.pause();
    this.#settle();
  }

  /** Gives up on the client; requests in the target still end. */
  abort(): void {
    this.#draining = true;
    this.#socket.destroy();
  }

  /** Where the next bytes go: straight into the payload that is coming, else into the connection's own buffer. */
  #space(): Uint8Array {
    this.#direct = this.#decoder.payloadSpace();
    if (this.#direct) return this.#direct;
    this.#input ??= Buffer.allocUnsafeSlow(INPUT_BYTES);
    return this.#input;
  }

  #onRead(bytes: number, buffer: Uint8Array): void {
    if (this.#closed || this.#draining) return;
    try {
      if (buffer === this.#direct) {
        this.#direct = undefined;
        this.#decoder.payloadFilled(bytes);
      } else {
        const chunk = Buffer.from(buffer.buffer, buffer.byteOffset, bytes);
        if (this.#session) this.#decoder.push(chunk);
        else {
          this.#handshake.push(chunk);
          if (!this.#negotiate()) return;
        }
      }
      this.#serve();
    } catch (e) {
      this.#fail(e);
    }
  }

  #negotiate(): boolean {
    for (let step = this.#handshake.next(); step; step = this.#handshake.next()) {
      if (step.bytes.length > 0) this.#socket.write(step.bytes);
      if (step.kind === "end") {
        this.#draining = true;
        this.#socket.end();
        return false;
      }
      if (step.kind === "start") {
        const session = step.session;
        this.#session = session;
        this.#target = this.#options.exports.find((e) => e.info === session.export)?.target;
        this.#decoder.push(this.#handshake.rest());
        return true;
      }
    }
    return false;
  }

  /** Takes requests until the input is used up or too much is in flight. */
  #serve(): void {
    while (!this.#draining) {
      if (this.#full(this.#replies.size)) {
        this.#flush();
        if (this.#full(0)) {
          this.#paused = true;
          this.#decoder.keepRest();
          this.#socket.pause();
          return;
        }
      }
      const request = this.#decoder.next();
      if (!request) break;
      this.#handle(request);
    }
    this.#flush();
    this.#settle();
  }

  /** As much is in flight, or waits for the client, as may be. */
  #full(unsent: number): boolean {
    return (
      this.#inflight >= this.#maxInflight ||
      this.#inflightBytes >= this.#maxInflightBytes ||
      unsent + this.#socket.writableLength >= this.#maxQueued
    );
  }

  #resume(): void {
    if (!this.#paused || this.#draining) return;
    if (this.#full(0)) return;
    this.#paused = false;
    try {
      this.#serve();
    } catch (e) {
      this.#fail(e);
      return;
    }
    if (!this.#paused && !this.#draining) this.#socket.resume();
  }

  #handle(r: Request): void {
    const target = this.#target;
    if (!target) throw new ProtocolError("request before the negotiation ended");
    if (r.type === CMD.DISC) {
      this.drain();
      return;
    }
    const bad = refusal(r, target, this.#session);
    if (bad) return this.#answer(r, bad);
    const fua = (r.flags & CMD_FLAG.FUA) !== 0;
    switch (r.type) {
      case CMD.READ:
        return this.#read(r, target);
      case CMD.BLOCK_STATUS:
        return this.#status(r, target);
      case CMD.WRITE: {
        const payload = r.payload;
        if (!payload) return this.#answer(r, "EINVAL");
        return this.#run(r, () => target.write(r.offset, payload, fua));
      }
      case CMD.FLUSH:
        return this.#run(r, () => target.flush());
      case CMD.TRIM:
        return this.#run(r, () => target.trim(r.offset, r.length, fua));
      case CMD.WRITE_ZEROES:
        return this.#run(r, () => target.zero(r.offset, r.length, (r.flags & CMD_FLAG.NO_HOLE) === 0, fua));
      case CMD.CACHE:
        return this.#run(r, () => target.cache(r.offset, r.length));
      default:
        return this.#answer(r, "EINVAL");
    }
  }

  #run(r: Request, fn: () => Pending): void {
    let pending: Pending;
    try {
      pending = fn();
    } catch (e) {
      return this.#answer(r, this.#errno(e, r.type));
    }
    if (!pending) return this.#answer(r, undefined);
    const payloadBytes = r.payload?.length ?? 0;
    if (payloadBytes > 0) {
      // The payload may be in either: both get other memory.
      this.#decoder.detachPayload();
      this.#input = undefined;
    }
    const kept = { ...r, payload: undefined };
    this.#track(
      payloadBytes,
      pending.then(
        () => this.#answer(kept, undefined),
        (e: unknown) => this.#answer(kept, this.#errno(e, kept.type)),
      ),
    );
  }

  #track(bytes: number, work: Promise<void>): void {
    this.#inflight++;
    this.#inflightBytes += bytes;
    void work.then(() => {
      this.#inflight--;
      this.#inflightBytes -= bytes;
      this.#scheduleFlush();
    });
  }

  #read(r: Request, target: BlockTarget): void {
    const { offset, length } = r;
    if (this.#session?.structured === true && length >= HOLE_WORTH_BYTES && isHole(target, offset, length)) {
      const { buffer, at } = this.#replies.reserve(HOLE_CHUNK_BYTES);
      putHoleChunk(buffer, at, r.cookieHigh, r.cookieLow, offset, length);
      return;
    }
    const head = this.#session?.structured === true ? CHUNK_HEADER_BYTES + 8 : SIMPLE_REPLY_BYTES;
    const { buffer, at } = this.#replies.reserve(head + length);
    let filled: boolean;
    try {
      filled = target.readNow(offset, length, buffer, at + head);
    } catch (e) {
      this.#replies.shrink(head + length);
      return this.#answer(r, this.#errno(e, r.type));
    }
    if (filled) return this.#putReadHead(buffer, at, r);
    // The place in the batch would hold up the replies behind it: a late read gets memory of its own.
    this.#replies.shrink(head + length);
    this.#readLater(r, target, head);
  }

  #readLater(r: Request, target: BlockTarget, head: number): void {
    const kept = { ...r, payload: undefined };
    const own = this.#options.pool.take(head + kept.length);
    this.#track(
      kept.length,
      target.read(kept.offset, kept.length, own, head).then(
        () => {
          this.#putReadHead(own, 0, kept);
          this.#send(own, head + kept.length);
        },
        (e: unknown) => {
          this.#options.pool.give(own);
          this.#answer(kept, this.#errno(e, kept.type));
        },
      ),
    );
  }

  #putReadHead(b: Buffer, at: number, r: Request): void {
    if (this.#session?.structured !== true) {
      putSimpleReply(b, at, r.cookieHigh, r.cookieLow, 0);
      return;
    }
    putU64(b, putChunkHeader(b, at, CHUNK.OFFSET_DATA, r.cookieHigh, r.cookieLow, 8 + r.length), r.offset);
  }

  #status(r: Request, target: BlockTarget): void {
    let extents: ReturnType<BlockTarget["status"]>;
    try {
      extents = target.status(r.offset, r.length, (r.flags & CMD_FLAG.REQ_ONE) === 0 ? MAX_STATUS_EXTENTS : 1);
    } catch (e) {
      return this.#answer(r, this.#errno(e, r.type));
    }
    const { buffer, at } = this.#replies.reserve(statusChunkBytes(extents.length));
    putStatusChunk(buffer, at, r.cookieHigh, r.cookieLow, ALLOCATION_CONTEXT_ID, extents);
  }

  #answer(r: Request, errno: Errno | undefined): void {
    const structured = this.#session?.structured === true;
    if (errno !== undefined && structured && (r.type === CMD.READ || r.type === CMD.BLOCK_STATUS)) {
      const { buffer, at } = this.#replies.reserve(ERROR_CHUNK_BYTES);
      putErrorChunk(buffer, at, r.cookieHigh, r.cookieLow, errno);
      return;
    }
    const { buffer, at } = this.#replies.reserve(SIMPLE_REPLY_BYTES);
    putSimpleReply(buffer, at, r.cookieHigh, r.cookieLow, errno === undefined ? 0 : ERRNO[errno]);
  }

  #errno(e: unknown, type: number): Errno {
    const errno = wireErrno(e);
    this.#options.logger.warn({ type, errno, error: messageOf(e) }, "NBD request failed");
    return errno;
  }

  #scheduleFlush(): void {
    if (this.#flushScheduled) return;
    this.#flushScheduled = true;
    setImmediate(() => {
      this.#flushScheduled = false;
      this.#flush();
      this.#resume();
      this.#settle();
    });
  }

  #flush(): void {
    this.#target?.commit();
    const ready = this.#replies.take();
    if (ready.length === 0) return;
    const cork = ready.length > 1;
    if (cork) this.#socket.cork();
    for (const { buffer, length } of ready) this.#send(buffer, length);
    if (cork) this.#socket.uncork();
  }

  #send(buffer: Buffer, length: number): void {
    const { pool } = this.#options;
    if (this.#closed || !this.#socket.writable) return pool.give(buffer);
    this.#socket.write(buffer.subarray(0, length), () => pool.give(buffer));
  }

  #fail(e: unknown): void {
    const { logger } = this.#options;
    if (e instanceof ProtocolError) logger.warn({ error: e.message }, "NBD client broke the protocol");
    else logger.error({ error: messageOf(e) }, "NBD connection failed");
    this.#draining = true;
    this.#socket.destroy();
  }

  #settle(): void {
    if (!this.#draining || this.#inflight > 0) return;
    this.#flush();
    if (this.#closed) {
      this.#replies.dispose();
      this.#done.resolve();
    } else if (!this.#socket.writableEnded) {
      this.#socket.end(() => this.#socket.destroy());
    }
  }
}

/** Undefined when the request may go to the target. */
function refusal(r: Request, target: BlockTarget, session: Session | undefined): Errno | undefined {
  if ((r.flags & ~KNOWN_FLAGS) !== 0) return "EINVAL";
  const modifies = r.type === CMD.WRITE || r.type === CMD.TRIM || r.type === CMD.WRITE_ZEROES;
  if (modifies && target.readOnly) return "EPERM";
  if (r.type === CMD.FLUSH) return undefined;
  if (r.length === 0) return "EINVAL";
  if (r.offset + r.length > target.size) return modifies && r.type !== CMD.TRIM ? "ENOSPC" : "EINVAL";
  if (r.type === CMD.READ && r.length > MAX_PAYLOAD_BYTES) return "EINVAL";
  if (r.type === CMD.BLOCK_STATUS && session?.allocation !== true) return "EINVAL";
  return undefined;
}

function isHole(target: BlockTarget, offset: number, length: number): boolean {
  const first = target.status(offset, length, 1)[0];
  return first !== undefined && first.zero && first.length >= length;
}
