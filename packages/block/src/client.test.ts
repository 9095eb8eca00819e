import assert from "node:assert/strict";
import { mkdtemp, rm } from "node:fs/promises";
import { createServer, type Socket } from "node:net";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { test } from "node:test";
import { bytes, newRunId } from "@aenv/base";
import { BlockdClient } from "./client.ts";

test("a blockd that takes connections and never answers is UNAVAILABLE to every call that moves no data", {
  timeout: 30_000,
}, async (t) => {
  const dir = await mkdtemp(join(tmpdir(), "aenv-block-"));
  const socketPath = join(dir, "s");
  const open = new Set<Socket>();
  const server = createServer((s) => open.add(s.on("error", () => {})));
  await new Promise<void>((resolve) => server.listen(socketPath, resolve));
  const client = new BlockdClient(socketPath, { deadlineMs: 50 });
  t.after(async () => {
    client.close();
    for (const s of open) s.destroy();
    server.close();
    await rm(dir, { recursive: true, force: true });
  });
  const spec = {
    disk: newRunId(),
    layers: [],
    sizeBytes: bytes(4096),
    upperDir: dir,
    socketPath: join(dir, "d"),
    socketUid: 0,
    socketGid: 0,
  };
  const calls = [
    client.ping(),
    client.createDisk(spec),
    client.closeDisk(spec.disk, { deleteUpper: true }),
    client.listDisks(),
  ];
  for (const outcome of await Promise.allSettled(calls)) {
    assert.equal(outcome.status, "rejected");
    assert.match(String(outcome.reason), /blockd gave no answer to/);
    assert.equal((outcome.reason as { code?: string }).code, "UNAVAILABLE");
  }
  const own = AbortSignal.timeout(1);
  await assert.rejects(
    client.ping(own),
    (e) => !/gave no answer/.test(String(e)),
    "the caller's own limit stays its own",
  );
});
