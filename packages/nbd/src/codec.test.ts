import assert from "node:assert/strict";
import { randomBytes } from "node:crypto";
import { test } from "node:test";
import { contextData, goData, optionBytes, requestBytes } from "../test/client.ts";
import { Handshake, type HandshakeStep } from "./handshake.ts";
import { CMD, MAX_PAYLOAD_BYTES, OPT, REP } from "./protocol.ts";
import { ProtocolError, RequestDecoder } from "./requests.ts";

interface Seen {
  type: number;
  cookie: number;
  offset: number;
  length: number;
  payload: string | undefined;
}

function decode(chunks: Iterable<Buffer>): { seen: Seen[]; idle: boolean } {
  const decoder = new RequestDecoder();
  const seen: Seen[] = [];
  for (const chunk of chunks) {
    decoder.push(chunk);
    for (let r = decoder.next(); r; r = decoder.next()) {
      const { type, cookieHigh, cookieLow, offset, length, payload } = r;
      seen.push({ type, cookie: cookieHigh * 2 ** 32 + cookieLow, offset, length, payload: payload?.toString("hex") });
    }
  }
  return { seen, idle: decoder.idle };
}

function* pieces(b: Buffer, size: number): Generator<Buffer> {
  for (let at = 0; at < b.length; at += size) yield b.subarray(at, at + size);
}

test("requests decode equally in one piece, byte by byte and in pieces of odd sizes", () => {
  const stream = Buffer.concat([
    requestBytes({ type: CMD.READ, cookie: 2 ** 40 + 7, offset: 2 ** 41, length: 4096 }),
    requestBytes({ type: CMD.WRITE, cookie: 2, offset: 512, payload: randomBytes(70_000) }),
    requestBytes({ type: CMD.WRITE, cookie: 3, offset: 0, payload: randomBytes(1) }),
    requestBytes({ type: CMD.WRITE, cookie: 4, offset: 0, length: 0 }),
    requestBytes({ type: CMD.FLUSH, cookie: 5 }),
    requestBytes({ type: 99, cookie: 6, length: 3 }),
    requestBytes({ type: CMD.DISC, cookie: 7 }),
  ]);
  const whole = decode([stream]);
  assert.equal(whole.seen.length, 7);
  assert.ok(whole.idle);
  assert.equal(whole.seen[0]?.cookie, 2 ** 40 + 7);
  assert.equal(whole.seen[0]?.offset, 2 ** 41);
  for (const size of [1, 27, 28, 29, 4096]) assert.deepEqual(decode(pieces(stream, size)), whole);
});

test("a write over the limit is skipped without memory for it, and the next request is understood", () => {
  const decoder = new RequestDecoder();
  const length = MAX_PAYLOAD_BYTES + 1;
  decoder.push(requestBytes({ type: CMD.WRITE, cookie: 1, length }));
  assert.equal(decoder.next(), undefined);
  const before = process.memoryUsage().arrayBuffers;
  const chunk = Buffer.alloc(1024 * 1024);
  let left = length;
  while (left > chunk.length) {
    decoder.push(chunk);
    assert.equal(decoder.next(), undefined);
    left -= chunk.length;
  }
  assert.ok(process.memoryUsage().arrayBuffers - before < 4 * 1024 * 1024);
  decoder.push(Buffer.concat([chunk.subarray(0, left), requestBytes({ type: CMD.FLUSH, cookie: 2 })]));
  const over = decoder.next();
  assert.equal(over?.length, length);
  assert.equal(over?.payload, undefined);
  assert.equal(decoder.next()?.type, CMD.FLUSH);
});

test("a wrong magic is refused as soon as it has come", () => {
  const decoder = new RequestDecoder();
  decoder.push(Buffer.from("HTTP"));
  assert.throws(() => decoder.next(), ProtocolError);
});

const EXPORTS = [{ name: "disk", description: "a disk", size: 2 ** 30, readOnly: false }];

function negotiate(chunks: Iterable<Buffer>): { steps: HandshakeStep[]; rest: string } {
  const handshake = new Handshake(EXPORTS);
  const steps: HandshakeStep[] = [];
  for (const chunk of chunks) {
    handshake.push(chunk);
    for (let s = handshake.next(); s; s = handshake.next()) steps.push(s);
  }
  return { steps, rest: handshake.rest().toString("hex") };
}

test("a negotiation decodes equally in one piece and byte by byte, and keeps what follows it", () => {
  const request = requestBytes({ type: CMD.FLUSH, cookie: 1 });
  const stream = Buffer.concat([
    Buffer.from([0, 0, 0, 3]),
    optionBytes(OPT.LIST),
    optionBytes(77, Buffer.from("what")),
    optionBytes(OPT.STRUCTURED_REPLY),
    optionBytes(OPT.SET_META_CONTEXT, contextData("disk", ["base:allocation", "x:y"])),
    optionBytes(OPT.INFO, goData("none")),
    optionBytes(OPT.GO, goData("")),
    request,
  ]);
  const whole = negotiate([stream]);
  assert.equal(whole.rest, request.toString("hex"));
  assert.deepEqual(
    whole.steps.map((s) => s.kind),
    ["reply", "reply", "reply", "reply", "reply", "start"],
  );
  const last = whole.steps.at(-1);
  assert.ok(last?.kind === "start" && last.session.structured && last.session.allocation);
  assert.deepEqual(negotiate(pieces(stream, 1)), whole);
});

test("malformed and oversized options are answered with an error, and the negotiation goes on", () => {
  const cases: [number, Buffer, number][] = [
    [OPT.LIST, Buffer.from("x"), REP.ERR_INVALID],
    [OPT.GO, Buffer.alloc(3), REP.ERR_INVALID],
    [OPT.GO, Buffer.from([0, 0, 0, 200, 1, 2, 3]), REP.ERR_INVALID],
    [OPT.GO, Buffer.concat([goData("disk"), Buffer.from([1])]), REP.ERR_INVALID],
    [OPT.INFO, goData("nothing"), REP.ERR_UNKNOWN],
    [OPT.SET_META_CONTEXT, contextData("disk", ["base:allocation"]), REP.ERR_INVALID],
    [OPT.GO, Buffer.alloc(100_000), REP.ERR_TOO_BIG],
    [5, Buffer.alloc(0), REP.ERR_UNSUP],
  ];
  for (const [option, data, error] of cases) {
    const { steps } = negotiate([
      Buffer.concat([Buffer.from([0, 0, 0, 3]), optionBytes(option, data), optionBytes(OPT.GO, goData("disk"))]),
    ]);
    assert.equal(steps.length, 2, `option ${option}`);
    assert.equal(steps[0]?.bytes.readUInt32BE(12), error, `option ${option}`);
    assert.equal(steps[1]?.kind, "start");
  }
});

test("EXPORT_NAME answers with size and flags, with and without the zeroes, and ends on an unknown name", () => {
  const ask = (flags: number, name: string): HandshakeStep | undefined =>
    negotiate([Buffer.concat([Buffer.from([0, 0, 0, flags]), optionBytes(OPT.EXPORT_NAME, Buffer.from(name))])])
      .steps[0];
  assert.equal(ask(3, "disk")?.bytes.length, 10);
  assert.equal(ask(1, "disk")?.bytes.length, 134);
  assert.equal(ask(3, "disk")?.bytes.readBigUInt64BE(0), 2n ** 30n);
  assert.equal(ask(3, "other")?.kind, "end");
});
