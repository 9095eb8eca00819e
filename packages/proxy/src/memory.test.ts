import assert from "node:assert/strict";
import { fork } from "node:child_process";
import { once } from "node:events";
import { type IncomingMessage, request } from "node:http";
import { join } from "node:path";
import { test, type TestContext } from "node:test";
import { httpGuest } from "./testing.ts";

const LIMIT = { timeout: 60_000 };
const MIB = 2 ** 20;
const BODY = 128 * MIB;
/** Before the measurement: code is compiled, and there is as much uncollected garbage as there ever is. */
const WARM = 64 * MIB;
/** What the peak may grow by afterwards. */
const MAX_GROWTH = 64 * MIB;
/** Socket buffers of the kernel on both hops, and node's own. */
const MAX_IN_FLIGHT = 48 * MIB;

async function edgeProcess(t: TestContext): Promise<{ port: number; peak(): Promise<number> }> {
  const child = fork(join(import.meta.dirname, "../test/edge-process.ts"));
  t.after(() => child.disconnect());
  const [port] = (await once(child, "message")) as [number];
  return {
    port,
    peak: async () => {
      child.send("memory");
      const [bytes] = (await once(child, "message")) as [number];
      return bytes;
    },
  };
}

const block = Buffer.alloc(256 * 1024, "x");

/** Writes `bytes` under backpressure; `sent.bytes` counts along. */
async function pour(into: NodeJS.WritableStream, bytes: number, sent: { bytes: number }): Promise<void> {
  while (sent.bytes < bytes) {
    sent.bytes += block.length;
    if (!into.write(block)) await once(into, "drain");
  }
  into.end();
}

function headers(port: number): Record<string, string> {
  return { "E2b-Sandbox-Id": "iabc", "E2b-Sandbox-Port": String(port) };
}

test("a download of 128 MiB by a slow client leaves the edge's memory flat", LIMIT, async (t) => {
  const edge = await edgeProcess(t);
  let sent = { bytes: 0 };
  const guest = await httpGuest(t, async (req, res) => {
    sent = { bytes: 0 };
    await pour(res, Number(req.url?.slice(1)), sent);
  });
  const download = async (bytes: number): Promise<void> => {
    const req = request({ host: "127.0.0.1", port: edge.port, path: `/${bytes}`, headers: headers(guest.port) }).end();
    const [res] = (await once(req, "response")) as [IncomingMessage];
    let got = 0;
    for await (const chunk of res) {
      got += (chunk as Buffer).length;
      assert.ok(sent.bytes - got < MAX_IN_FLIGHT, `${sent.bytes - got} bytes are held between guest and client`);
      // The guest, in this same process, gets its turn to run ahead.
      await new Promise((resolve) => setImmediate(resolve));
    }
    assert.equal(got, bytes);
  };
  await download(WARM);
  const before = await edge.peak();
  await download(BODY);
  const growth = (await edge.peak()) - before;
  t.diagnostic(`peak grew by ${(growth / MIB).toFixed(1)} MiB`);
  assert.ok(growth < MAX_GROWTH, `peak grew by ${growth}`);
});

test("an upload of 128 MiB to a slow guest leaves the edge's memory flat", LIMIT, async (t) => {
  const edge = await edgeProcess(t);
  let sent = { bytes: 0 };
  const guest = await httpGuest(t, async (req, res) => {
    let got = 0;
    for await (const chunk of req) {
      got += (chunk as Buffer).length;
      if (sent.bytes - got > MAX_IN_FLIGHT)
        throw new Error(`${sent.bytes - got} bytes are held between client and guest`);
      await new Promise((resolve) => setImmediate(resolve));
    }
    res.end(String(got));
  });
  const upload = async (bytes: number, framing: Record<string, string>): Promise<void> => {
    const req = request({
      host: "127.0.0.1",
      port: edge.port,
      method: "POST",
      headers: { ...headers(guest.port), ...framing },
    });
    const answered = once(req, "response");
    sent = { bytes: 0 };
    await pour(req, bytes, sent);
    const [res] = (await answered) as [IncomingMessage];
    let text = "";
    for await (const d of res) text += String(d);
    assert.equal(text, String(bytes));
  };
  await upload(WARM, {});
  await upload(WARM, { "Content-Length": String(WARM) });
  const before = await edge.peak();
  await upload(BODY, {});
  await upload(BODY, { "Content-Length": String(BODY) });
  const growth = (await edge.peak()) - before;
  t.diagnostic(`peak grew by ${(growth / MIB).toFixed(1)} MiB`);
  assert.ok(growth < MAX_GROWTH, `peak grew by ${growth}`);
});
