import assert from "node:assert/strict";
import { test } from "node:test";
import fc from "fast-check";
import { ChunkedDecoder } from "./chunked.ts";
import { HeadCollector, MalformedResponse, parseResponseHead } from "./response-head.ts";

/** The bytes in pieces that end at the given places. */
function pieces(bytes: Buffer, cuts: readonly number[]): Buffer[] {
  const at = [...new Set(cuts.map((c) => c % (bytes.length + 1)))].sort((a, b) => a - b);
  return [0, ...at].map((from, i) => bytes.subarray(from, at[i] ?? bytes.length));
}

function decode(parts: readonly Buffer[]): { body: Buffer; decoder: ChunkedDecoder; rest: number } {
  const decoder = new ChunkedDecoder();
  const body: Buffer[] = [];
  let rest = 0;
  for (const part of parts) rest += part.length - decoder.push(part, (d) => body.push(Buffer.from(d)));
  return { body: Buffer.concat(body), decoder, rest };
}

test("a chunked body comes out the same however the network cuts it, and what follows is left alone", () => {
  const chunks = fc.array(fc.uint8Array({ minLength: 1, maxLength: 40 }), { maxLength: 8 });
  fc.assert(
    fc.property(chunks, fc.array(fc.nat(500), { maxLength: 30 }), fc.nat(20), (chunks, cuts, after) => {
      const coded = Buffer.concat([
        ...chunks.flatMap((c, i) => [
          Buffer.from(`${c.length.toString(16)}${i % 2 ? ";ext=1" : ""}\r\n`),
          c,
          Buffer.from("\r\n"),
        ]),
        Buffer.from("0\r\nX-Sum: 1\r\nContent-Length: 5\r\n\r\n"),
        Buffer.alloc(after, "z"),
      ]);
      const { body, decoder, rest } = decode(pieces(coded, cuts));
      assert.deepEqual(body, Buffer.concat(chunks));
      assert.equal(decoder.done, true);
      assert.equal(rest, after);
      // Framing fields are not trailers.
      assert.deepEqual(decoder.trailers, [["X-Sum", "1"]]);
    }),
  );
});

test("random bytes give the chunked decoder nothing but MalformedResponse", () => {
  const bytes = fc.oneof(
    fc.uint8Array({ maxLength: 300 }),
    fc.stringMatching(/^[0-9a-f\r\n;x]{0,80}$/).map((s) => Buffer.from(s)),
  );
  fc.assert(
    fc.property(bytes, fc.array(fc.nat(300), { maxLength: 10 }), (bytes, cuts) => {
      try {
        decode(pieces(Buffer.from(bytes), cuts));
      } catch (e) {
        assert.ok(e instanceof MalformedResponse);
      }
    }),
    { numRuns: 2000 },
  );
});

test("sizes, extensions and trailers of a chunked body are bounded", () => {
  for (const text of ["1".repeat(14), `1;${"e".repeat(5000)}`, `0\r\n${"a: b\r\n".repeat(4000)}`]) {
    assert.throws(() => decode([Buffer.from(text)]), MalformedResponse);
  }
});

test("a head is found however the network cuts it, with either line end", () => {
  fc.assert(
    fc.property(fc.constantFrom("\r\n", "\n"), fc.array(fc.nat(200), { maxLength: 40 }), (eol, cuts) => {
      const head = ["HTTP/1.1 200 OK", "A: b", "Content-Length: 3", "", ""].join(eol);
      const collector = new HeadCollector(1000);
      let found: { text: string; used: number } | undefined;
      let left = 0;
      for (const part of pieces(Buffer.from(`${head}xyz`), cuts)) {
        if (found) left += part.length;
        else {
          found = collector.push(part);
          if (found) left = part.length - found.used;
        }
      }
      assert.equal(found?.text, head);
      assert.equal(left, 3);
    }),
  );
});

test("the collector holds no more than its limit, over interim heads too", () => {
  const one = new HeadCollector(100);
  assert.throws(() => one.push(Buffer.alloc(101, "a")), MalformedResponse);
  const many = new HeadCollector(100);
  const interim = Buffer.from("HTTP/1.1 102 Processing\r\n\r\n");
  for (let i = 0; i < 3; i++) assert.ok(many.push(interim));
  assert.throws(() => many.push(interim), MalformedResponse);
});

test("random heads give the parser nothing but MalformedResponse, and no header that could split a message", () => {
  const line = fc.oneof(
    fc.string({ unit: "binary", maxLength: 30 }),
    fc.constantFrom("Connection: x, close", "Transfer-Encoding: chunked", "Content-Length: 5, 5", "X: y"),
  );
  fc.assert(
    fc.property(fc.array(line, { maxLength: 6 }), (lines) => {
      const text = Buffer.from(["HTTP/1.1 200 OK", ...lines, "", ""].join("\r\n"), "latin1").toString("latin1");
      try {
        const head = parseResponseHead(text, "GET");
        // biome-ignore lint: control characters are what is looked for
        for (const part of head.headers) assert.doesNotMatch(part, /[\r\n\0]/);
      } catch (e) {
        assert.ok(e instanceof MalformedResponse);
      }
    }),
    { numRuns: 2000 },
  );
});

test("the framing of a response follows RFC 9112", () => {
  const framing = (text: string, method = "GET"): unknown => parseResponseHead(`${text}\r\n\r\n`, method).framing;
  assert.deepEqual(framing("HTTP/1.1 200 OK"), { kind: "close" });
  assert.deepEqual(framing("HTTP/1.1 200 OK\r\nContent-Length: 5, 5"), { kind: "length", bytes: 5 });
  assert.deepEqual(framing("HTTP/1.1 200 OK\r\nTransfer-Encoding: Chunked"), { kind: "chunked" });
  for (const none of ["HTTP/1.1 204 No Content", "HTTP/1.1 304 Not Modified\r\nContent-Length: 7"]) {
    assert.deepEqual(framing(none), { kind: "none" });
  }
  assert.deepEqual(framing("HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked", "HEAD"), { kind: "none" });
  assert.equal(parseResponseHead("HTTP/1.0 200 OK\r\nContent-Length: 1\r\n\r\n", "GET").reusable, false);
  assert.equal(
    parseResponseHead("HTTP/1.1 200 OK\r\nContent-Length: 1\r\nConnection: x-a, Close\r\nX-A: 1\r\n\r\n", "GET")
      .reusable,
    false,
  );
});
