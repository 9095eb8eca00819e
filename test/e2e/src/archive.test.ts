/** A snapshot that leaves the node as a file and comes back, when nothing of it is there any more. */
import assert from "node:assert/strict";
import { randomUUID } from "node:crypto";
import { createReadStream, createWriteStream, mkdtempSync, rmSync, truncateSync } from "node:fs";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { Readable } from "node:stream";
import { pipeline } from "node:stream/promises";
import { test } from "node:test";
import { Sandbox } from "e2b";
import { api, apiKey, connection, sandboxFor, url } from "./node.ts";

test("a snapshot is exported, deleted, imported and started: memory, processes and files are as they were", {
  timeout: 300_000,
}, async (t) => {
  const dir = mkdtempSync(join(tmpdir(), "aenv-archive-"));
  t.after(() => rmSync(dir, { recursive: true }));
  const name = `archive-${randomUUID().slice(0, 8)}`;
  const source = await sandboxFor(t);
  const script = "head -c 3000000 /dev/urandom > data; sha256sum data; echo in memory > /dev/shm/note; sync";
  const sum = (await source.commands.run(script)).stdout;
  const { pid } = await source.commands.run("sleep 100000", { background: true, timeoutMs: 0 });
  const made = await api("POST", `/sandboxes/${source.sandboxId}/snapshots`, { name });
  assert.equal(made.status, 201);
  const path = join(dir, "snapshot.tar");
  const archive = await api("GET", `/v1/snapshots/${name}/archive`);
  assert.equal(archive.status, 200);
  assert.equal(archive.headers.get("content-type"), "application/x-tar");
  assert.ok(archive.body);
  await pipeline(Readable.fromWeb(archive.body), createWriteStream(path));
  await source.kill();
  assert.equal((await api("DELETE", `/templates/${name}`)).status, 204);
  const send = (file: string): Promise<Response> =>
    fetch(`${url}/v1/archives?name=${name}`, {
      method: "POST",
      headers: { "X-API-KEY": apiKey, "content-type": "application/x-tar" },
      body: Readable.toWeb(createReadStream(file)) as ReadableStream,
      duplex: "half",
    });
  const imported = await send(path);
  assert.equal(imported.status, 201, await imported.clone().text());
  t.after(() => api("DELETE", `/templates/${name}`));
  const sandbox = await Sandbox.create(name, { ...connection, timeoutMs: 120_000 });
  t.after(() => sandbox.kill());
  assert.equal((await sandbox.commands.run("sha256sum data")).stdout, sum);
  assert.equal((await sandbox.commands.run("cat /dev/shm/note")).stdout, "in memory\n");
  assert.ok((await sandbox.commands.list()).some((p) => p.pid === pid));
  truncateSync(path, 100_000);
  const short = await send(path);
  assert.equal(short.status, 400);
  assert.match(await short.text(), /archive/);
});
