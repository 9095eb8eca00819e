import assert from "node:assert/strict";
import { randomBytes } from "node:crypto";
import { existsSync, lstatSync, readdirSync, readFileSync, truncateSync, writeFileSync } from "node:fs";
import { basename, dirname, join } from "node:path";
import { test } from "node:test";
import { AenvError } from "@aenv/base";
import { mergeLayers } from "@aenv/block";
import { run } from "@aenv/host";
import { TestBlockd, uri } from "../test/harness.ts";

const MIB = 1024 * 1024;

function image(sizeMib: number): Buffer {
  const b = Buffer.alloc(sizeMib * MIB);
  randomBytes(3 * MIB).copy(b, MIB);
  randomBytes(5000).copy(b, 7 * MIB + 123);
  return b;
}

test("a raw image imported as a layer reads the same over NBD, by nbdinfo, nbdcopy and qemu-img", async () => {
  await using blockd = await TestBlockd.start();
  const raw = blockd.path("base.raw");
  writeFileSync(raw, image(16));
  const base = blockd.layer();
  const info = await blockd.client.importRaw(raw, base);
  assert.ok(info.bytes < 4 * MIB, `zero blocks are not stored: ${info.bytes}`);
  const spec = blockd.spec("d1", 16 * MIB, [base]);
  await blockd.client.createDisk(spec);
  const about = JSON.parse((await run("nbdinfo", ["--json", uri(spec)])).stdout) as {
    exports: Record<string, unknown>[];
  };
  assert.equal(about.exports[0]?.["export-size"], 16 * MIB);
  await run("qemu-img", ["compare", "-f", "raw", "-F", "raw", raw, uri(spec)]);
  await run("nbdcopy", [uri(spec), blockd.path("out.raw")]);
  assert.ok(readFileSync(blockd.path("out.raw")).equals(readFileSync(raw)));
});

test("after writes, trims, seals and merges, qemu-img and nbdcopy read what the same commands made of a plain file", async () => {
  await using blockd = await TestBlockd.start();
  const size = 16 * MIB;
  const raw = blockd.path("model.raw");
  writeFileSync(raw, image(16));
  const base = blockd.layer();
  await blockd.client.importRaw(raw, base);
  const spec = blockd.spec("d1", size, [base]);
  await blockd.client.createDisk(spec);
  const layers = [base];
  let x = 4711;
  const random = (below: number): number => (x = (x * 48_271) % 2_147_483_647) % below;
  for (let round = 0; round < 4; round++) {
    const commands: string[] = [];
    for (let i = 0; i < 25; i++) {
      const at = random(size / 512) * 512;
      const length = Math.min((1 + random(i % 3 === 0 ? 2048 : 40)) * 512, size - at);
      const kind = random(4);
      // A trimmed range may read as before or as zeros; zeros written with the right to trim read as zeros.
      commands.push(
        "-c",
        kind > 1 ? `write -P ${1 + random(255)} ${at} ${length}` : `write -z${kind ? "u" : ""} ${at} ${length}`,
      );
    }
    await run("qemu-io", ["-f", "raw", ...commands, uri(spec)]);
    await run("qemu-io", ["-f", "raw", ...commands, raw]);
    await run("qemu-img", ["compare", "-f", "raw", "-F", "raw", raw, uri(spec)]);
    const layer = blockd.layer();
    await blockd.client.sealDisk("d1", layer);
    layers.push(layer);
  }
  await run("qemu-img", ["compare", "-f", "raw", "-F", "raw", raw, uri(spec)]);
  const paths = layers.map((l) => l.path);
  const [top, whole] = [blockd.layer(), blockd.layer()];
  await mergeLayers(paths.slice(1), top);
  await mergeLayers(paths, whole, { base: true, compression: "lz4" });
  for (const [name, stack] of [["merged", [base, top]] as const, ["compressed", [whole]] as const]) {
    const other = blockd.spec(name, size, [...stack]);
    await blockd.client.createDisk(other);
    await run("qemu-img", ["compare", "-f", "raw", "-F", "raw", raw, uri(other)]);
    await run("nbdcopy", [uri(other), blockd.path(`${name}.raw`)]);
    assert.ok(readFileSync(blockd.path(`${name}.raw`)).equals(readFileSync(raw)), name);
  }
});

test("what was written survives kill -9, a seal and another kill -9", async () => {
  await using blockd = await TestBlockd.start();
  const raw = blockd.path("data.raw");
  writeFileSync(raw, image(16));
  const spec = blockd.spec("d1", 16 * MIB);
  await blockd.client.createDisk(spec);
  const { epoch } = await blockd.client.ping();
  await run("nbdcopy", ["--flush", raw, uri(spec)]);
  await blockd.end("SIGKILL");
  await blockd.start();
  assert.notEqual((await blockd.client.ping()).epoch, epoch);
  await run("qemu-img", ["compare", "-f", "raw", "-F", "raw", raw, uri(spec)]);
  const target = blockd.layer();
  const sealed = await blockd.client.sealDisk("d1", target);
  assert.deepEqual(await blockd.client.sealDisk("d1", target), sealed, "the same seal again is the same answer");
  await run("qemu-img", ["compare", "-f", "raw", "-F", "raw", raw, uri(spec)]);
  await blockd.end("SIGKILL");
  await blockd.start();
  await run("qemu-img", ["compare", "-f", "raw", "-F", "raw", raw, uri(spec)]);
  assert.deepEqual((await blockd.client.listDisks())[0]?.layers, [target]);
  assert.equal(await blockd.end("SIGTERM"), 0);
});

