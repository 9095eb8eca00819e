import assert from "node:assert/strict";
import { createReadStream, createWriteStream, readdirSync, readFileSync } from "node:fs";
import { mkdir, readFile, rm, stat, writeFile } from "node:fs/promises";
import { join } from "node:path";
import { PassThrough, Readable } from "node:stream";
import { test } from "node:test";
import { AenvError, mib } from "@aenv/base";
import { readStub } from "@aenv/block";
import { type Life, MACHINE, until, World } from "./testing.ts";
import type { Transfer } from "./transfers.ts";

const signal = new AbortController().signal;
const code = (wanted: string) => (e: unknown) => e instanceof AenvError && e.code === wanted;

/** A template whose kernel and initramfs are files. */
async function addTemplate(world: World, life: Life, name: string): Promise<void> {
  const machine = { ...MACHINE, kernel: join(world.home, "kernel"), initrd: join(world.home, "initrd") };
  await writeFile(machine.kernel, "a kernel");
  await writeFile(machine.initrd, "an initramfs");
  const raw = join(world.home, "base.raw");
  await writeFile(raw, "image");
  const baseLayer = await life.engine.importLayer(raw, signal);
  await life.engine.buildTemplate({ name, baseLayer, sizeBytes: mib(64), machine }, signal);
}

async function over(life: Life, t: Transfer): Promise<Transfer> {
  await until(() => ["done", "failed"].includes(life.engine.exchange.transfer(t.id).state), "the transfer is over");
  return life.engine.exchange.transfer(t.id);
}

async function published(world: World, life: Life, name: string): Promise<string> {
  const t = await over(life, await life.engine.exchange.publish(name));
  assert.equal(t.state, "done", JSON.stringify(t));
  assert.ok(t.totalBytes > 0 && t.doneBytes === t.totalBytes);
  assert.deepEqual(readdirSync(join(world.home, "exchange")), [], "nothing is left on the way");
  return t.snapshotId ?? "";
}

test("what one node published another fetches and starts; layers stay in the store, and go on from there to a third", async () => {
  await using one = await World.make();
  await using two = await World.make();
  await using three = await World.make();
  const store = join(one.home, "store");
  const config = { store };
  const [a, b, c] = [await one.start({ config }), await two.start({ config }), await three.start()];
  await addTemplate(one, a, "tools");
  const id = await published(one, a, "tools");
  const listed = await b.engine.exchange.published(signal);
  assert.deepEqual(
    listed.map((s) => [s.snapshotId, s.name, s.here]),
    [[id, "tools", false]],
  );
  const fetched = await over(b, await b.engine.exchange.fetch(id, undefined, signal));
  assert.equal(fetched.state, "done", JSON.stringify(fetched));
  const source = a.state.snapshots.get(a.engine.templates.get("tools").snapshotId);
  const copy = b.state.snapshots.get(b.engine.templates.get("tools").snapshotId);
  assert.ok(source && copy);
  assert.deepEqual(
    copy.layers.map((l) => l.id),
    source.layers.map((l) => l.id),
  );
  for (const l of copy.layers) assert.equal(readStub(l.path)?.store, store);
  assert.equal(await readFile(copy.machine.kernel, "utf8"), "a kernel");
  for (const [i, m] of copy.memory.entries()) {
    assert.ok(readFileSync(m.path).equals(readFileSync(source.memory[i]?.path ?? "")));
    assert.equal((await stat(m.path)).mode & 0o777, 0o440);
  }
  assert.equal((await stat(copy.devicePath)).mode & 0o777, 0o600);
  assert.ok(readFileSync(copy.devicePath).equals(readFileSync(source.devicePath)));
  await b.engine.create({ template: "tools", timeoutMs: 60_000 }, signal);
  assert.equal((await b.engine.exchange.published(signal))[0]?.here, true);
  // An archive holds everything, also what the node itself has in the store only.
  const archive = join(two.home, "tools.tar");
  await b.engine.exchange.exportArchive("tools", createWriteStream(archive), signal);
  const view = await c.engine.exchange.importArchive(createReadStream(archive), "moved", signal);
  assert.equal(view.name, "moved");
  const third = c.state.snapshots.get(view.snapshotId);
  assert.ok(third);
  for (const [i, l] of third.layers.entries()) {
    assert.ok(readFileSync(l.path).equals(readFileSync(source.layers[i]?.path ?? "")));
  }
  await c.engine.create({ template: "moved", timeoutMs: 60_000 }, signal);
  assert.deepEqual(readdirSync(join(three.home, "exchange")), []);
});

test("a snapshot of a secured sandbox starts on another node, whose tokens are others; what it made goes on from there", async () => {
  await using one = await World.make();
  await using two = await World.make();
  const config = { store: join(one.home, "store") };
  const [a, b] = [await one.start({ config }), await two.start({ config })];
  await addTemplate(one, a, "tools");
  const { sandboxId } = await a.engine.create({ template: "tools", timeoutMs: 60_000, secure: true }, signal);
  await a.engine.snapshot(sandboxId, { name: "kept" }, signal);
  const token = one.inits.at(-1)?.body.accessToken;
  assert.ok(token !== undefined && token !== "");
  const id = await published(one, a, "kept");
  assert.equal((await over(b, await b.engine.exchange.fetch(id, undefined, signal))).state, "done");
  const launched = two.inits.length;
  await b.engine.create({ template: "kept", timeoutMs: 60_000, secure: true }, signal);
  assert.equal(two.inits[launched]?.currentToken, token);
  assert.equal(b.state.getSetting(`captured-token ${id}`), token);
  await b.engine.templates.delete("kept");
  for (const s of b.engine.list().items) await b.engine.kill(s.sandboxId);
  await until(() => b.state.getSetting(`captured-token ${id}`) === undefined, "nothing of it is kept");
});

