import assert from "node:assert/strict";
import { request } from "node:http";
import { test } from "node:test";
import { setImmediate as turn } from "node:timers/promises";
import { fixture, httpGuest, RawClient } from "./testing.ts";
import { WriteQueue } from "./write-queue.ts";

test("writes are made in their order, those of one turn together, those made meanwhile in the next", async () => {
  const queue = new WriteQueue();
  const seen: string[] = [];
  queue.push(() => {
    seen.push("a");
    queue.push(() => seen.push("c"));
  });
  queue.push(() => seen.push("b"));
  assert.deepEqual(seen, []);
  await turn();
  assert.deepEqual(seen, ["a", "b"]);
  await turn();
  assert.deepEqual(seen, ["a", "b", "c"]);
  assert.equal(queue.empty, true);
});

test("a burst of requests is answered one by one, the small bodies and the large ones whole", async (t) => {
  const guest = await httpGuest(t, (req, res) => {
    const [, size, name] = (req.url ?? "").split("/");
    res.end(`${name}:${"\u00fc".repeat(Number(size))}`);
  });
  const f = await fixture(t);
  const get = (path: string): Promise<string> =>
    new Promise((resolve, reject) => {
      const req = request({ port: f.port, path, headers: { host: f.host(guest.port) } }, (res) => {
        let text = "";
        res.setEncoding("utf8");
        res.on("data", (d: string) => (text += d));
        res.on("end", () => resolve(text));
      });
      req.on("error", reject).end();
    });
  const sizes = [0, 1, 1000, 20_000];
  const jobs = Array.from({ length: 64 }, (_, i) => ({ name: `n${i}`, size: sizes[i % sizes.length] as number }));
  const answers = await Promise.all(jobs.map((j) => get(`/${j.size}/${j.name}`)));
  assert.deepEqual(
    answers,
    jobs.map((j) => `${j.name}:${"\u00fc".repeat(j.size)}`),
  );
  assert.equal(f.edge.stats().active, 0);
});

test("clients that leave within a burst take nobody's answer with them", async (t) => {
  let reached = 0;
  const guest = await httpGuest(t, (req, res) => {
    reached++;
    res.end(req.url);
  });
  const f = await fixture(t);
  const head = (path: string): string => `GET ${path} HTTP/1.1\r\nHost: ${f.host(guest.port)}\r\n\r\n`;
  const clients = Array.from({ length: 32 }, (_, i) => new RawClient(f.port, head(`/c${i}`)));
  for (const [i, c] of clients.entries()) if (i % 2 === 0) c.socket.destroy();
  await Promise.all(clients.map((c, i) => (i % 2 === 0 ? c.closed : c.until(`/c${i}`))));
  for (const [i, c] of clients.entries()) {
    if (i % 2 === 0) continue;
    assert.equal(c.text.match(/HTTP\/1\.1 200/g)?.length, 1);
    c.socket.destroy();
  }
  assert.ok(reached >= 16, `${reached} requests reached the guest`);
});
