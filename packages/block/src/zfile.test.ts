import assert from "node:assert/strict";
import { closeSync, openSync, readFileSync, writeFileSync } from "node:fs";
import { open } from "node:fs/promises";
import { join } from "node:path";
import { test } from "node:test";
import { AenvError } from "@aenv/base";
import fc from "fast-check";
import { content, withDir } from "../test/content.ts";
import { openLayer } from "./layer.ts";
import { readsSync } from "./reads.ts";
import { fileSink, type Sink } from "./sink.ts";
import { FileSource, openSource, type Source } from "./source.ts";
import { readTar, tarBytes, TarWriter } from "./tar.ts";
import { decodeZFileHeader, encodeZFileHeader, readZFile, ZFileWriter } from "./zfile.ts";
import { BLOCK_SEED, type Compression, rawCrc32c } from "./zfile-codec.ts";

const vector = (name: string): string => join(import.meta.dirname, "../test/vectors", name);
const COMPRESSIONS: readonly Compression[] = ["lz4", "zstd"];

/** What was written, and whether its start may be replaced. */
function memorySink(seekable: boolean): Sink & { bytes(): Buffer } {
  const parts: Buffer[] = [];
  const bytes = (): Buffer => Buffer.concat(parts);
  const write = (data: Buffer): Promise<void> => {
    parts.push(Buffer.from(data));
    return Promise.resolve();
  };
  if (!seekable) return { bytes, write };
  const rewriteStart = (data: Buffer): Promise<void> => {
    const all = bytes();
    data.copy(all);
    parts.splice(0, parts.length, all);
    return Promise.resolve();
  };
  return { bytes, write, rewriteStart };
}

async function compressed(
  data: Buffer,
  compression: Compression,
  { blockBytes = 4096, seekable = true, step = 10_000 } = {},
): Promise<Buffer> {
  const sink = memorySink(seekable);
  const writer = new ZFileWriter(sink, { compression, blockBytes });
  for (let at = 0; at < data.length; at += step) await writer.write(data.subarray(at, at + step));
  assert.equal(await writer.finish(), sink.bytes().length);
  return sink.bytes();
}

/** The source of a ZFile or a tar with one, and its close. */
function openZ(path: string, bytes: number): Source & Disposable {
  const fd = openSync(path, "r");
  try {
    const { offset, length } = readsSync(readTar(bytes, path), fd, path);
    assert.equal(offset, 0);
    const zfile = readsSync(readZFile(length, path), fd, path);
    assert.ok(zfile, "it is a ZFile");
    const source = openSource({ path, fd, warm: FileSource.warmMap(bytes), form: { offset, zfile } });
    return Object.assign(source, { [Symbol.dispose]: () => closeSync(fd) });
  } catch (e) {
    closeSync(fd);
    throw e;
  }
}

test("the sums are those of the description", () => {
  assert.equal(rawCrc32c(0, Buffer.from("123456789")), 0x58e3fa20);
  assert.equal(rawCrc32c(BLOCK_SEED, Buffer.from("123456789")), 0x3c9bd4e0);
  assert.equal(rawCrc32c(BLOCK_SEED, Buffer.alloc(4096)), 0x18746ccd);
  const whole = Buffer.from("some text in two pieces");
  assert.equal(rawCrc32c(rawCrc32c(0, whole.subarray(0, 9)), whole.subarray(9)), rawCrc32c(0, whole));
});

test("compressed and wrapped layers of upstream read as the plain one", () => {
  const plain = content(vector("commit.bin"));
  for (const name of ["commit.zf", "commit.zstd.zf", "commit.tar"]) {
    assert.ok(content(vector(name)).equals(plain), name);
  }
});

test("headers and trailers of upstream are what our encoder makes of their fields, byte for byte", () => {
  for (const name of ["commit.zf", "commit.zstd.zf"]) {
    const file = readFileSync(vector(name));
    for (const at of [0, file.length - 512]) {
      const b = file.subarray(at, at + 512);
      assert.ok(encodeZFileHeader(decodeZFileHeader(b, name)).equals(b), `${name} at ${at}`);
    }
  }
  const wrapped = readFileSync(vector("commit.tar")).subarray(1536, 2048);
  assert.ok(encodeZFileHeader(decodeZFileHeader(wrapped, "commit.tar")).equals(wrapped));
});

test("our tar of upstream's payload is upstream's, byte for byte", async () => {
  const tar = readFileSync(vector("commit.tar"));
  const payload = tar.subarray(1536, 1536 + 1424);
  const sink = memorySink(false);
  const writer = new TarWriter(sink, payload.length);
  await writer.write(payload.subarray(0, 700));
  await writer.write(payload.subarray(700));
  await writer.finish();
  assert.ok(sink.bytes().equals(tar));
  assert.equal(tarBytes(payload.length), tar.length);
});

