import assert from "node:assert/strict";
import { randomBytes } from "node:crypto";
import { mkdtempSync, readFileSync, rmSync, writeFileSync } from "node:fs";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { execFile } from "node:child_process";
import { test } from "node:test";
import { promisify } from "node:util";
import { silentLogger } from "@aenv/base";
import { requestBytes, TestClient } from "../test/client.ts";
import { errno, MemoryTarget } from "../test/memory-target.ts";
import { CMD, CMD_FLAG, ERRNO, MAX_PAYLOAD_BYTES, OPT, STATE_HOLE, STATE_ZERO, TRANSMISSION } from "./protocol.ts";
import { NbdServer, type NbdServerOptions } from "./server.ts";
import { wireErrno } from "./target.ts";

const exec = promisify(execFile);
const MIB = 2 ** 20;

class Bed implements AsyncDisposable {
  readonly dir = mkdtempSync(join(tmpdir(), "aenv-nbd-"));
  readonly socket = join(this.dir, "s");
  readonly uri = `nbd+unix:///disk?socket=${this.socket}`;
  readonly target: MemoryTarget;
  readonly server: NbdServer;

  constructor(target: MemoryTarget, options: Partial<NbdServerOptions> = {}) {
    this.target = target;
    const info = { name: "disk", description: "a test disk", size: target.size, readOnly: target.readOnly };
    this.server = new NbdServer({ exports: [{ info, target }], logger: silentLogger, ...options });
  }

  static async open(target = new MemoryTarget(8 * MIB), options: Partial<NbdServerOptions> = {}): Promise<Bed> {
    const bed = new Bed(target, options);
    await bed.server.listen(bed.socket);
    return bed;
  }

  async [Symbol.asyncDispose](): Promise<void> {
    await this.server.close();
    rmSync(this.dir, { recursive: true, force: true });
  }
}

test("nbdinfo sees size, flags, block sizes, the description and the allocation map", async () => {
  await using bed = await Bed.open();
  bed.target.data.fill(1, MIB, 2 * MIB);
  const { stdout } = await exec("nbdinfo", ["--json", bed.uri]);
  const info = (JSON.parse(stdout) as { exports: Record<string, unknown>[] }).exports[0];
  assert.equal(info?.["export-size"], 8 * MIB);
  assert.equal(info?.["description"], "a test disk");
  assert.equal(info?.["block_size_minimum"], 512);
  assert.equal(info?.["block_size_maximum"], MAX_PAYLOAD_BYTES);
  for (const can of [
    "can_fua",
    "can_flush",
    "can_trim",
    "can_zero",
    "can_fast_zero",
    "can_multi_conn",
    "can_cache",
    "can_df",
  ])
    assert.equal(info?.[can], true, can);
  const list = JSON.parse(
    (await exec("nbdinfo", ["--list", "--json", `nbd+unix:///?socket=${bed.socket}`])).stdout,
  ) as {
    exports: Record<string, unknown>[];
  };
  assert.equal(list.exports[0]?.["export-name"], "disk");
  const map = JSON.parse((await exec("nbdinfo", ["--map", "--json", bed.uri])).stdout) as {
    length: number;
    type: number;
  }[];
  assert.deepEqual(
    map.map((e) => [e.length, e.type]),
    [
      [MIB, 3],
      [MIB, 0],
      [6 * MIB, 3],
    ],
  );
});

test("nbdcopy, qemu-img and qemu-io write and read back what they wrote", async () => {
  await using bed = await Bed.open();
  const raw = join(bed.dir, "raw");
  const image = Buffer.alloc(8 * MIB);
  randomBytes(3 * MIB).copy(image, 2 * MIB + 512);
  writeFileSync(raw, image);
  await exec("nbdcopy", ["--flush", raw, bed.uri]);
  assert.ok(bed.target.data.equals(image));
  assert.ok(bed.target.flushes > 0);
  await exec("nbdcopy", [bed.uri, join(bed.dir, "back")]);
  assert.ok(readFileSync(join(bed.dir, "back")).equals(image));
  await exec("qemu-img", ["compare", "-f", "raw", "-F", "raw", raw, bed.uri]);
  await exec("qemu-img", ["convert", "-n", "-f", "raw", "-O", "raw", raw, bed.uri]);
  const io = [
    "write -P 0xab 64k 128k",
    "write -z 96k 32k",
    "discard 128k 4k",
    "read -P 0xab 64k 32k",
    "read -P 0 96k 32k",
    "flush",
  ];
  const { stdout } = await exec("qemu-io", ["-f", "raw", ...io.flatMap((c) => ["-c", c]), bed.uri]);
  assert.doesNotMatch(stdout, /failed|error/i);
});

