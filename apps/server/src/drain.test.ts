import assert from "node:assert/strict";
import { once } from "node:events";
import { createServer } from "node:http";
import { type AddressInfo, connect } from "node:net";
import { text } from "node:stream/consumers";
import { test } from "node:test";
import { fakeServer } from "../test/fake-server.ts";
import { drain } from "./drain.ts";

const LIMIT = { timeout: 60_000 };
const MIB = 1024 * 1024;
const CHUNK = Buffer.alloc(MIB, 0x20);

/** A client that sends all of its body before it reads a byte of the answer. */
async function sendAll(port: number, head: string, mib: number, chunked: boolean): Promise<string> {
  const socket = connect({ port, host: "127.0.0.1" });
  const failed = once(socket, "error").then(([e]) => Promise.reject(e as Error));
  failed.catch(() => {});
  const write = async (data: string | Buffer): Promise<void> => {
    if (!socket.write(data)) await Promise.race([once(socket, "drain"), failed]);
  };
  await write(head);
  for (let sent = 0; sent < mib; sent++) {
    if (chunked) await write(`${MIB.toString(16)}\r\n`);
    await write(CHUNK);
    if (chunked) await write("\r\n");
  }
  if (chunked) await write("0\r\n\r\n");
  return await Promise.race([text(socket), failed]);
}

test("a request that is refused is answered, however large the body that its client sends first", LIMIT, async (t) => {
  const server = fakeServer();
  t.after(() => server[Symbol.asyncDispose]());
  const port = Number(new URL(await server.app.listen({ port: 0, host: "127.0.0.1" })).port);
  const rows: [string, string, number][] = [
    ["/sandboxes", server.key, 413],
    ["/sandboxes", "e2b_wrong", 401],
  ];
  for (const [path, key, status] of rows)
    for (const chunked of [false, true]) {
      const length = chunked ? "Transfer-Encoding: chunked" : `Content-Length: ${24 * MIB}`;
      const head = `POST ${path} HTTP/1.1\r\nHost: x\r\nX-API-KEY: ${key}\r\nConnection: close\r\n${length}\r\n\r\n`;
      const answer = await sendAll(port, head, 24, chunked);
      assert.match(answer, new RegExp(`^HTTP/1\\.1 ${status} [^]*"code":${status}`), `${path} ${length}`);
    }
});

test("draining ends: at its bytes, at its time, when the client hangs up", LIMIT, async (t) => {
  const outcomes: Promise<boolean>[] = [];
  const server = createServer((request, response) => {
    const bytes = Number(request.headers["x-bytes"]);
    const ms = Number(request.headers["x-ms"]);
    const outcome = drain(request, { bytes, ms });
    outcomes.push(outcome);
    void outcome.then((whole) => response.writeHead(whole ? 200 : 413, { connection: "close" }).end());
  }).listen(0, "127.0.0.1");
  t.after(() => server.close());
  await once(server, "listening");
  const { port } = server.address() as AddressInfo;
  const head = (bytes: number, ms: number, length: number): string =>
    `POST / HTTP/1.1\r\nHost: x\r\nX-Bytes: ${bytes}\r\nX-Ms: ${ms}\r\nContent-Length: ${length}\r\nConnection: close\r\n\r\n`;

  assert.match(await sendAll(port, head(2 * MIB, 60_000, 2 * MIB), 2, false), /^HTTP\/1\.1 200/);
  assert.equal(await outcomes[0], true);

  const tooMuch = connect({ port, host: "127.0.0.1" }).on("error", () => {});
  tooMuch.write(head(MIB, 60_000, 8 * MIB));
  for (let n = 0; n < 4; n++) tooMuch.write(CHUNK);
  await new Promise((resolve) => tooMuch.once("close", resolve));
  assert.equal(await outcomes[1], false);

  const slow = connect({ port, host: "127.0.0.1" });
  slow.write(head(MIB, 50, MIB));
  assert.match(await text(slow), /^HTTP\/1\.1 413/);

  const gone = connect({ port, host: "127.0.0.1" });
  gone.write(head(MIB, 60_000, MIB));
  while (outcomes.length < 4) await new Promise((resolve) => setTimeout(resolve, 5));
  gone.destroy();
  assert.equal(await outcomes[3], false);
});
