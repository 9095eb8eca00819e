import assert from "node:assert/strict";
import { closeSync, copyFileSync, readdirSync, readFileSync, renameSync, statSync, truncateSync } from "node:fs";
import { join } from "node:path";
import { test } from "node:test";
import { AenvError, newLayerId } from "@aenv/base";
import fc from "fast-check";
import { content, withDir } from "../test/content.ts";
import { openLayer } from "./layer.ts";
import { mergeLayers } from "./merge.ts";
import { Upper } from "./upper.ts";
import { Disk, EMPTY_STACK } from "./disk.ts";

const vector = (name: string): string => join(import.meta.dirname, "../test/vectors", name);
const SIZE = 256 * 1024;

type Change = { at: number; length: number; byte: number | undefined };
const change: fc.Arbitrary<Change> = fc
  .tuple(fc.nat(63), fc.integer({ min: 1, max: 20 }), fc.option(fc.integer({ min: 1, max: 255 }), { nil: undefined }))
  .map(([block, count, byte]) => ({ at: block * 4096, length: Math.min(count, 64 - block) * 4096, byte }));

/** A sealed layer over nothing: zeroed ranges of it hide only what lies beneath, so the disk is given something to hide. */
async function sealed(dir: string, name: string, changes: readonly Change[]): Promise<string> {
  const files = { data: join(dir, `${name}.data`), index: join(dir, `${name}.index`) };
  const upper = Upper.create(files, SIZE, "process");
  const disk = new Disk(SIZE, EMPTY_STACK, upper);
  for (const c of changes) {
    await disk.write(c.at, Buffer.alloc(c.length, c.byte ?? 1), false);
    if (c.byte === undefined) await disk.zero(c.at, c.length, true, false);
  }
  disk.commit();
  upper.seal();
  await disk.close();
  const path = join(dir, `${name}.lsmt`);
  renameSync(files.data, path);
  return path;
}

test(
  "merging upstream's two layers gives upstream's merged layer, all bytes but the cuts and tags in the index",
  withDir(async (dir) => {
    const target = { id: newLayerId(), path: join(dir, "merged") };
    const info = await mergeLayers([vector("m0.bin"), vector("m1.bin")], target);
    const ours = readFileSync(target.path);
    const theirs = readFileSync(vector("merged.bin"));
    assert.ok(ours.subarray(0, 16384).equals(theirs.subarray(0, 16384)), "header and data");
    assert.ok(ours.subarray(20480).equals(theirs.subarray(20480)), "trailer");
    assert.ok(content(target.path).equals(content(vector("merged.bin"))));
    assert.equal(info.bytes, ours.length);
  }),
);

test(
  "a merged layer reads as its stack does, alone, over what lies beneath, and compressed",
  withDir(async (dir) => {
    let n = 0;
    const stack = fc.array(fc.array(change, { maxLength: 8 }), { minLength: 1, maxLength: 6 });
    await fc.assert(
      fc.asyncProperty(
        stack,
        fc.nat(5),
        fc.constantFrom(undefined, "lz4", "zstd"),
        async (changes, from, compression) => {
          const paths: string[] = [];
          for (const c of changes) paths.push(await sealed(dir, `l${n++}`, c));
          const all = content(...paths);
          const first = from % paths.length;
          const target = { id: newLayerId(), path: join(dir, `m${n++}`) };
          const options = { base: first === 0, ...(compression === undefined ? {} : { compression }) } as const;
          const info = await mergeLayers(paths.slice(first), target, options);
          assert.equal(info.bytes, statSync(target.path).size);
          assert.ok(content(...paths.slice(0, first), target.path).equals(all));
        },
      ),
      { numRuns: 60 },
    );
  }),
);

test(
  "a base keeps no entry for zeros, a layer in the middle keeps them",
  withDir(async (dir) => {
    const path = await sealed(dir, "zero", [{ at: 0, length: 65536, byte: undefined }]);
    const base = await mergeLayers([path], { id: newLayerId(), path: join(dir, "base") }, { base: true });
    const middle = await mergeLayers([path], { id: newLayerId(), path: join(dir, "middle") });
    assert.equal(base.extents, 0);
    assert.equal(middle.extents, 1);
  }),
);

test(
  "255 layers open, read and merge",
  withDir(async (dir) => {
    const paths: string[] = [];
    for (let i = 0; i < 255; i++) {
      paths.push(await sealed(dir, `l${i}`, [{ at: (i % 64) * 4096, length: 4096, byte: (i % 255) + 1 }]));
    }
    const all = content(...paths);
    for (let block = 0; block < 64; block++)
      assert.equal(all[block * 4096], ((192 + block - (block === 63 ? 64 : 0)) % 255) + 1);
    const target = { id: newLayerId(), path: join(dir, "merged") };
    const { bytes, extents } = await mergeLayers(paths, target, { base: true });
    assert.ok(content(target.path).equals(all));
    assert.ok(bytes < SIZE + 16384 && extents === 1);
  }),
);

test(
  "a merge that fails leaves nothing, says why, and leaves its layers alone",
  withDir(async (dir) => {
    const a = await sealed(dir, "a", [{ at: 0, length: SIZE, byte: 1 }]);
    const b = join(dir, "b");
    copyFileSync(a, b);
    truncateSync(b, 5000);
    const out = join(dir, "out");
    const target = { id: newLayerId(), path: join(out, "merged") };
    const fails = async (paths: readonly string[], code: string, signal?: AbortSignal): Promise<void> => {
      await assert.rejects(mergeLayers(paths, target, signal ? { signal } : {}), (e) => {
        assert.ok(e instanceof AenvError ? e.code === code : (e as Error).name === code, String(e));
        return true;
      });
      assert.deepEqual(readdirSync(out), []);
    };
    await fails([a, b], "CORRUPT");
    await fails([a, join(dir, "missing")], "NOT_FOUND");
    await fails([a], "AbortError", AbortSignal.abort());
    await assert.rejects(mergeLayers([], target), (e) => e instanceof AenvError && e.code === "INVALID_ARGUMENT");
    const { fd, ...layer } = openLayer(a);
    assert.equal(layer.extents.count, 1);
    closeSync(fd);
  }),
);