test(
  "a plain tar with one entry, as other tools write it, is a layer too",
  withDir((dir) => {
    const layer = readFileSync(vector("commit.bin"));
    const path = join(dir, "layer.tar");
    const header = Buffer.alloc(512);
    header.write("overlaybd.commit\0", 0);
    header.write("0000444\0", 100);
    header.write(`${layer.length.toString(8).padStart(11, "0")}\0`, 124);
    header.fill(0x20, 148, 156);
    header.write("0", 156);
    header.write("ustar\u000000", 257);
    header.write(
      `${header
        .reduce((a, b) => a + b, 0)
        .toString(8)
        .padStart(6, "0")}\0 `,
      148,
    );
    writeFileSync(path, Buffer.concat([header, layer, Buffer.alloc(1024)]));
    assert.ok(content(path).equals(content(vector("commit.bin"))));
    writeFileSync(path, Buffer.concat([header, layer.subarray(0, 9000)]));
    assert.throws(() => openLayer(path), /does not fit/);
  }),
);

test(
  "what is compressed reads back, any range of it, for both compressions and every block size",
  withDir(async (dir) => {
    const path = join(dir, "z");
    const range = fc.tuple(fc.double({ min: 0, max: 1, noNaN: true }), fc.double({ min: 0, max: 1, noNaN: true }));
    const pieces = fc.array(
      fc.tuple(fc.integer({ min: 1, max: 9000 }), fc.oneof(fc.constant(undefined), fc.nat(255))),
      { minLength: 1, maxLength: 30 },
    );
    await fc.assert(
      fc.asyncProperty(
        pieces,
        fc.constantFrom(...COMPRESSIONS),
        fc.constantFrom(4096, 8192, 32768),
        fc.boolean(),
        fc.array(range, { minLength: 1, maxLength: 12 }),
        async (parts, compression, blockBytes, seekable, ranges) => {
          let noise = 1;
          const data = Buffer.concat(
            parts.map(([length, byte]) => {
              const b = Buffer.alloc(length, byte ?? 0);
              if (byte === undefined) {
                for (let i = 0; i < length; i++) b[i] = (noise = (noise * 48_271) % 2_147_483_647) >> 8;
              }
              return b;
            }),
          );
          writeFileSync(path, await compressed(data, compression, { blockBytes, seekable, step: 1 + (noise % 9999) }));
          using source = openZ(path, readFileSync(path).length);
          for (const [a, b] of ranges) {
            const from = Math.floor(a * (data.length - 1));
            const length = 1 + Math.floor(b * (data.length - from - 1));
            await source.load(from, length);
            assert.ok(source.isWarm(from, length));
            const into = Buffer.alloc(length + 2, 0xee);
            source.read(into, 1, length, from);
            assert.ok(into.subarray(1, length + 1).equals(data.subarray(from, from + length)));
            assert.ok(into[0] === 0xee && into[length + 1] === 0xee, "a read wrote outside of its range");
          }
        },
      ),
      { numRuns: 60 },
    );
  }),
);

test("bytes that do not compress are stored in blocks that stay within the bound of readers", async () => {
  const data = Buffer.alloc(256 * 1024);
  let x = 12_345;
  for (let i = 0; i < data.length; i++) data[i] = (x = (x * 48_271) % 2_147_483_647) >> 9;
  for (const compression of COMPRESSIONS) {
    const file = await compressed(data, compression, { blockBytes: 32768 });
    const table = file.readUInt32LE(40);
    for (let i = 0; i < 8; i++) assert.ok(file.readUInt32LE(table + i * 4) < 65536);
  }
  assert.throws(() => new ZFileWriter(memorySink(false), { compression: "lz4", blockBytes: 65536 }), RangeError);
  assert.throws(() => new ZFileWriter(memorySink(false), { compression: "lz4", blockBytes: 5000 }), RangeError);
});

test(
  "a flipped byte in a stored block is told with the file, and never read as data",
  withDir(async (dir) => {
    const path = join(dir, "z");
    const data = Buffer.from(Array.from({ length: 40_000 }, (_, i) => (i * i) >> 7));
    for (const compression of COMPRESSIONS) {
      const good = await compressed(data, compression);
      const table = good.readUInt32LE(40);
      for (let at = 512; at < table; at += 97) {
        const bad = Buffer.from(good);
        bad.writeUInt8(bad.readUInt8(at) ^ 0x10, at);
        writeFileSync(path, bad);
        using source = openZ(path, bad.length);
        assert.throws(
          () => source.read(Buffer.alloc(data.length), 0, data.length, 0),
          (e) => e instanceof AenvError && e.code === "CORRUPT" && e.message.includes(path),
        );
      }
    }
  }),
);

/** Sets the sum of a header right after a change, so that what it says is believed. */
function resum(b: Buffer, at: number): void {
  b.writeUInt32LE(0, at + 28);
  b.writeUInt32LE(rawCrc32c(0, b.subarray(at, at + 512)), at + 28);
}

