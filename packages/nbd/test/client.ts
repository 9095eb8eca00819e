/** A small NBD client for tests: sees every byte of the server, which the well-behaved outside peers do not show. */
import { once } from "node:events";
import { createConnection, type Socket } from "node:net";
import {
  CHUNK,
  CMD,
  NBD_MAGIC,
  OPT,
  OPTION_MAGIC,
  OPTION_REPLY_MAGIC,
  REP,
  REQUEST_MAGIC,
  SIMPLE_REPLY_MAGIC,
  STRUCTURED_REPLY_MAGIC,
} from "../src/protocol.ts";

export { CMD, ERRNO } from "../src/protocol.ts";

export interface Reply {
  error: number;
  data?: Buffer;
  hole?: boolean;
  extents?: { length: number; flags: number }[];
}

export function optionBytes(option: number, data: Buffer = Buffer.alloc(0)): Buffer {
  const head = Buffer.alloc(16);
  head.writeUInt32BE(OPTION_MAGIC[0], 0);
  head.writeUInt32BE(OPTION_MAGIC[1], 4);
  head.writeUInt32BE(option, 8);
  head.writeUInt32BE(data.length, 12);
  return Buffer.concat([head, data]);
}

export function goData(name: string): Buffer {
  const b = Buffer.alloc(4 + Buffer.byteLength(name) + 2);
  b.writeUInt32BE(Buffer.byteLength(name), 0);
  b.write(name, 4);
  return b;
}

export function contextData(name: string, queries: string[]): Buffer {
  const text = (s: string): Buffer => {
    const b = Buffer.alloc(4 + Buffer.byteLength(s));
    b.writeUInt32BE(Buffer.byteLength(s), 0);
    b.write(s, 4);
    return b;
  };
  const count = Buffer.alloc(4);
  count.writeUInt32BE(queries.length, 0);
  return Buffer.concat([text(name), count, ...queries.map(text)]);
}

export function requestBytes(r: {
  type: number;
  flags?: number;
  cookie: number;
  offset?: number;
  length?: number;
  payload?: Buffer;
}): Buffer {
  const b = Buffer.alloc(28);
  b.writeUInt32BE(REQUEST_MAGIC, 0);
  b.writeUInt16BE(r.flags ?? 0, 4);
  b.writeUInt16BE(r.type, 6);
  b.writeBigUInt64BE(BigInt(r.cookie), 8);
  b.writeBigUInt64BE(BigInt(r.offset ?? 0), 16);
  b.writeUInt32BE(r.length ?? r.payload?.length ?? 0, 24);
  return r.payload ? Buffer.concat([b, r.payload]) : b;
}

export class TestClient {
  readonly socket: Socket;
  readonly #waiting = new Map<number, { length: number; type: number; answer: PromiseWithResolvers<Reply> }>();
  #input = Buffer.alloc(0);
  #wanted: { bytes: number; got: PromiseWithResolvers<Buffer> } | undefined;
  #cookie = 1;
  #transmission = false;
  size = 0;
  flags = 0;
  /** Set when the server closed the connection. */
  readonly closed: Promise<void>;