test("fio verifies what it wrote at depth 32", async () => {
  await using bed = await Bed.open();
  const args = ["--name=v", "--ioengine=nbd", `--uri=${bed.uri}`, "--rw=randwrite", "--bs=4k-64k", "--iodepth=32"];
  await exec("fio", [...args, "--size=8m", "--verify=crc32c", "--verify_fatal=1"], { cwd: bed.dir });
});

test("every command works, with simple and with structured replies", async () => {
  await using bed = await Bed.open();
  const data = randomBytes(200_000);
  for (const structured of [false, true]) {
    const c = await TestClient.connect(bed.socket, { structured });
    assert.equal(c.size, 8 * MIB);
    assert.equal((c.flags & TRANSMISSION.SEND_DF) !== 0, structured);
    assert.equal((await c.write(4096, data)).error, 0);
    assert.ok((await c.read(4096, data.length)).data?.equals(data));
    assert.equal(
      (await c.send(CMD.WRITE_ZEROES, 8192, 4096, { flags: CMD_FLAG.NO_HOLE | CMD_FLAG.FAST_ZERO })).error,
      0,
    );
    assert.ok((await c.read(8192, 4096)).data?.every((b) => b === 0));
    assert.equal((await c.send(CMD.TRIM, 0, MIB)).error, 0);
    assert.equal((await c.send(CMD.CACHE, 0, MIB)).error, 0);
    assert.equal((await c.flush()).error, 0);
    const hole = await c.read(4 * MIB, MIB);
    assert.ok(hole.data?.every((b) => b === 0));
    assert.equal(hole.hole === true, structured, "a hole is not sent as zeros");
    const status = await c.send(CMD.BLOCK_STATUS, 0, 8 * MIB);
    if (!structured) assert.equal(status.error, ERRNO.EINVAL);
    else assert.deepEqual(status.extents, [{ length: 8 * MIB, flags: STATE_HOLE | STATE_ZERO }]);
    c.socket.write(requestBytes({ type: CMD.DISC, cookie: 999 }));
    await c.closed;
  }
});

test("failures of the disk and wrong requests become the right errno, and the connection goes on", async () => {
  await using bed = await Bed.open();
  for (const structured of [false, true]) {
    const c = await TestClient.connect(bed.socket, { structured });
    const { target } = bed;
    target.fail.set("write", errno("ENOSPC"));
    assert.equal((await c.write(0, Buffer.alloc(4096))).error, ERRNO.ENOSPC);
    target.fail.set("read", errno("EIO"));
    target.fail.set("flush", errno("EDQUOT"));
    assert.equal((await c.read(0, 4096)).error, ERRNO.EIO);
    assert.equal((await c.flush()).error, ERRNO.ENOSPC);
    target.fail.clear();
    assert.equal((await c.read(8 * MIB - 512, 1024)).error, ERRNO.EINVAL);
    assert.equal((await c.write(8 * MIB - 512, Buffer.alloc(1024))).error, ERRNO.ENOSPC);
    assert.equal((await c.send(CMD.READ, 2 ** 53, 512)).error, ERRNO.EINVAL);
    assert.equal((await c.read(0, 0)).error, ERRNO.EINVAL);
    assert.equal((await c.send(CMD.READ, 0, MAX_PAYLOAD_BYTES + 1)).error, ERRNO.EINVAL);
    assert.equal((await c.send(42, 0, 512)).error, ERRNO.EINVAL);
    assert.equal((await c.send(CMD.READ, 0, 512, { flags: 0x8000 })).error, ERRNO.EINVAL);
    assert.equal((await c.read(0, 512)).error, 0);
    c.close();
  }
  assert.equal(wireErrno(errno("EROFS")), "EPERM");
  assert.equal(wireErrno(new Error("what")), "EIO");
  assert.equal(wireErrno(errno("toString")), "EIO");
});

test("a read-only export refuses every change with EPERM", async () => {
  await using bed = await Bed.open(new MemoryTarget(MIB, true));
  const c = await TestClient.connect(bed.socket);
  assert.ok((c.flags & TRANSMISSION.READ_ONLY) !== 0);
  assert.equal((await c.write(0, Buffer.alloc(512))).error, ERRNO.EPERM);
  assert.equal((await c.send(CMD.TRIM, 0, 512)).error, ERRNO.EPERM);
  assert.equal((await c.send(CMD.WRITE_ZEROES, 0, 512)).error, ERRNO.EPERM);
  assert.equal((await c.read(0, 512)).error, 0);
  c.close();
});

