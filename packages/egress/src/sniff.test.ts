import assert from "node:assert/strict";
import { test } from "node:test";
import { MAX_SNIFF, plainName, sniff } from "./sniff.ts";

/** A first message that OpenSSL makes, which no code of ours wrote. */
async function realHello(servername: string): Promise<Buffer> {
  const { connect } = await import("node:tls");
  const { Duplex } = await import("node:stream");
  return await new Promise((resolve) => {
    const wire = new Duplex({ read() {}, write: (data: Buffer) => resolve(data) });
    connect({ socket: wire, servername, ALPNProtocols: ["h2", "http/1.1"] }).on("error", () => {});
  });
}

test("the name of a TLS hello is found however its bytes arrive", async () => {
  const hello = await realHello("www.Example.com");
  for (let n = 0; n < hello.length; n++) assert.deepEqual(sniff(hello.subarray(0, n)), { kind: "more" }, `${n} bytes`);
  assert.deepEqual(sniff(hello), { kind: "tls", name: "www.example.com" });
  assert.deepEqual(sniff(Buffer.concat([hello, Buffer.from("more")])), { kind: "tls", name: "www.example.com" });
});

test("a hello in many records is one hello", async () => {
  const hello = await realHello("example.com");
  const body = hello.subarray(5);
  const records: Buffer[] = [];
  for (let at = 0; at < body.length; at += 7) {
    const part = body.subarray(at, at + 7);
    records.push(Buffer.from([22, 3, 1, 0, part.length]), part);
  }
  const data = Buffer.concat(records);
  assert.deepEqual(sniff(data), { kind: "tls", name: "example.com" });
  assert.deepEqual(sniff(data.subarray(0, -1)), { kind: "more" });
});

test("a damaged hello has no name, and never throws", async () => {
  const hello = await realHello("example.com");
  for (let i = 0; i < hello.length; i++) {
    for (const value of [0, 1, 0x7f, 0xff]) {
      const bad = Buffer.from(hello);
      bad[i] = value;
      const said = sniff(bad);
      assert.ok(["tls", "http", "other", "more"].includes(said.kind));
    }
  }
});

const http = (head: string): ReturnType<typeof sniff> => sniff(Buffer.from(head, "latin1"));

test("the host of a request is found, whatever its port and case", () => {
  assert.deepEqual(http("GET / HTTP/1.1\r\nhost:  Example.COM.:8080 \r\n\r\n"), { kind: "http", name: "example.com" });
  assert.deepEqual(http("GET http://example.com/x HTTP/1.1\r\nHost: example.com\r\n\r\n"), {
    kind: "http",
    name: "example.com",
  });
  assert.deepEqual(http("GET / HTTP/1.1\r\nHost: exam"), { kind: "more" });
  assert.deepEqual(http("GE"), { kind: "more" });
});

test("a request whose host could be read in two ways has none", () => {
  for (const head of [
    "GET / HTTP/1.1\r\n\r\n",
    "GET / HTTP/1.1\r\nHost: a.test\r\nHost: b.test\r\n\r\n",
    "GET http://b.test/ HTTP/1.1\r\nHost: a.test\r\n\r\n",
    "CONNECT b.test:443 HTTP/1.1\r\nHost: a.test\r\n\r\n",
    "GET / HTTP/1.1\r\nX: y\r\n Host: b.test\r\nHost: a.test\r\n\r\n",
    "GET / HTTP/1.1\r\nHost : b.test\r\nHost: a.test\r\n\r\n",
    "GET / HTTP/1.1\r\nX: y\nHost: b.test\r\nHost: a.test\r\n\r\n",
    "GET / HTTP/1.1\r\nHost: a.test b.test\r\n\r\n",
    "GET / HTTP/1.1\r\nHost: a.test@b.test\r\n\r\n",
    "GET / HTTP/1.1\r\nHost: 1.2.3.4\r\n\r\n",
    "GET / HTTP/1.1\r\nHost: a.test\0b.test\r\n\r\n",
  ])
    assert.deepEqual(http(head), { kind: "http" }, JSON.stringify(head));
});

test("everything else is something else at once, and nobody is read for ever", () => {
  for (const text of ["SSH-2.0-x\r\n", "get / HTTP/1.1\r\n", "GET /\r\n", "PRI * HTTP/2.0\r\n\r\n", "\0", "\x16\x03"])
    assert.notEqual(http(text).kind, "http", JSON.stringify(text));
  assert.equal(http("SSH").kind, "more");
  assert.equal(http("SSH-").kind, "other");
  assert.equal(http(`GET / HTTP/1.1\r\nX: ${"y".repeat(MAX_SNIFF)}`).kind, "other");
});

test("a name is plain or none", () => {
  assert.equal(plainName("EXAMPLE.com."), "example.com");
  for (const text of ["", ".", "a..b", "-a.test", "a b", "1.2.3.4", "a/b", `${"a".repeat(64)}.test`, "*.test"])
    assert.equal(plainName(text), undefined, text);
});