  private constructor(socket: Socket) {
    this.socket = socket;
    socket.on("data", (d: Buffer) => {
      this.#input = Buffer.concat([this.#input, d]);
      this.#turn();
    });
    socket.on("error", () => {});
    this.closed = new Promise((resolve) => {
      socket.once("close", () => {
        this.#wanted?.got.reject(new Error("closed"));
        for (const w of this.#waiting.values()) w.answer.reject(new Error("closed"));
        resolve();
      });
    });
  }

  /** Connected and greeted; nothing negotiated. */
  static async raw(path: string): Promise<TestClient> {
    const socket = createConnection(path);
    await once(socket, "connect");
    const client = new TestClient(socket);
    const hello = await client.take(18);
    if (hello.readUInt32BE(0) !== NBD_MAGIC[0]) throw new Error("no greeting");
    return client;
  }

  static async connect(path: string, o: { structured?: boolean; name?: string } = {}): Promise<TestClient> {
    const client = await TestClient.raw(path);
    client.socket.write(Buffer.from([0, 0, 0, 3]));
    if (o.structured) {
      await client.option(OPT.STRUCTURED_REPLY);
      await client.option(OPT.SET_META_CONTEXT, contextData(o.name ?? "disk", ["base:allocation"]));
    }
    const replies = await client.option(OPT.GO, goData(o.name ?? "disk"));
    const info = replies.find((r) => r.type === REP.INFO && r.data.readUInt16BE(0) === 0);
    if (!info) throw new Error(`GO was refused: ${replies.at(-1)?.type.toString(16)}`);
    client.size = Number(info.data.readBigUInt64BE(2));
    client.flags = info.data.readUInt16BE(10);
    client.#transmission = true;
    return client;
  }

  /** Sends an option and returns its replies up to the final one. */
  async option(option: number, data?: Buffer): Promise<{ type: number; data: Buffer }[]> {
    this.socket.write(optionBytes(option, data));
    const out: { type: number; data: Buffer }[] = [];
    for (;;) {
      const head = await this.take(20);
      if (head.readUInt32BE(0) !== OPTION_REPLY_MAGIC[0]) throw new Error("not an option reply");
      const type = head.readUInt32BE(12);
      out.push({ type, data: await this.take(head.readUInt32BE(16)) });
      if (type === REP.ACK || type >= 0x80000000) return out;
    }
  }

  take(bytes: number): Promise<Buffer> {
    const got = Promise.withResolvers<Buffer>();
    this.#wanted = { bytes, got };
    this.#turn();
    return got.promise;
  }

  send(type: number, offset: number, length: number, o: { flags?: number; payload?: Buffer } = {}): Promise<Reply> {
    const cookie = this.#cookie++;
    const answer = Promise.withResolvers<Reply>();
    this.#waiting.set(cookie, { length, type, answer });
    this.socket.write(
      requestBytes({
        type,
        cookie,
        offset,
        length,
        ...(o.flags === undefined ? {} : { flags: o.flags }),
        ...(o.payload === undefined ? {} : { payload: o.payload }),
      }),
    );
    return answer.promise;
  }

  read(offset: number, length: number): Promise<Reply> {
    return this.send(CMD.READ, offset, length);
  }

  write(offset: number, payload: Buffer, flags = 0): Promise<Reply> {
    return this.send(CMD.WRITE, offset, payload.length, { payload, flags });
  }

  flush(): Promise<Reply> {
    return this.send(CMD.FLUSH, 0, 0);
  }

  close(): void {
    this.socket.destroy();
  }

  #turn(): void {
    if (!this.#transmission) {
      const w = this.#wanted;
      if (!w || this.#input.length < w.bytes) return;
      this.#wanted = undefined;
      const head = this.#input.subarray(0, w.bytes);
      this.#input = this.#input.subarray(w.bytes);
      w.got.resolve(head);
      return;
    }
    while (this.#reply());
  }

  #reply(): boolean {
    const b = this.#input;
    if (b.length < 16) return false;
    const cookie = Number(b.readBigUInt64BE(8));
    const waiting = this.#waiting.get(cookie);
    if (!waiting) throw new Error(`reply to an unknown cookie ${cookie}`);
    let end: number;
    let reply: Reply;
    if (b.readUInt32BE(0) === SIMPLE_REPLY_MAGIC) {
      const error = b.readUInt32BE(4);
      end = 16 + (waiting.type === CMD.READ && error === 0 ? waiting.length : 0);
      if (b.length < end) return false;
      reply = { error, ...(waiting.type === CMD.READ && error === 0 ? { data: b.subarray(16, end) } : {}) };
    } else {
      if (b.readUInt32BE(0) !== STRUCTURED_REPLY_MAGIC) throw new Error("not a reply");
      if (b.length < 20) return false;
      end = 20 + b.readUInt32BE(16);
      if (b.length < end) return false;
      reply = structured(b.readUInt16BE(6), b.subarray(20, end));
    }
    this.#input = b.subarray(end);
    this.#waiting.delete(cookie);
    waiting.answer.resolve(reply);
    return true;
  }
}

function structured(type: number, body: Buffer): Reply {
  if (type === CHUNK.OFFSET_DATA) return { error: 0, data: body.subarray(8) };
  if (type === CHUNK.OFFSET_HOLE) return { error: 0, hole: true, data: Buffer.alloc(body.readUInt32BE(8)) };
  if (type === CHUNK.ERROR) return { error: body.readUInt32BE(0) };
  if (type !== CHUNK.BLOCK_STATUS) throw new Error(`unexpected chunk ${type}`);
  const extents: { length: number; flags: number }[] = [];
  for (let at = 4; at < body.length; at += 8) {
    extents.push({ length: body.readUInt32BE(at), flags: body.readUInt32BE(at + 4) });
  }
  return { error: 0, extents };
}
