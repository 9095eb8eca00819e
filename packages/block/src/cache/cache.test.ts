import assert from "node:assert/strict";
import { createHash } from "node:crypto";
import { readFileSync, statSync, truncateSync, writeFileSync } from "node:fs";
import { join } from "node:path";
import { test } from "node:test";
import { AenvError } from "@aenv/base";
import fc from "fast-check";
import { withDir } from "../../test/content.ts";
import type { BlobStore } from "../store/port.ts";
import { BlobCache, type RemoteBlob } from "./cache.ts";
import { CachedSource, SLOT_BYTES } from "./slots.ts";

const MIB = 1024 * 1024;
const code = (wanted: string) => (e: unknown) => e instanceof AenvError && e.code === wanted;

function noise(bytes: number, seed: number): Buffer {
  const b = Buffer.alloc(bytes);
  let x = seed;
  for (let i = 0; i + 4 <= bytes; i += 4) b.writeUInt32LE((x = (x * 48_271) % 2_147_483_647), i);
  return b;
}

/** A store of one object whose reads can be held back, refused or falsified. */
class TestStore implements BlobStore {
  readonly name = "test:";
  readonly data: Buffer;
  readonly asked: { position: number; length: number }[] = [];
  gate: Promise<void> | undefined;
  away = false;
  lie = false;

  constructor(data: Buffer) {
    this.data = data;
  }

  async read(_key: string, position: number, length: number, signal?: AbortSignal): Promise<Buffer> {
    this.asked.push({ position, length });
    await this.gate;
    signal?.throwIfAborted();
    if (this.away) throw new AenvError("UNAVAILABLE", "the store is away");
    const part = Buffer.from(this.data.subarray(position, position + length));
    if (this.lie) part.writeUInt8(part.readUInt8(length >> 1) ^ 1, length >> 1);
    return part;
  }

  put(): Promise<void> {
    return Promise.reject(new Error("not for this test"));
  }
  stat(): Promise<undefined> {
    return Promise.resolve(undefined);
  }
  async *list(): AsyncGenerator<never> {}
  delete(): Promise<void> {
    return Promise.resolve();
  }
  sweep(): Promise<number> {
    return Promise.resolve(0);
  }
  [Symbol.dispose](): void {}

  blob(): RemoteBlob {
    const sha = (b: Buffer): string => createHash("sha256").update(b).digest("hex");
    const pieces: string[] = [];
    for (let at = 0; at < this.data.length; at += SLOT_BYTES) pieces.push(sha(this.data.subarray(at, at + SLOT_BYTES)));
    return { store: this, key: "blobs/x", sha256: sha(this.data), bytes: this.data.length, pieces };
  }
}

const openCache = (dir: string, loadMs?: number): BlobCache =>
  new BlobCache({ dir, bytes: 16 * MIB, ...(loadMs === undefined ? {} : { loadMs }) });

function sourceOf(cache: BlobCache, store: TestStore): CachedSource {
  return new CachedSource(cache.shared, cache.attach(store.blob()), (b, from, to) => cache.load(b, from, to));
}

async function readThrough(source: CachedSource, position: number, length: number): Promise<Buffer> {
  const into = Buffer.alloc(length + 2, 0xee);
  if (!source.read(into, 1, length, position)) await source.fetch(into, 1, length, position);
  assert.ok(into[0] === 0xee && into[length + 1] === 0xee, "a read wrote outside of its range");
  return into.subarray(1, length + 1);
}

