import assert from "node:assert/strict";
import { createHash, randomBytes } from "node:crypto";
import { closeSync, mkdtempSync, readFileSync, rmSync, statSync, truncateSync, writeFileSync } from "node:fs";
import { open } from "node:fs/promises";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { test } from "node:test";
import { AenvError, newLayerId } from "@aenv/base";
import fc from "fast-check";
import { type ExtentMap, ExtentBuilder, mergeStack, overlay, ZEROED } from "./extents.ts";
import { ENTRY_BYTES, type Entry, encodeHeader, HEADER_BYTES, putEntry, readEntry } from "./format.ts";
import { importRaw } from "./import.ts";
import { openLayer } from "./layer.ts";
import { LayerWriter } from "./layer-writer.ts";
import { fileSink } from "./sink.ts";

const VECTORS = join(import.meta.dirname, "../test/vectors");
const vector = (name: string): string => join(VECTORS, name);

function withDir<T>(fn: (dir: string) => T | Promise<T>): () => Promise<void> {
  return async () => {
    const dir = mkdtempSync(join(tmpdir(), "aenv-layer-"));
    try {
      await fn(dir);
    } finally {
      rmSync(dir, { recursive: true, force: true });
    }
  };
}

/** The whole virtual disk of a stack of layer files, bottom first. */
function content(paths: readonly string[]): Buffer {
  const layers = paths.map(openLayer);
  const size = layers.at(-1)?.header.virtualSize ?? 0;
  const out = Buffer.alloc(size);
  const map = mergeStack(layers.map((l) => l.extents));
  for (let i = 0; i < map.count; i++) {
    const file = map.file[i] as number;
    if (file === ZEROED) continue;
    const start = (map.start[i] as number) * 512;
    const end = (map.end[i] as number) * 512;
    const data = readFileSync((layers[file] as { path: string }).path);
    data.copy(out, start, (map.place[i] as number) * 512, (map.place[i] as number) * 512 + end - start);
  }
  for (const l of layers) closeSync(l.fd);
  return out;
}

/** The worked example of the format: 4096 x AA at byte 4096, 1536 x BB at byte 524288, in a disk of 1 MiB. */
function workedExample(): Buffer {
  const b = Buffer.alloc(1024 * 1024);
  b.fill(0xaa, 4096, 8192);
  b.fill(0xbb, 524288, 524288 + 1536);
  return b;
}

test(
  "our writer makes the worked example byte for byte as upstream does",
  withDir(async (dir) => {
    const path = join(dir, "layer");
    const file = await open(path, "w");
    const writer = new LayerWriter(fileSink(file), {
      virtualSize: 1024 * 1024,
      uuid: "11111111-2222-4333-8444-555555555555",
    });
    await writer.data(4096, Buffer.alloc(4096, 0xaa));
    await writer.data(524288, Buffer.alloc(1536, 0xbb));
    assert.deepEqual(await writer.finish(), { bytes: 17920, extents: 2 });
    await file.close();
    const ours = readFileSync(path);
    assert.ok(ours.equals(readFileSync(vector("commit.bin"))));
    assert.equal(
      createHash("sha256").update(ours).digest("hex"),
      "cd913436adee91b441372145d7e9b7c6cf13ba004b11a0d26e7fed47fe0ba6dc",
    );
  }),
);

test("layers of upstream read as they should: committed, sealed in place, and merged", () => {
  assert.ok(content([vector("commit.bin")]).equals(workedExample()));
  assert.ok(content([vector("rw.data")]).equals(workedExample()));
  assert.ok(content([vector("m0.bin"), vector("m1.bin")]).equals(content([vector("merged.bin")])));
  assert.notDeepEqual(content([vector("m0.bin")]), content([vector("merged.bin")]), "the upper layer matters");
});

test("entries of the description decode to what it says", () => {
  const e: Entry = { sector: 0, length: 0, place: 0, zeroed: false };
  assert.ok(readEntry(Buffer.from("0004000000000c001000000000000000", "hex"), 0, e));
  assert.deepEqual(e, { sector: 1024, length: 3, place: 16, zeroed: false });
  assert.ok(readEntry(Buffer.from("08000000000004001e00000000008000", "hex"), 0, e));
  assert.deepEqual(e, { sector: 8, length: 1, place: 30, zeroed: true });
  assert.ok(!readEntry(Buffer.from("ffffffffffff03000000000000000000", "hex"), 0, e));
});

