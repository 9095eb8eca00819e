import assert from "node:assert/strict";
import { randomBytes } from "node:crypto";
import { readFileSync, statSync, writeFileSync } from "node:fs";
import { join } from "node:path";
import { after, before, test } from "node:test";
import { newLayerId } from "@aenv/base";
import { importRaw, type LayerRef, openStore, SnapshotRepository, writeStub } from "@aenv/block";
import { S3Server } from "@aenv/block/testing";
import { run } from "@aenv/host";
import { TestBlockd, uri } from "../test/harness.ts";

const MIB = 1024 * 1024;
const CACHE_MIB = 16;

let server: S3Server;
before(async () => {
  server = await S3Server.start();
});
after(async () => {
  await server[Symbol.asyncDispose]();
});

/** Publishes a disk of random bytes and puts a stub of its layer where blockd finds it. */
async function published(
  blockd: TestBlockd,
  name: string,
  mib: number,
  half = false,
): Promise<{ raw: string; layer: LayerRef }> {
  const raw = blockd.path(`${name}.raw`);
  const content = Buffer.alloc(mib * MIB);
  randomBytes(half ? content.length >> 1 : content.length).copy(content);
  writeFileSync(raw, content);
  const local = blockd.layer();
  await importRaw(raw, local);
  const address = server.address("layers");
  using store = await openStore(address);
  const files = [{ name: "layer/0", path: local.path, encoding: "zfile" as const }];
  const { blobs } = await new SnapshotRepository(store).publish({
    id: name,
    record: {},
    files,
    scratch: blockd.path("scratch"),
  });
  const blob = blobs[0];
  assert.ok(blob);
  const layer = { id: newLayerId(), path: join(blockd.dir, `${name}.stub`) };
  await writeStub(layer.path, { store: address, ...blob });
  return { raw, layer };
}

const same = async (raw: string, at: string): Promise<void> =>
  void (await run("qemu-img", ["compare", "-f", "raw", "-F", "raw", raw, at]));

test("disks on layers of a store, twice as large as the cache, read right by several at once, over writes, seals and restarts", async () => {
  await using blockd = await TestBlockd.start(["--cache-mib", String(CACHE_MIB)]);
  const a = await published(blockd, "a", 20);
  const b = await published(blockd, "b", 24, true);
  const disks = [
    blockd.spec("a1", 20 * MIB, [a.layer]),
    blockd.spec("a2", 20 * MIB, [a.layer]),
    blockd.spec("b1", 24 * MIB, [b.layer]),
  ];
  await Promise.all(disks.map((d) => blockd.client.createDisk(d)));
  const [a1, a2, b1] = disks.map(uri) as [string, string, string];
  await Promise.all([same(a.raw, a1), same(a.raw, a2), same(b.raw, b1)]);
  const cache = join(blockd.dir, "state", "cache", "slots.data");
  assert.ok(statSync(cache).size <= CACHE_MIB * MIB, "the cache is within its bound");
  // Writes of parts of blocks need the rest of them from the store.
  const writes = [
    "-c",
    "write -P 1 512 512",
    "-c",
    "write -P 2 5242368 1024",
    "-c",
    "write -z 10486272 1536",
    "-c",
    "write -P 3 0x10ff000 8192",
  ];
  await run("qemu-io", ["-f", "raw", ...writes, a1]);
  const model = blockd.path("model.raw");
  writeFileSync(model, readFileSync(a.raw));
  await run("qemu-io", ["-f", "raw", ...writes, model]);
  await same(model, a1);
  await blockd.client.sealDisk("a1", blockd.layer());
  await same(model, a1);
  await blockd.end("SIGKILL");
  await blockd.start();
  await blockd.until(async () => (await blockd.client.listDisks()).length === 3);
  await Promise.all([same(model, a1), same(a.raw, a2), same(b.raw, b1)]);
  assert.ok(statSync(cache).size <= CACHE_MIB * MIB);
});