test(
  "whatever is read of blobs that are larger than the cache is right, and the cache stays within its bound",
  withDir(async (dir) => {
    const stores = [noise(11 * MIB + 77, 1), noise(20 * MIB, 2), noise(900, 3)].map((d) => new TestStore(d));
    const cacheDir = join(dir, "cache");
    let cache = openCache(cacheDir);
    let sources = stores.map((s) => sourceOf(cache, s));
    const range = fc.tuple(
      fc.nat(2),
      fc.double({ min: 0, max: 1, noNaN: true }),
      fc.oneof(fc.integer({ min: 1, max: 9000 }), fc.integer({ min: 1, max: 7 * MIB })),
    );
    await fc.assert(
      fc.asyncProperty(fc.array(range, { minLength: 1, maxLength: 24 }), fc.boolean(), async (ranges, restart) => {
        await Promise.all(
          ranges.map(async ([i, where, most]) => {
            const { data } = stores[i] as TestStore;
            const position = Math.floor(where * (data.length - 1));
            const length = Math.min(most, data.length - position);
            const found = await readThrough(sources[i] as CachedSource, position, length);
            assert.ok(found.equals(data.subarray(position, position + length)));
          }),
        );
        assert.ok(statSync(join(cacheDir, "slots.data")).size <= 16 * MIB);
        assert.ok(cache.stats.usedSlots <= 16);
        if (restart) {
          cache[Symbol.dispose]();
          cache = openCache(cacheDir);
          sources = stores.map((s) => sourceOf(cache, s));
        }
      }),
      { numRuns: 40 },
    );
    cache[Symbol.dispose]();
    for (const { asked, data } of stores) {
      for (const { position, length } of asked) {
        assert.ok(length >= MIB || position + length === data.length, "less than a MiB was asked for");
      }
    }
  }),
);

test(
  "many readers of the same range make one request, a longer range makes one longer request",
  withDir(async (dir) => {
    const store = new TestStore(noise(12 * MIB, 1));
    using cache = openCache(dir);
    const source = sourceOf(cache, store);
    const gate = Promise.withResolvers<void>();
    store.gate = gate.promise;
    const reads = Array.from({ length: 2 }, (_, i) => readThrough(source, 1000 * i, 5000));
    gate.resolve();
    await Promise.all(reads);
    assert.deepEqual(store.asked, [{ position: 0, length: MIB }]);
    await readThrough(source, 4 * MIB, 4 * MIB);
    assert.deepEqual(store.asked[1], { position: 4 * MIB, length: 4 * MIB });
    await readThrough(source, 0, 8 * MIB);
    assert.deepEqual(store.asked.slice(2), [{ position: MIB, length: 3 * MIB }]);
    await readThrough(source, 0, 8 * MIB);
    assert.equal(store.asked.length, 3);
  }),
);

test(
  "a store that is away or hangs gives an error in time and never zeros, and is read again when it is back",
  withDir(async (dir) => {
    const store = new TestStore(noise(2 * MIB, 1));
    using cache = openCache(dir, 300);
    const source = sourceOf(cache, store);
    store.away = true;
    await assert.rejects(readThrough(source, 0, 4096), code("UNAVAILABLE"));
    store.away = false;
    const gate = Promise.withResolvers<void>();
    store.gate = gate.promise;
    await assert.rejects(readThrough(source, 0, 4096), code("DEADLINE"));
    gate.resolve();
    store.gate = undefined;
    assert.ok((await readThrough(source, 0, 4096)).equals(store.data.subarray(0, 4096)));
  }),
);

test(
  "a reader that gives up takes nothing from the others",
  withDir(async (dir) => {
    const store = new TestStore(noise(2 * MIB, 1));
    using cache = openCache(dir);
    const blob = cache.attach(store.blob());
    const gate = Promise.withResolvers<void>();
    store.gate = gate.promise;
    const stop = new AbortController();
    const first = cache.load(blob.blob, 0, 1, stop.signal);
    const second = cache.load(blob.blob, 0, 1);
    stop.abort(new DOMException("enough", "AbortError"));
    await assert.rejects(first, code("CANCELLED"));
    gate.resolve();
    (await second)();
    assert.ok(blob.slots[0] !== 0);
  }),
);

test(
  "bytes that are not what was published are refused, and not kept",
  withDir(async (dir) => {
    const store = new TestStore(noise(3 * MIB, 1));
    using cache = openCache(dir);
    const source = sourceOf(cache, store);
    store.lie = true;
    await assert.rejects(readThrough(source, 0, 3 * MIB), code("CORRUPT"));
    store.lie = false;
    assert.ok((await readThrough(source, 0, 3 * MIB)).equals(store.data));
    assert.throws(() => cache.attach({ ...store.blob(), sha256: "0".repeat(64), pieces: [] }), code("CORRUPT"));
  }),
);

