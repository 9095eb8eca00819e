/** Bounded fuzzing of the two decoders. `NBD_FUZZ_SEED=n` repeats a run; the seed is in every failure message. */
import assert from "node:assert/strict";
import { test } from "node:test";
import { contextData, goData, optionBytes, requestBytes } from "../test/client.ts";
import { Handshake } from "./handshake.ts";
import { CMD, MAX_PAYLOAD_BYTES, OPT } from "./protocol.ts";
import { ProtocolError, RequestDecoder } from "./requests.ts";

const SEED = Number(process.env["NBD_FUZZ_SEED"] ?? Date.now() % 2 ** 31);
const ROUNDS = Number(process.env["NBD_FUZZ_ROUNDS"] ?? 3000);

/** mulberry32 */
function random(seed: number): () => number {
  let a = seed;
  return () => {
    a = (a + 0x6d2b79f5) | 0;
    let t = Math.imul(a ^ (a >>> 15), 1 | a);
    t = (t + Math.imul(t ^ (t >>> 7), 61 | t)) ^ t;
    return ((t ^ (t >>> 14)) >>> 0) / 4294967296;
  };
}

const below = (rnd: () => number, n: number): number => Math.floor(rnd() * n);

function mutate(rnd: () => number, b: Buffer): Buffer {
  const out = Buffer.from(b);
  for (let n = below(rnd, 4); n > 0 && out.length > 0; n--) {
    const at = below(rnd, out.length);
    out[at] = rnd() < 0.3 ? 0xff : below(rnd, 256);
  }
  return rnd() < 0.1 ? out.subarray(0, below(rnd, out.length + 1)) : out;
}

function* split(rnd: () => number, b: Buffer): Generator<Buffer> {
  for (let at = 0; at < b.length; ) {
    const n = 1 + below(rnd, rnd() < 0.5 ? 8 : 300);
    yield b.subarray(at, at + n);
    at += n;
  }
}

/** What a split of the input must not change: the requests, and how it ends. */
function requests(chunks: Iterable<Buffer>): string[] {
  const decoder = new RequestDecoder();
  const out: string[] = [];
  try {
    for (const chunk of chunks) {
      decoder.push(chunk);
      for (let r = decoder.next(); r; r = decoder.next()) {
        if (r.payload && r.payload.length > MAX_PAYLOAD_BYTES) throw new Error("payload over the limit");
        out.push(`${r.type} ${r.offset} ${r.length} ${r.payload?.toString("hex") ?? ""}`);
      }
    }
  } catch (e) {
    if (!(e instanceof ProtocolError)) throw e;
    out.push("refused");
  }
  return out;
}

test(`requests: damaged streams decode the same however they are cut (seed ${SEED})`, () => {
  for (let round = 0; round < ROUNDS; round++) {
    const rnd = random(SEED + round);
    const parts: Buffer[] = [];
    for (let n = 1 + below(rnd, 6); n > 0; n--) {
      const payload = Buffer.alloc(below(rnd, 200), below(rnd, 256));
      const type = rnd() < 0.5 ? CMD.WRITE : below(rnd, 10);
      const r = requestBytes({
        type,
        cookie: below(rnd, 1000),
        offset: below(rnd, 2 ** 20),
        ...(type === CMD.WRITE ? { payload } : { length: below(rnd, 2 ** 31) }),
      });
      parts.push(mutate(rnd, r));
    }
    const stream = Buffer.concat(parts);
    assert.deepEqual(requests(split(rnd, stream)), requests([stream]), `seed ${SEED + round}`);
  }
});

function handshake(chunks: Iterable<Buffer>): string[] {
  const h = new Handshake([{ name: "disk", description: "d", size: 4096, readOnly: false }]);
  const out: string[] = [];
  try {
    for (const chunk of chunks) {
      h.push(chunk);
      for (let s = h.next(); s; s = h.next()) {
        if (s.bytes.length > 8192) throw new Error("a reply longer than its cause");
        out.push(`${s.kind} ${s.bytes.toString("hex")}`);
      }
    }
  } catch (e) {
    if (!(e instanceof ProtocolError)) throw e;
    out.push("refused");
  }
  return out;
}

test(`negotiation: damaged streams end the same however they are cut (seed ${SEED})`, () => {
  const options = [
    optionBytes(OPT.LIST),
    optionBytes(OPT.STRUCTURED_REPLY),
    optionBytes(OPT.SET_META_CONTEXT, contextData("disk", ["base:allocation", "qemu:x"])),
    optionBytes(OPT.LIST_META_CONTEXT, contextData("disk", [])),
    optionBytes(OPT.INFO, goData("disk")),
    optionBytes(OPT.GO, goData("disk")),
    optionBytes(OPT.EXPORT_NAME, Buffer.from("disk")),
    optionBytes(OPT.ABORT),
  ];
  for (let round = 0; round < ROUNDS; round++) {
    const rnd = random(SEED + round);
    const parts = [mutate(rnd, Buffer.from([0, 0, 0, 3]))];
    for (let n = 1 + below(rnd, 6); n > 0; n--) parts.push(mutate(rnd, options[below(rnd, options.length)] as Buffer));
    const stream = Buffer.concat(parts);
    assert.deepEqual(handshake(split(rnd, stream)), handshake([stream]), `seed ${SEED + round}`);
  }
});