test("entries survive encoding over the whole range of their fields", () => {
  fc.assert(
    fc.property(
      fc.record({
        sector: fc.nat(2 ** 50 - 2),
        length: fc.integer({ min: 1, max: 16383 }),
        place: fc.nat(Number.MAX_SAFE_INTEGER),
        zeroed: fc.boolean(),
      }),
      (entry) => {
        const b = Buffer.alloc(ENTRY_BYTES);
        putEntry(b, 0, entry.sector, entry.length, entry.place, entry.zeroed);
        const back: Entry = { sector: 0, length: 0, place: 0, zeroed: false };
        assert.ok(readEntry(b, 0, back));
        assert.deepEqual(back, { ...entry });
      },
    ),
  );
});

const mapOf = (extents: readonly (readonly [number, number, number, number])[]): ExtentMap => {
  const b = new ExtentBuilder(4);
  for (const [start, end, place, file] of extents) b.add(start, end, place, file);
  return b.build();
};

const anyMap = fc
  .array(fc.tuple(fc.integer({ min: 1, max: 9 }), fc.nat(4), fc.integer({ min: 8, max: 500 }), fc.boolean()), {
    maxLength: 12,
  })
  .map((parts) => {
    let at = 0;
    return mapOf(
      parts.map(([length, gap, place, zero]) => {
        const start = at + gap;
        at = start + length;
        return [start, at, place, zero ? ZEROED : 0] as const;
      }),
    );
  });

function perSector(map: ExtentMap): string[] {
  const out: string[] = [];
  for (let i = 0; i < map.count; i++) {
    for (let s = map.start[i] as number; s < (map.end[i] as number); s++) {
      const zero = map.file[i] === ZEROED;
      out[s] = zero ? "zero" : `${map.file[i]}:${(map.place[i] as number) + s - (map.start[i] as number)}`;
    }
  }
  return out;
}

test("merging a stack gives for each sector what the newest layer that has it says", () => {
  fc.assert(
    fc.property(fc.array(anyMap, { maxLength: 7 }), (maps) => {
      const expected: string[] = [];
      maps.forEach((m, layer) =>
        perSector(m).forEach((text, s) => {
          expected[s] = text.replace(/^0:/, `${layer}:`);
        }),
      );
      const merged = mergeStack(maps);
      assert.deepEqual(perSector(merged), expected);
      for (let i = 1; i < merged.count; i++) assert.ok((merged.end[i - 1] as number) <= (merged.start[i] as number));
      const folded = maps.reduce((below, m, layer) => overlay(below, m, layer), mapOf([]));
      assert.deepEqual(perSector(folded), expected);
    }),
  );
});

/** A sealed layer with this index, whatever it says. */
function layerWith(
  path: string,
  entries: [number, number, number, boolean][],
  patch?: (trailer: Buffer) => void,
): void {
  const index = Buffer.alloc(entries.length * ENTRY_BYTES);
  entries.forEach(([sector, length, place, zeroed], i) =>
    putEntry(index, i * ENTRY_BYTES, sector, length, place, zeroed),
  );
  const data = Buffer.alloc(64 * 512, 1);
  const indexOffset = HEADER_BYTES + data.length;
  const trailer = encodeHeader("trailer", { virtualSize: 2 ** 20, indexOffset, indexEntries: entries.length });
  patch?.(trailer);
  writeFileSync(path, Buffer.concat([encodeHeader("sealed-header", { virtualSize: 2 ** 20 }), data, index, trailer]));
}

