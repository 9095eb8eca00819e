import assert from "node:assert/strict";
import { statSync } from "node:fs";
import { open } from "node:fs/promises";
import { join } from "node:path";
import { test } from "node:test";
import fc from "fast-check";
import { FarSource, ModelDisk } from "../test/model.ts";
import { LayerWriter } from "./layer-writer.ts";
import { fileSink } from "./sink.ts";

const SIZE = 256 * 1024;
const SECTORS = SIZE / 512;

type Op =
  | { op: "write"; at: number; length: number; byte: number }
  | { op: "zero" | "trim"; at: number; length: number }
  | { op: "burst"; first: number; step: number; count: number; byte: number }
  | { op: "flush" | "crash" | "seal" | "compact" };

const range = fc
  .tuple(
    fc.nat(SECTORS - 1),
    fc.oneof(fc.integer({ min: 1, max: 24 }), fc.integer({ min: 1, max: SECTORS })),
    fc.constantFrom(1, 8),
  )
  .map(([at, length, unit]) => {
    const from = Math.floor(at / unit) * unit;
    return { at: from * 512, length: Math.min(Math.ceil(length / unit) * unit, SECTORS - from) * 512 };
  });
/** Not even multiples of a sector: clients may ask for that. */
const odd = fc
  .tuple(fc.nat(SIZE - 1), fc.integer({ min: 1, max: 9000 }))
  .map(([at, length]) => ({ at, length: Math.min(length, SIZE - at) }));
const where = fc.oneof({ weight: 5, arbitrary: range }, { weight: 1, arbitrary: odd });

const operation: fc.Arbitrary<Op> = fc.oneof(
  {
    weight: 6,
    arbitrary: fc
      .tuple(where, fc.integer({ min: 1, max: 255 }))
      .map(([w, byte]) => ({ op: "write" as const, ...w, byte })),
  },
  { weight: 2, arbitrary: where.map((w) => ({ op: "zero" as const, ...w })) },
  { weight: 2, arbitrary: where.map((w) => ({ op: "trim" as const, ...w })) },
  {
    weight: 1,
    arbitrary: fc.record({
      op: fc.constant("burst" as const),
      first: fc.nat(9),
      step: fc.integer({ min: 1, max: 6 }),
      count: fc.integer({ min: 2, max: 9 }),
      byte: fc.integer({ min: 1, max: 255 }),
    }),
  },
  { weight: 1, arbitrary: fc.constantFrom<Op>({ op: "flush" }, { op: "crash" }, { op: "seal" }, { op: "compact" }) },
);

async function apply(m: ModelDisk, o: Op): Promise<void> {
  if (o.op === "write") {
    const data = Buffer.alloc(o.length, o.byte);
    data.writeUInt8(o.byte ^ 0x55, o.length - 1);
    return await m.write(o.at, data);
  }
  if (o.op === "burst") {
    const writes = Array.from({ length: o.count }, (_, i) => ({
      at: (o.first + i * o.step) * 4096,
      data: Buffer.alloc(4096, o.byte + i),
    }));
    return await m.burst(writes);
  }
  if (o.op === "zero") return await m.zero(o.at, o.length);
  if (o.op === "trim") return await m.trim(o.at, o.length);
  if (o.op === "flush") return await m.disk.flush();
  if (o.op === "crash") return m.crash();
  if (o.op === "seal") return await m.seal();
  return m.disk.upper.compactLog();
}

/** Every write counts as slow: all but the first go through the thread pool. */
const ALWAYS_SLOW = -1;

test("a disk does what a plain array of bytes does, through crashes, seals and rewritten logs", async () => {
  await fc.assert(
    fc.asyncProperty(fc.array(operation, { minLength: 1, maxLength: 60 }), fc.boolean(), async (operations, slow) => {
      await using m = new ModelDisk(SIZE, "process", undefined, slow ? ALWAYS_SLOW : undefined);
      for (const o of operations) await apply(m, o);
      await m.check();
      m.crash();
      await m.check();
      for (const path of m.layers) assert.ok(statSync(path).size <= SIZE + 64 * 1024, "a layer outgrew the disk");
    }),
    { numRuns: 150 },
  );
});

test("what was not committed before a crash is there or not, per block, and everything before it is", async () => {
  await fc.assert(
    fc.asyncProperty(
      fc.array(operation, { maxLength: 20 }),
      fc.array(where, { minLength: 1, maxLength: 10 }),
      async (before, late) => {
        await using m = new ModelDisk(SIZE);
        for (const o of before) await apply(m, o);
        const touched = new Uint8Array(SIZE / 4096);
        for (const w of late) {
          await m.disk.write(w.at, Buffer.alloc(w.length, 7), false);
          touched.fill(1, Math.floor(w.at / 4096), Math.ceil((w.at + w.length) / 4096));
        }
        m.crash();
        const found = await m.read(0, SIZE);
        for (let i = 0; i < SIZE; i++) {
          const byte = found[i];
          if (byte !== m.model[i] && !(touched[Math.floor(i / 4096)] && byte === 7))
            assert.fail(`byte ${i} is ${byte}`);
        }
      },
    ),
    { numRuns: 60 },
  );
});

test("the place of a zeroed block stays its own after its log was rewritten and a restart", async () => {
  await using m = new ModelDisk(SIZE);
  await m.write(0, Buffer.alloc(8192, 1));
  await m.trim(4096, 4096);
  m.disk.upper.compactLog();
  m.crash();
  await m.write(65536, Buffer.alloc(4096, 2));
  await m.write(4096, Buffer.alloc(4096, 3));
  await m.check();
  m.crash();
  await m.check();
});

test("a layer with extents of single sectors, here or in a store, is read, covered and zeroed right", async () => {
  const sectors = fc.uniqueArray(fc.nat(SECTORS - 1), { minLength: 1, maxLength: 60 });
  await fc.assert(
    fc.asyncProperty(sectors, fc.array(operation, { maxLength: 20 }), fc.boolean(), async (list, operations, far) => {
      await using m = new ModelDisk(SIZE);
      const path = join(m.dir, "base.lsmt");
      const content = Buffer.alloc(SIZE);
      const file = await open(path, "w");
      const writer = new LayerWriter(fileSink(file), { virtualSize: SIZE });
      for (const sector of list.toSorted((a, b) => a - b)) {
        if (sector % 5 === 0) await writer.zero(sector * 512, 512);
        else {
          content.fill(sector | 1, sector * 512, sector * 512 + 512);
          await writer.data(sector * 512, content.subarray(sector * 512, sector * 512 + 512));
        }
      }
      await writer.finish();
      await file.close();
      await m.base(path, content, (s) => (far ? new FarSource(s) : s));
      await m.check();
      for (const o of operations) await apply(m, o);
      await m.check();
      await m.zero(4096, SIZE - 8192);
      await m.check();
    }),
    { numRuns: 60 },
  );
});

test("overwriting, trimming and writing again never makes the upper larger than the disk", async () => {
  await using m = new ModelDisk(SIZE);
  for (let round = 0; round < 20; round++) {
    for (let at = 0; at < SIZE; at += 16384) await m.write(at, Buffer.alloc(16384, round + 1));
    await m.trim(0, SIZE);
    for (let at = SIZE - 4096; at >= 0; at -= 4096) await m.write(at, Buffer.alloc(4096, round + 2));
    if (round % 5 === 0) m.crash();
  }
  await m.check();
  assert.ok(statSync(m.disk.upper.files.data).size <= SIZE + 8192);
});