test(
  "after a restart what is here is served without the store",
  withDir(async (dir) => {
    const store = new TestStore(noise(5 * MIB + 5, 1));
    {
      using cache = openCache(dir);
      await readThrough(sourceOf(cache, store), 0, store.data.length);
    }
    store.away = true;
    using cache = openCache(dir);
    assert.ok((await readThrough(sourceOf(cache, store), 0, store.data.length)).equals(store.data));
    assert.equal(cache.stats.requests, 0);
  }),
);

test(
  "whatever a crash or a loss of power did to the files of the cache, nothing wrong is read from it",
  withDir(async (dir) => {
    const store = new TestStore(noise(6 * MIB, 1));
    const [data, index] = [join(dir, "slots.data"), join(dir, "slots.index")];
    {
      using cache = openCache(dir);
      await readThrough(sourceOf(cache, store), 0, store.data.length);
    }
    const good = { data: readFileSync(data), index: readFileSync(index) };
    const damage = fc.record({
      file: fc.constantFrom(data, index),
      kind: fc.constantFrom("flip", "zero", "cut"),
      where: fc.double({ min: 0, max: 1, noNaN: true }),
      byte: fc.integer({ min: 1, max: 255 }),
    });
    await fc.assert(
      fc.asyncProperty(fc.array(damage, { minLength: 1, maxLength: 4 }), async (list) => {
        writeFileSync(data, good.data);
        writeFileSync(index, good.index);
        for (const { file, kind, where, byte } of list) {
          const b = readFileSync(file);
          const at = Math.floor(where * (b.length - 1));
          if (b.length === 0) continue;
          if (kind === "cut") truncateSync(file, at);
          else {
            if (kind === "flip") b.writeUInt8(b.readUInt8(at) ^ byte, at);
            else b.fill(0, at, Math.min(at + 8192, b.length));
            writeFileSync(file, b);
          }
        }
        using cache = openCache(dir);
        assert.ok((await readThrough(sourceOf(cache, store), 0, store.data.length)).equals(store.data));
      }),
      { numRuns: 30 },
    );
  }),
);

test(
  "what is held is not evicted, and who needs room waits for it",
  withDir(async (dir) => {
    const small = new TestStore(noise(4 * MIB, 1));
    const large = new TestStore(noise(40 * MIB, 2));
    using cache = openCache(dir);
    const held = cache.attach(small.blob());
    const release = await cache.load(held.blob, 0, 4);
    const source = sourceOf(cache, large);
    for (let at = 0; at < large.data.length; at += 4 * MIB) await readThrough(source, at, 4 * MIB);
    assert.ok([0, 1, 2, 3].every((p) => held.slots[p] !== 0));
    release();
    for (let at = 0; at < large.data.length; at += 4 * MIB) await readThrough(source, at, 4 * MIB);
    assert.ok(
      [0, 1, 2, 3].every((p) => held.slots[p] === 0),
      "the longest unused went",
    );
    assert.equal(cache.stats.usedSlots, 16);
  }),
);

test(
  "what was wanted is told in its order, and can be fetched ahead",
  withDir(async (dir) => {
    const store = new TestStore(noise(9 * MIB, 1));
    using cache = openCache(dir);
    const blob = cache.attach(store.blob());
    const source = new CachedSource(cache.shared, blob, (b, from, to) => cache.load(b, from, to));
    for (const at of [7, 2, 7, 5]) await readThrough(source, at * MIB + 5, 10);
    const wanted = cache.wanted(blob.blob);
    assert.deepEqual(wanted, [7, 2, 5]);
    cache.detach(blob.blob);
    using other = openCache(join(dir, "other"));
    const again = other.attach(store.blob());
    assert.equal(await other.prefetch(again.blob, [...wanted, 99, -1]), 3);
    assert.ok([7, 2, 5].every((p) => again.slots[p] !== 0));
    store.away = true;
    assert.equal(await other.prefetch(again.blob, [0, 1]), 0);
  }),
);