test(
  "a damaged layer is refused with its name, what is wrong and what to do",
  withDir((dir) => {
    const path = join(dir, "bad.lsmt");
    const refused = (what: RegExp): void => {
      assert.throws(
        () => openLayer(path),
        (e) => {
          assert.ok(e instanceof AenvError);
          assert.equal(e.code, "CORRUPT");
          assert.match(e.message, what);
          assert.ok(e.message.includes(path) && e.hint.includes(path));
          return true;
        },
      );
    };
    layerWith(path, [[0, 8, 8, false]]);
    closeSync(openLayer(path).fd);
    const good = readFileSync(path);
    for (const size of [0, 100, 4096, 8191]) {
      truncateSync(path, size);
      refused(/too short/);
      writeFileSync(path, good);
    }
    truncateSync(path, good.length - 512);
    refused(/magic/);
    writeFileSync(path, Buffer.concat([good, Buffer.alloc(1)]));
    refused(/magic/);
    writeFileSync(path, Buffer.concat([Buffer.alloc(16), good.subarray(16)]));
    refused(/magic/);
    layerWith(path, [
      [8, 8, 8, false],
      [0, 8, 16, false],
    ]);
    refused(/unsorted/);
    layerWith(path, [
      [0, 8, 8, false],
      [7, 8, 16, false],
    ]);
    refused(/overlapping/);
    layerWith(path, [[0, 8, 65, false]]);
    refused(/outside/);
    layerWith(path, [[0, 8, 0, false]]);
    refused(/outside/);
    layerWith(path, [[0, 8, 0, true]]);
    refused(/outside/);
    layerWith(path, [[0, 8, 8, false]], (t) => t.writeBigUInt64LE(2n ** 40n, 40));
    refused(/too many/);
    layerWith(path, [[0, 8, 8, false]], (t) => t.writeBigUInt64LE(1000n, 40));
    refused(/does not fit/);
    layerWith(path, [[0, 8, 8, false]], (t) => t.writeBigUInt64LE(2n ** 63n, 32));
    refused(/impossible number/);
    layerWith(path, [[0, 8, 8, false]], (t) => t.writeUInt32LE(7, 28));
    refused(/trailer/);
    rmSync(path);
    assert.throws(
      () => openLayer(path),
      (e) => e instanceof AenvError && e.code === "NOT_FOUND",
    );
  }),
);

test(
  "random damage to a layer is refused or harmless, and never costs memory beyond the file",
  withDir((dir) => {
    const path = join(dir, "fuzz.lsmt");
    const seed = Number(process.env["LAYER_FUZZ_SEED"] ?? Date.now() % 2 ** 31);
    const rnd = fc.sample(fc.tuple(fc.nat(2 ** 31), fc.nat(255)), { numRuns: 1200, seed });
    layerWith(path, [
      [0, 8, 8, false],
      [8, 8, 16, true],
      [100, 40, 20, false],
    ]);
    const good = readFileSync(path);
    const trailerAt = good.length - HEADER_BYTES;
    for (let i = 0; i + 2 < rnd.length; i += 3) {
      const b = Buffer.from(good);
      for (const [at, byte] of rnd.slice(i, i + 3)) {
        const spots = [at % 256, trailerAt + (at % 160), trailerAt - 48 + (at % 48)];
        b[spots[at % 3] as number] = byte;
      }
      writeFileSync(path, b);
      try {
        const layer = openLayer(path);
        closeSync(layer.fd);
        for (let n = 0; n < layer.extents.count; n++) {
          const end =
            (layer.extents.place[n] as number) + (layer.extents.end[n] as number) - (layer.extents.start[n] as number);
          assert.ok(
            layer.extents.file[n] === ZEROED || end * 512 <= b.length,
            `seed ${seed}: data outside of the file`,
          );
        }
      } catch (e) {
        assert.ok(e instanceof AenvError && e.code === "CORRUPT", `seed ${seed}: ${String(e)}`);
      }
    }
  }),
);

test(
  "a raw image imports to its data only, whatever its size, and appears complete or not at all",
  withDir(async (dir) => {
    const raw = join(dir, "raw");
    const image = Buffer.alloc(5 * 1024 * 1024 + 777);
    randomBytes(10_000).copy(image, 4 * 1024 * 1024 - 5000);
    image[image.length - 1] = 1;
    writeFileSync(raw, image);
    const target = { id: newLayerId(), path: join(dir, "sub", "layer") };
    const info = await importRaw(raw, target);
    assert.equal(info.bytes, statSync(target.path).size);
    assert.ok(info.bytes < 64 * 1024);
    const found = content([target.path]);
    assert.equal(found.length % 4096, 0);
    assert.ok(found.subarray(0, image.length).equals(image));
    assert.ok(found.subarray(image.length).every((b) => b === 0));
    const other = { id: newLayerId(), path: join(dir, "other") };
    await assert.rejects(
      importRaw(join(dir, "missing"), other),
      (e) => e instanceof AenvError && e.code === "NOT_FOUND",
    );
    writeFileSync(raw, "");
    await assert.rejects(importRaw(raw, other), (e) => e instanceof AenvError && e.code === "INVALID_ARGUMENT");
    assert.throws(() => statSync(other.path));
  }),
);