test("the disk's socket belongs to the VM's user with mode 0600 and replaces a stale one", async () => {
  await using blockd = await TestBlockd.start();
  const spec = { ...blockd.spec("d1", 16 * MIB), socketUid: 200001, socketGid: 200001 };
  writeFileSync(spec.socketPath, "stale");
  await blockd.client.createDisk(spec);
  const stat = lstatSync(spec.socketPath);
  assert.ok(stat.isSocket());
  assert.equal(stat.mode & 0o777, 0o600);
  assert.equal(stat.uid, 200001);
  await blockd.client.createDisk(spec);
  await assert.rejects(
    blockd.client.createDisk({ ...spec, socketUid: 0 }),
    (e) => e instanceof AenvError && e.code === "CONFLICT",
  );
  await blockd.client.closeDisk("d1", { deleteUpper: true });
  await blockd.client.closeDisk("d1", { deleteUpper: true });
  assert.deepEqual(await blockd.client.listDisks(), []);
  assert.throws(() => lstatSync(spec.socketPath));
  assert.throws(() => lstatSync(spec.upperDir));
});

test("a disk that nothing was written to gets other layers beneath it, which survive kill -9; one that was written keeps its own", async () => {
  await using blockd = await TestBlockd.start();
  const layers = [blockd.layer(), blockd.layer()];
  for (const [i, layer] of layers.entries()) {
    writeFileSync(blockd.path(`raw${i}`), image(16));
    await blockd.client.importRaw(blockd.path(`raw${i}`), layer);
  }
  const [first = blockd.layer(), second = blockd.layer()] = layers;
  const spec = blockd.spec("d1", 16 * MIB, [first]);
  const is = async (raw: string): Promise<void> =>
    void (await run("qemu-img", ["compare", "-f", "raw", "-F", "raw", blockd.path(raw), uri(spec)]));
  await blockd.client.createDisk(spec);
  await is("raw0");
  await assert.rejects(blockd.client.restackDisk("d1", [second], [first, second]), { code: "CONFLICT" });
  await blockd.client.restackDisk("d1", [first], [second]);
  await is("raw1");
  await blockd.end("SIGKILL");
  await blockd.start();
  await is("raw1");
  await run("nbdcopy", [blockd.path("raw0"), uri(spec)]);
  await assert.rejects(blockd.client.restackDisk("d1", [second], [first]), { code: "CONFLICT" });
  await is("raw0");
  assert.deepEqual((await blockd.client.listDisks())[0]?.layers, [second]);
  await assert.rejects(blockd.client.restackDisk("no", [], [first]), { code: "NOT_FOUND" });
});

test("layers beneath a written disk are merged and exchanged: it reads the same, before and after kill -9 and a seal", async () => {
  await using blockd = await TestBlockd.start();
  const spec = blockd.spec("d1", 16 * MIB);
  await blockd.client.createDisk(spec);
  const is = async (raw: string): Promise<void> =>
    void (await run("qemu-img", ["compare", "-f", "raw", "-F", "raw", blockd.path(raw), uri(spec)]));
  const sealed = [];
  for (let i = 0; i < 4; i++) {
    const content = image(16);
    writeFileSync(blockd.path("raw"), content);
    await run("nbdcopy", [blockd.path("raw"), uri(spec)]);
    if (i === 3) break;
    const target = blockd.layer();
    await blockd.client.sealDisk("d1", target);
    sealed.push(target);
  }
  const [bottom, ...rest] = sealed;
  assert.ok(bottom);
  const merged = blockd.layer();
  await blockd.client.mergeLayers(rest, merged);
  await blockd.client.restackDisk("d1", sealed, [bottom, merged], { same: true });
  await is("raw");
  await blockd.end("SIGKILL");
  await blockd.start();
  await is("raw");
  const top = blockd.layer();
  await blockd.client.sealDisk("d1", top);
  await is("raw");
  assert.deepEqual((await blockd.client.listDisks())[0]?.layers, [bottom, merged, top]);
});

test("an import whose caller goes away is given up and leaves nothing", async () => {
  await using blockd = await TestBlockd.start();
  const raw = blockd.path("large.raw");
  writeFileSync(raw, "");
  // Large enough not to be done before the caller is gone: what is read is zeros.
  truncateSync(raw, 64 * 1024 * MIB);
  const base = blockd.layer();
  const caller = new AbortController();
  const importing = blockd.client.importRaw(raw, base, caller.signal);
  const folder = dirname(base.path);
  const names = (): string[] =>
    (existsSync(folder) ? readdirSync(folder) : []).filter((n) => n.includes(basename(base.path)));
  while (names().length === 0) await new Promise((resolve) => setTimeout(resolve, 5));
  caller.abort();
  await assert.rejects(importing);
  while (names().length > 0) await new Promise((resolve) => setTimeout(resolve, 5));
});

test("who asks for the disks while one is sealed is told of the layer, though the caller of the seal is gone", async () => {
  await using blockd = await TestBlockd.start();
  const spec = blockd.spec("d1", 64 * MIB);
  await blockd.client.createDisk(spec);
  for (let round = 0; round < 5; round++) {
    const before = (await blockd.client.listDisks())[0]?.layers ?? [];
    const raw = blockd.path(`data-${round}.raw`);
    writeFileSync(raw, randomBytes(64 * MIB));
    await run("nbdcopy", [raw, uri(spec)]);
    const target = blockd.layer();
    const caller = new AbortController();
    const sealing = blockd.client.sealDisk("d1", target, caller.signal).catch(() => {});
    // blockd has begun: the record says so.
    while (!readFileSync(join(blockd.dir, "state/d1.json"), "utf8").includes(target.id))
      await new Promise((resolve) => setImmediate(resolve));
    caller.abort();
    assert.deepEqual((await blockd.client.listDisks())[0]?.layers, [...before, target]);
    await sealing;
  }
});
