import assert from "node:assert/strict";
import { mkdirSync, mkdtempSync, readFileSync, rmSync, statSync, truncateSync, writeFileSync } from "node:fs";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { test } from "node:test";
import { AenvError, errnoOf } from "@aenv/base";
import { run } from "@aenv/host";
import { ModelDisk } from "../test/model.ts";
import { Upper } from "./upper.ts";

const SIZE = 4 * 1024 * 1024;

/** A file system of its own that is full soon. */
async function withSmallDisk(kib: number, fn: (dir: string) => Promise<void>): Promise<void> {
  const dir = mkdtempSync(join(tmpdir(), "aenv-small-"));
  await run("mount", ["-t", "tmpfs", "-o", `size=${kib}k`, "tmpfs", dir]);
  try {
    await fn(dir);
  } finally {
    await run("umount", ["-l", dir]);
    rmSync(dir, { recursive: true });
  }
}

function folder(dir: string): string {
  const inner = join(dir, "disk");
  mkdirSync(inner);
  return inner;
}

test("a full host disk is ENOSPC, everything acknowledged stays, and it goes on when there is space again", async () => {
  await withSmallDisk(1024, async (dir) => {
    await using m = new ModelDisk(SIZE, "process", folder(dir));
    let refused = 0;
    for (let at = 0; at < SIZE; at += 16384) {
      try {
        await m.write(at, Buffer.alloc(16384, at / 16384 + 1));
      } catch (e) {
        assert.equal(errnoOf(e), "ENOSPC");
        refused++;
      }
    }
    assert.ok(refused > 100, "the disk was full");
    await m.check();
    // What has its place can be written again, and zeroed, without space.
    await m.write(0, Buffer.alloc(16384, 99));
    await m.zero(16384, 4096);
    await m.disk.flush();
    m.crash();
    await m.check();
    await assert.rejects(async () => m.write(SIZE - 16384, Buffer.alloc(16384, 1)));
    await run("mount", ["-o", "remount,size=16m", dir]);
    await m.write(SIZE - 16384, Buffer.alloc(16384, 1));
    await m.check();
    await m.seal();
    await m.check();
  });
});

test("a seal that finds no space leaves the disk as it was", async () => {
  await withSmallDisk(512, async (dir) => {
    await using m = new ModelDisk(SIZE, "process", folder(dir));
    await m.write(0, Buffer.alloc(4096, 1));
    await m.write(8192, Buffer.alloc(4096, 2));
    writeFileSync(join(dir, "filler"), "");
    assert.throws(() => writeFileSync(join(dir, "filler"), Buffer.alloc(1024 * 1024)), /ENOSPC/);
    assert.throws(() => m.disk.upper.seal(), /ENOSPC/);
    await m.check();
    rmSync(join(dir, "filler"));
    await m.write(16384, Buffer.alloc(8192, 3));
    m.crash();
    await m.check();
  });
});

test("a torn tail of the log is dropped; a log or data file that cannot be right is refused with its name", async () => {
  await using m = new ModelDisk(SIZE);
  await m.write(0, Buffer.alloc(8192, 1));
  await m.write(65536, Buffer.alloc(4096, 2));
  await m.disk.flush();
  const { data, index } = m.disk.upper.files;
  truncateSync(index, statSync(index).size - 5);
  m.crash();
  await m.check();
  const refused = (file: string, damage: (b: Buffer) => Buffer): void => {
    const good = readFileSync(file);
    writeFileSync(file, damage(Buffer.from(good)));
    assert.throws(
      () => Upper.open({ data, index }, SIZE, "process"),
      (e) => e instanceof AenvError && e.code === "CORRUPT" && e.message.includes(file),
    );
    writeFileSync(file, good);
  };
  refused(data, (b) => b.subarray(0, 8192));
  refused(data, (b) => b.subarray(0, 100));
  refused(index, (b) => b.fill(0, 0, 8));
  refused(index, (b) => {
    b.writeUInt32LE(0x7fffffff, 4096);
    return b;
  });
  assert.throws(
    () => Upper.open({ data, index }, SIZE * 2, "process"),
    (e) => e instanceof AenvError && /belongs to a disk of/.test(e.message),
  );
  m.crash();
  await m.check();
});

test("with durability power a flush syncs both files, and a log ahead of its data is dropped at that entry", async () => {
  await using m = new ModelDisk(SIZE, "power");
  await m.write(0, Buffer.alloc(4096, 1));
  await m.disk.flush();
  const { data } = m.disk.upper.files;
  const durable = statSync(data).size;
  await m.disk.write(8192, Buffer.alloc(4096, 2), false);
  m.disk.commit();
  truncateSync(data, durable);
  m.crash();
  await m.check();
});

test("sealing a disk with a gigabyte written costs its extents, not its bytes", async () => {
  const dir = mkdtempSync(join(tmpdir(), "aenv-seal-"));
  const size = 2 ** 30;
  await using m = new ModelDisk(size, "process", dir);
  // Places are handed out without writing: the data file is one hole, which is all that a seal may depend on.
  const { upper } = m.disk;
  const blocks = size / 4096;
  upper.map(0, blocks, upper.allocate(blocks) * 2);
  truncateSync(upper.files.data, upper.dataBytes);
  const before = statSync(upper.files.data).blocks;
  await m.seal();
  const layer = m.layers[0] as string;
  assert.ok((statSync(layer).blocks - before) * 512 < 1024 * 1024);
  assert.equal((await m.read(size - 4096, 4096)).length, 4096);
});
