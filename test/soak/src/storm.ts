import assert from "node:assert/strict";
import { randomInt } from "node:crypto";
import { type Node, sh } from "./node.ts";

/** What the API may say to a request that meets another transition. Anything else is a bug. */
const FINE = new Set([200, 201, 204, 409, 429, 503]);

interface Fork {
  sandbox?: { sandboxID: string };
}

/** Every kind of request about the state of a sandbox, at random and at once, on few sandboxes. They are alive and whole afterwards. */
export async function storm(
  node: Node,
  o: { requests: number; sandboxes: number; atOnce: number },
  say: (line: string) => void,
): Promise<string> {
  const before = await node.quiet();
  const all = await Promise.all(Array.from({ length: o.sandboxes }, () => node.create()));
  const counts = new Map<string, number>();
  try {
    for (const s of all) {
      await sh(
        s,
        `echo ${s.sandboxId} > mine; head -c 2000000 /dev/urandom > data; md5sum data > sum; cp data /dev/shm/data`,
      );
      await node.api("POST", `/sandboxes/${s.sandboxId}/checkpoints`, { name: "begin" });
    }
    const moves: ((path: string) => Promise<{ status: number; value: unknown }>)[] = [
      (path) => node.api("POST", `${path}/pause`, {}),
      (path) => node.api("POST", `${path}/pause`, {}),
      (path) => node.api("POST", `${path}/connect`, { timeout: 3600 }),
      (path) => node.api("POST", `${path}/connect`, { timeout: 3600 }),
      (path) => node.api("POST", `${path}/resume`, { timeout: 3600 }),
      (path) => node.api("POST", `${path}/timeout`, { timeout: 3600 }),
      (path) => node.api("GET", path),
      (path) => node.api("GET", `${path}/lineage`),
      (path) => node.api("POST", `${path}/rewind`, { checkpoint: "begin", timeout: 3600 }),
      async (path) => {
        const made = await node.api("POST", `${path}/fork`, { count: 1, timeout: 600 });
        if (made.status !== 201) return made;
        for (const { sandbox } of made.value as Fork[])
          if (sandbox) await node.api("DELETE", `/sandboxes/${sandbox.sandboxID}`);
        return made;
      },
      async (path) => {
        const made = await node.api("POST", `${path}/snapshots`, {});
        if (made.status === 201) await node.deleteSnapshot((made.value as { snapshotID: string }).snapshotID);
        return made;
      },
    ];
    let next = 0;
    const worker = async (): Promise<void> => {
      while (next++ < o.requests) {
        const s = all[randomInt(all.length)];
        const at = randomInt(moves.length);
        const { status, value } = (await moves[at]?.(`/sandboxes/${s?.sandboxId}`)) ?? { status: 0, value: undefined };
        assert.ok(FINE.has(status), `move ${at} was answered with ${status}: ${JSON.stringify(value)}`);
        counts.set(`${status}`, (counts.get(`${status}`) ?? 0) + 1);
        if (next % 50 === 0) say(`${next} requests: ${JSON.stringify(Object.fromEntries(counts))}`);
      }
    };
    await Promise.all(Array.from({ length: o.atOnce }, worker));
    for (const s of all) {
      await node.connect(s.sandboxId);
      assert.equal(
        await sh(s, "cat mine; md5sum -c sum; cmp data /dev/shm/data && hostname"),
        `${s.sandboxId}\ndata: OK\n${s.sandboxId}`,
      );
    }
  } finally {
    await Promise.all(all.map((s) => s.kill()));
  }
  await node.settled(before);
  return `${o.requests} requests, ${o.atOnce} at once, on ${o.sandboxes} sandboxes: ${JSON.stringify(Object.fromEntries(counts))}; all whole, host as before`;
}
