import assert from "node:assert/strict";
import { mkdtempSync, readdirSync, readFileSync, rmSync, writeFileSync } from "node:fs";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { test } from "node:test";
import { DeltaFile, DeltaWriter } from "./delta-file.ts";
import type { DeltaPiece } from "./delta.ts";

const MEMORY = 1 << 20;

async function withFile(fn: (path: string) => void): Promise<void> {
  const dir = mkdtempSync(join(tmpdir(), "aenv-delta-"));
  try {
    const path = join(dir, "delta");
    using writer = new DeltaWriter(path, MEMORY);
    writer.add({ offset: 0, length: 4096, data: Buffer.alloc(4096, 7) });
    writer.add({ offset: 8192, length: 8192, data: undefined });
    writer.flushAhead();
    writer.add({ offset: 65536, length: 4096, data: Buffer.alloc(4096, 9) });
    writer.flushAhead();
    await writer.seal(true);
    fn(path);
  } finally {
    rmSync(dir, { recursive: true });
  }
}

function pieces(path: string, memoryBytes = MEMORY): DeltaPiece[] {
  using file = DeltaFile.open(path, memoryBytes);
  return file.entries.map((e) => ({ offset: e.offset, length: e.length, data: file.read(e) }));
}

test("a delta is read back as it was written", () =>
  withFile((path) => {
    assert.deepEqual(
      pieces(path).map((p) => [p.offset, p.length, p.data?.[0]]),
      [
        [0, 4096, 7],
        [8192, 8192, undefined],
        [65536, 4096, 9],
      ],
    );
  }));

test("a delta cut short at any place, with any bit of a byte changed, or of other memory is refused by its name", () =>
  withFile((path) => {
    const whole = readFileSync(path);
    const refused = (): void => assert.throws(() => pieces(path), { code: "CORRUPT", message: /delta/ });
    for (const size of [0, 10, 4096, whole.length - 1]) {
      writeFileSync(path, whole.subarray(0, size));
      refused();
    }
    for (const at of [0, 5000, 8192, 8200, whole.length - 40, whole.length - 9, whole.length - 1]) {
      const bad = Buffer.from(whole);
      bad[at] = (bad[at] ?? 0) ^ 1;
      writeFileSync(path, bad);
      refused();
    }
    writeFileSync(path, whole);
    assert.throws(() => pieces(path, MEMORY * 2), { code: "CORRUPT" });
  }));

test("data that was read once is checked again when the file has changed", () =>
  withFile((path) => {
    pieces(path);
    const bad = readFileSync(path);
    bad[0] = 8;
    writeFileSync(path, bad);
    assert.throws(() => pieces(path), { code: "CORRUPT", message: /delta/ });
  }));

test("a delta that is not sealed leaves no file", () => {
  const dir = mkdtempSync(join(tmpdir(), "aenv-delta-"));
  try {
    const path = join(dir, "delta");
    {
      using writer = new DeltaWriter(path, MEMORY);
      writer.add({ offset: 0, length: 4096, data: Buffer.alloc(4096, 7) });
    }
    assert.deepEqual(readdirSync(dir), []);
  } finally {
    rmSync(dir, { recursive: true });
  }
});