test(
  "a header that says too much is refused before memory is taken for it",
  withDir(async (dir) => {
    const path = join(dir, "z");
    const good = await compressed(Buffer.alloc(50_000, 7), "lz4");
    const refused = (change: (b: Buffer) => void, what: RegExp, summed = true): void => {
      const b = Buffer.from(good);
      change(b);
      if (summed) resum(b, 0);
      writeFileSync(path, b);
      assert.throws(
        () => openZ(path, b.length),
        (e) => {
          assert.ok(e instanceof AenvError && e.code === "CORRUPT", String(e));
          assert.match(e.message, what);
          assert.ok(e.message.includes(path));
          return true;
        },
      );
    };
    refused((b) => b.writeUInt8(9, 40), /wrong sum/, false);
    refused((b) => b.writeBigUInt64LE(2n ** 40n, 48), /blocks for/);
    refused((b) => {
      b.writeBigUInt64LE(2n ** 28n, 48);
      b.writeBigUInt64LE(2n ** 40n, 56);
    }, /blocks for/);
    refused((b) => {
      b.writeBigUInt64LE(2n ** 20n, 48);
      b.writeBigUInt64LE(2n ** 32n, 56);
    }, /outside of the file/);
    refused((b) => b.writeBigUInt64LE(0n, 48), /blocks for/);
    refused((b) => b.writeBigUInt64LE(2n ** 63n, 40), /outside of the file/);
    refused((b) => b.writeUInt32LE(2 ** 30, 72), /blocks of/);
    refused((b) => b.writeUInt32LE(6000, 72), /blocks of/);
    refused((b) => b.writeUInt32LE(100, 84), /dictionary/);
    refused((b) => b.writeUInt8(0, 76), /algorithm 0/);
    refused((b) => b.writeUInt8(77, 76), /algorithm 77/);
    refused((b) => b.writeUInt32LE(4_000_000, b.readUInt32LE(40)), /block of 4000000 bytes/);
    refused((b) => b.writeUInt32LE(b.readUInt32LE(b.readUInt32LE(40)) + 1, b.readUInt32LE(40)), /jump table with/);
    refused((b) => b.writeUInt32LE(0x12, 32), /does not start/);
    // A block that says to be larger than it may: the content is bounded by the block size, whatever the bytes say.
    for (const compression of COMPRESSIONS) {
      const bomb = await compressed(Buffer.alloc(32768), compression, { blockBytes: 32768 });
      const small = Buffer.from(bomb);
      small.writeUInt32LE(4096, 72);
      small.writeBigUInt64LE(4096n, 56);
      resum(small, 0);
      writeFileSync(path, small);
      using source = openZ(path, small.length);
      assert.throws(() => source.read(Buffer.alloc(4096), 0, 4096, 0), /cannot be read/);
    }
  }),
);

test(
  "random damage to any wrapping is refused or harmless",
  withDir((dir) => {
    const path = join(dir, "fuzz");
    const seed = Number(process.env["LAYER_FUZZ_SEED"] ?? Date.now() % 2 ** 31);
    for (const name of ["commit.zf", "commit.zstd.zf", "commit.tar"]) {
      const good = readFileSync(vector(name));
      const plain = content(vector(name));
      const changes = fc.sample(
        fc.record({
          spots: fc.array(fc.tuple(fc.nat(good.length - 1), fc.nat(255)), { minLength: 1, maxLength: 3 }),
          /** The headers are where most can go wrong. */
          early: fc.boolean(),
          cut: fc.oneof(
            { weight: 7, arbitrary: fc.constant(good.length) },
            { weight: 1, arbitrary: fc.nat(good.length) },
          ),
        }),
        { numRuns: 300, seed },
      );
      for (const { spots, early, cut } of changes) {
        const b = Buffer.from(good);
        for (const [at, byte] of spots) b[early ? at % 600 : at] = byte;
        writeFileSync(path, b.subarray(0, cut));
        try {
          const found = content(path);
          // A plain layer has no sums: only what the compressed part covers is sure to be told.
          assert.ok(found.length !== plain.length || found.equals(plain), `seed ${seed}: wrong data of ${name}`);
        } catch (e) {
          assert.ok(e instanceof AenvError && e.code === "CORRUPT", `seed ${seed}: ${String(e)}`);
        }
      }
    }
  }),
);

test(
  "a file is compressed through a file sink as it is to memory",
  withDir(async (dir) => {
    const data = readFileSync(vector("commit.bin"));
    const path = join(dir, "layer.zf");
    const file = await open(path, "w");
    const sink = fileSink(file);
    const writer = new ZFileWriter(sink, { compression: "lz4" });
    await writer.write(data);
    assert.equal(await writer.finish(), sink.bytes);
    await file.close();
    assert.ok(readFileSync(path).equals(await compressed(data, "lz4")));
    assert.ok(content(path).equals(content(vector("commit.bin"))));
  }),
);