test("what fits the cache is served again without the store, after a restart too", async () => {
  await using blockd = await TestBlockd.start(["--cache-mib", String(CACHE_MIB)]);
  const { raw, layer } = await published(blockd, "c", 8);
  const spec = blockd.spec("c1", 8 * MIB, [layer]);
  await blockd.client.createDisk(spec);
  await same(raw, uri(spec));
  await server.down();
  try {
    await same(raw, uri(spec));
    await blockd.end("SIGKILL");
    await blockd.start();
    await blockd.until(async () => (await blockd.client.listDisks()).length === 1);
    await same(raw, uri(spec));
    await blockd.client.closeDisk("c1", { deleteUpper: true });
    const again = blockd.spec("c2", 8 * MIB, [layer]);
    await blockd.client.createDisk(again);
    await same(raw, uri(again));
  } finally {
    await server.up();
  }
});

test("a store that is away is an I/O error to the guest after a deadline, never zeros; back, it is read", async () => {
  await using blockd = await TestBlockd.start(["--cache-mib", String(CACHE_MIB), "--load-ms", "1500"]);
  const { raw, layer } = await published(blockd, "d", 12);
  const spec = blockd.spec("d1", 12 * MIB, [layer]);
  await blockd.client.createDisk(spec);
  server.pause();
  try {
    const { stdout } = await run("sh", [
      "-c",
      'qemu-io -f raw -c "read -P 0 4M 64k" "$1" 2>&1 || true',
      "sh",
      uri(spec),
    ]);
    assert.match(stdout, /Input\/output error/);
  } finally {
    server.goOn();
  }
  await same(raw, uri(spec));
});

test("a store that pauses for less than the deadline is only slow", async () => {
  await using blockd = await TestBlockd.start(["--cache-mib", String(CACHE_MIB)]);
  const { raw, layer } = await published(blockd, "e", 12);
  const spec = blockd.spec("e1", 12 * MIB, [layer]);
  await blockd.client.createDisk(spec);
  server.pause();
  const reading = same(raw, uri(spec));
  await blockd.until(async () => ((await blockd.cache())?.requests ?? 0) > 2);
  server.goOn();
  await reading;
});

test("wrong bytes of a store never reach a guest, and its disk is read again when they are right", async () => {
  await using blockd = await TestBlockd.start(["--cache-mib", String(CACHE_MIB)]);
  const { raw, layer } = await published(blockd, "f", 10);
  const { key } = JSON.parse(readFileSync(layer.path, "utf8")) as { key: string };
  const object = server.file(`layers/${key}`);
  const good = readFileSync(object);
  const bad = Buffer.from(good);
  bad.fill(0, 4 * MIB, 4 * MIB + 100);
  const spec = blockd.spec("f1", 10 * MIB, [layer]);
  await blockd.client.createDisk(spec);
  writeFileSync(object, bad);
  await assert.rejects(same(raw, uri(spec)));
  writeFileSync(object, good);
  await same(raw, uri(spec));
  writeFileSync(layer.path, readFileSync(layer.path, "utf8").slice(0, 200));
  await blockd.client.closeDisk("f1", { deleteUpper: true });
  await assert.rejects(blockd.client.createDisk(blockd.spec("f2", 10 * MIB, [layer])), { code: "CORRUPT" });
});

test("a disk whose store is away when blockd starts is opened once it is back", async () => {
  await using blockd = await TestBlockd.start(["--cache-mib", String(CACHE_MIB), "--load-ms", "500"]);
  const { raw, layer } = await published(blockd, "g", 30);
  const spec = blockd.spec("g1", 30 * MIB, [layer]);
  await blockd.client.createDisk(spec);
  // Reading all of it drives the index out of the cache.
  await same(raw, uri(spec));
  await blockd.end("SIGKILL");
  await server.down();
  await blockd.start();
  await server.up();
  await blockd.until(async () => (await blockd.client.listDisks()).length === 1);
  await same(raw, uri(spec));
});