test("a fetch that breaks leaves no template, and what it left goes", async () => {
  await using one = await World.make();
  await using two = await World.make();
  const config = { store: join(one.home, "store") };
  const [a, b] = [await one.start({ config }), await two.start({ config })];
  await addTemplate(one, a, "tools");
  const before = await two.inventory();
  const id = await published(one, a, "tools");
  const manifest = JSON.parse(await readFile(join(config.store, `snapshots/${id}.json`), "utf8")) as {
    blobs: { name: string; key: string }[];
  };
  const device = manifest.blobs.find((x) => x.name === "device");
  assert.ok(device);
  await writeFile(join(config.store, device.key), "something else");
  const t = await over(b, await b.engine.exchange.fetch(id, undefined, signal));
  assert.equal(t.state, "failed");
  assert.equal(t.error?.code, "CORRUPT");
  assert.equal(b.engine.templates.resolve("tools"), undefined);
  await b.end();
  const again = await two.start({ config });
  assert.equal(again.engine.exchange.transfer(t.id).state, "failed", "it is remembered");
  const after = await two.inventory();
  assert.deepEqual({ ...after, layers: [] }, { ...before, layers: [] });
});

test("a publication that the server's end cut off is done by the next one", async () => {
  await using one = await World.make();
  const store = join(one.home, "store");
  // A file in the place of the folder: the store is away.
  await writeFile(store, "");
  const a = await one.start({ config: { store } });
  await addTemplate(one, a, "tools");
  const t = await a.engine.exchange.publish("tools");
  await until(() => a.engine.exchange.transfer(t.id).state !== "queued", "it was tried");
  const stateNow = a.engine.exchange.transfer(t.id).state;
  await a.end();
  await rm(store, { force: true });
  await mkdir(store);
  const path = join(one.home, "transfers", `${t.id}.json`);
  const record = JSON.parse(await readFile(path, "utf8")) as Transfer;
  await writeFile(path, JSON.stringify({ ...record, state: stateNow === "failed" ? "running" : record.state }));
  const b = await one.start({ config: { store } });
  assert.equal((await over(b, t)).state, "done");
  assert.equal((await b.engine.exchange.published(signal)).length, 1);
});

test("the store is cared for: what was removed is collected, and a dry run only tells", async () => {
  await using one = await World.make();
  const a = await one.start({ config: { store: join(one.home, "store") } });
  await addTemplate(one, a, "tools");
  const id = await published(one, a, "tools");
  await a.engine.exchange.unpublish(id, signal);
  assert.deepEqual(await a.engine.exchange.published(signal), []);
  await assert.rejects(a.engine.exchange.unpublish(id, signal), code("NOT_FOUND"));
  const dry = await a.engine.exchange.collect({ dryRun: true, graceMs: 0 }, signal);
  assert.ok(dry.doomed.length > 0 && dry.deleted.length === 0);
  await a.engine.exchange.collect({ dryRun: false, graceMs: 0 }, signal);
  const second = await a.engine.exchange.collect({ dryRun: false, graceMs: 0 }, signal);
  assert.equal(second.deleted.length, dry.doomed.length);
  assert.deepEqual(readdirSync(join(one.home, "store", "blobs")), []);
});

test("names that are taken or wrong, unknown snapshots and nodes without a store are refused", async () => {
  await using one = await World.make();
  const config = { store: join(one.home, "store") };
  const a = await one.start({ config });
  await addTemplate(one, a, "tools");
  await addTemplate(one, a, "other");
  const id = await published(one, a, "tools");
  const failed = async (name: string): Promise<string | undefined> =>
    (await over(a, await a.engine.exchange.fetch(id, name, signal))).error?.code;
  assert.equal(await failed("other"), "CONFLICT");
  assert.equal(await failed("No Name"), "INVALID_ARGUMENT");
  await assert.rejects(a.engine.exchange.fetch("s0000000000000000", undefined, signal), code("NOT_FOUND"));
  await assert.rejects(a.engine.exchange.publish("nothing"), code("NOT_FOUND"));
  assert.throws(() => a.engine.exchange.transfer("x"), code("NOT_FOUND"));
  await using two = await World.make();
  const b = await two.start();
  await assert.rejects(b.engine.exchange.publish("tools"), code("UNAVAILABLE"));
  await assert.rejects(b.engine.exchange.published(signal), code("UNAVAILABLE"));
  await assert.rejects(
    b.engine.exchange.importArchive(Readable.from(["no archive"]), undefined, signal),
    code("INVALID_ARGUMENT"),
  );
  await assert.rejects(b.engine.exchange.exportArchive("nothing", new PassThrough(), signal), code("NOT_FOUND"));
});