test("in flight is bounded, late replies come in any order, and the rest waits its turn", async () => {
  await using bed = await Bed.open(new MemoryTarget(8 * MIB), { maxInflight: 8 });
  randomBytes(8 * MIB).copy(bed.target.data);
  const gate = Promise.withResolvers<void>();
  bed.target.gate = gate.promise;
  const c = await TestClient.connect(bed.socket, { structured: true });
  const work = Array.from({ length: 200 }, (_, i) =>
    i % 2 === 0
      ? c.read(i * 4096, 4096)
      : c.write(4 * MIB + i * 4096, bed.target.data.subarray(i * 4096, (i + 1) * 4096)),
  );
  bed.target.gate = undefined;
  gate.resolve();
  const replies = await Promise.all(work);
  assert.ok(bed.target.mostWaiting <= 8, `${bed.target.mostWaiting} at once`);
  replies.forEach((r, i) => {
    assert.equal(r.error, 0);
    if (i % 2 === 0) assert.ok(r.data?.equals(bed.target.data.subarray(i * 4096, (i + 1) * 4096)), `reply ${i}`);
    else
      assert.ok(
        bed.target.data
          .subarray(4 * MIB + i * 4096, 4 * MIB + (i + 1) * 4096)
          .equals(bed.target.data.subarray(i * 4096, (i + 1) * 4096)),
      );
  });
  c.close();
});

test("a client that does not read its replies stops being served, not the server's memory being eaten", async () => {
  let read = 0;
  class Counting extends MemoryTarget {
    override readNow(offset: number, length: number, into: Buffer, at: number): boolean {
      read += length;
      return super.readNow(offset, length, into, at);
    }
  }
  await using bed = await Bed.open(new Counting(8 * MIB), { maxQueuedBytes: 2 * MIB });
  const c = await TestClient.connect(bed.socket);
  c.socket.pause();
  const work = Array.from({ length: 256 }, (_, i) => c.read((i % 8) * MIB, MIB));
  // Another client's round trips prove that the server has had its turns meanwhile.
  const other = await TestClient.connect(bed.socket);
  for (let i = 0; i < 50; i++) await other.read(0, 512);
  assert.ok(read < 8 * MIB, `${read} bytes were read for a client that takes none`);
  c.socket.resume();
  for (const r of await Promise.all(work)) assert.equal(r.data?.length, MIB);
  c.close();
  other.close();
});

test("close answers what is in flight, takes nothing more, and ends clients that stay", async () => {
  const bed = await Bed.open();
  const gate = Promise.withResolvers<void>();
  bed.target.gate = gate.promise;
  const c = await TestClient.connect(bed.socket);
  const pending = c.read(0, 4096);
  const other = await TestClient.connect(bed.socket);
  while (bed.target.waiting === 0) await new Promise((r) => setImmediate(r));
  const closing = bed.server.close();
  gate.resolve();
  assert.equal((await pending).error, 0);
  await closing;
  await Promise.all([c.closed, other.closed]);
  assert.equal(bed.server.connections, 0);
  await bed[Symbol.asyncDispose]();
});

test("a stream that is not NBD, a broken request and a half request end only their own connection", async () => {
  await using bed = await Bed.open();
  const http = await TestClient.raw(bed.socket);
  http.socket.write("GET / HTTP/1.1\r\n\r\n");
  await http.closed;
  const broken = await TestClient.connect(bed.socket);
  broken.socket.write(Buffer.alloc(28, 7));
  await broken.closed;
  const half = await TestClient.connect(bed.socket);
  half.socket.end(
    requestBytes({ type: CMD.WRITE, cookie: 1, offset: 0, payload: Buffer.alloc(4096, 9) }).subarray(0, 1000),
  );
  await half.closed;
  assert.ok(
    bed.target.data.every((b) => b === 0),
    "a write that was cut off changed nothing",
  );
  const abort = await TestClient.raw(bed.socket);
  abort.socket.write(Buffer.from([0, 0, 0, 3]));
  await abort.option(OPT.ABORT);
  await abort.closed;
  const fine = await TestClient.connect(bed.socket);
  assert.equal((await fine.read(0, 512)).error, 0);
  fine.close();
});
