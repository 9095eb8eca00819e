import assert from "node:assert/strict";
import { type ChildProcess, spawn } from "node:child_process";
import { once } from "node:events";
import { existsSync, mkdirSync, readFileSync, renameSync, truncateSync, writeFileSync } from "node:fs";
import { request } from "node:http";
import { join, resolve } from "node:path";
import { test } from "node:test";
import { AenvError, type ErrorCode } from "@aenv/base";
import { run } from "@aenv/host";
import { CMD, ERRNO, TestClient } from "@aenv/nbd/testing";
import { TestBlockd, uri } from "../test/harness.ts";

const MIB = 1024 * 1024;
const has = (code: ErrorCode, text: string) => (e: unknown) => {
  assert.ok(e instanceof AenvError, String(e));
  assert.equal(e.code, code);
  assert.ok(e.message.includes(text), e.message);
  return true;
};

test("kill -9 in the middle of writes loses nothing that was acknowledged, flushed or not", async () => {
  await using blockd = await TestBlockd.start();
  const spec = blockd.spec("d1", 64 * MIB);
  await blockd.client.createDisk(spec);
  const acknowledged = new Map<number, number>();
  const sent = new Map<number, number>();
  let stamp = 1;
  for (let round = 0; round < 3; round++) {
    const c = await TestClient.connect(spec.socketPath);
    let answers = 0;
    const enough = Promise.withResolvers<void>();
    const keepWriting = async (lane: number): Promise<void> => {
      for (;;) {
        // A lane has blocks of its own: its writes to one block never overlap in time.
        const block = lane + 16 * Math.floor(Math.random() * 1000);
        const mine = stamp++;
        sent.set(block, mine);
        const data = Buffer.alloc(4096);
        data.writeUInt32LE(mine, 0);
        data.writeUInt32LE(mine, 4092);
        const reply = await c.write(block * 4096, data);
        assert.equal(reply.error, 0);
        acknowledged.set(block, mine);
        if (++answers === 1500) enough.resolve();
      }
    };
    const lanes = Array.from({ length: 16 }, (_, lane) => keepWriting(lane).catch(() => {}));
    await enough.promise;
    await blockd.end("SIGKILL");
    await Promise.all(lanes);
    await blockd.start();
    const back = await TestClient.connect(spec.socketPath);
    for (const [block, mine] of sent) {
      const { data } = await back.read(block * 4096, 4096);
      const found = data?.readUInt32LE(0);
      assert.equal(data?.readUInt32LE(4092), found, `block ${block} is torn`);
      const allowed = [acknowledged.get(block) ?? 0, mine];
      assert.ok(allowed.includes(found ?? -1), `block ${block} is ${found}, not one of ${allowed.join()}`);
      acknowledged.set(block, found ?? 0);
      sent.set(block, found ?? 0);
    }
    back.close();
  }
});

test("a client with reconnect-delay sees a killed and restarted blockd only as a pause", async () => {
  await using blockd = await TestBlockd.start();
  const spec = blockd.spec("d1", 16 * MIB);
  await blockd.client.createDisk(spec);
  // A pattern that differs ends qemu-io's read with an error and exit code 1.
  const options = `driver=nbd,server.type=unix,server.path=${spec.socketPath},export=disk,reconnect-delay=300`;
  const io = spawn("stdbuf", ["-oL", "qemu-io", "--image-opts", options], { stdio: ["pipe", "pipe", "inherit"] });
  let out = "";
  io.stdout.on("data", (d: Buffer) => (out += d.toString()));
  // One line at a time: qemu-io waits for its input to become readable again after each.
  const ask = async (line: string, answer: RegExp): Promise<void> => {
    io.stdin.write(`${line}\n`);
    await until(() => answer.test(out) || /failed/.test(out), io);
    assert.match(out, answer);
    out = "";
  };
  await ask("write -P 0x5a 0 1M", /wrote 1048576/);
  await blockd.end("SIGKILL");
  const pending = ask("write -P 0xa5 1M 1M", /wrote 1048576/);
  await blockd.start();
  await pending;
  await ask("read -P 0x5a 0 1M", /read 1048576/);
  await ask("read -P 0xa5 1M 1M", /read 1048576/);
  io.stdin.write("quit\n");
  const [code] = (await once(io, "exit")) as [number];
  assert.equal(code, 0, out);
});

async function until(done: () => boolean, child: ChildProcess): Promise<void> {
  while (!done()) {
    if (child.exitCode !== null) throw new Error(`the peer ended with ${child.exitCode}`);
    await once(child.stdout as NonNullable<typeof child.stdout>, "data");
  }
}

test("a full host disk reaches the guest as ENOSPC, and what was acknowledged is there after a restart", async () => {
  await using blockd = await TestBlockd.start();
  const small = blockd.path("runs");
  mkdirSync(small);
  await run("mount", ["-t", "tmpfs", "-o", "size=2m", "tmpfs", small]);
  try {
    const spec = blockd.spec("d1", 16 * MIB);
    await blockd.client.createDisk(spec);
    const c = await TestClient.connect(spec.socketPath);
    const kept: number[] = [];
    for (let i = 0; i < 64; i++) {
      const { error } = await c.write(i * 65536, Buffer.alloc(65536, i + 1));
      if (error === 0) kept.push(i);
      else assert.equal(error, ERRNO.ENOSPC);
    }
    assert.ok(kept.length > 10 && kept.length < 40, `${kept.length} writes fitted`);
    assert.equal((await c.flush()).error, 0);
    assert.equal((await c.write(0, Buffer.alloc(65536, 1))).error, 0, "what has its place can be overwritten");
    c.close();
    await blockd.end("SIGKILL");
    await blockd.start();
    const back = await TestClient.connect(spec.socketPath);
    for (const i of kept) assert.ok((await back.read(i * 65536, 65536)).data?.every((b) => b === i + 1));
    assert.equal((await back.send(CMD.TRIM, 0, MIB)).error, 0);
    back.close();
  } finally {
    await blockd.client.closeDisk("d1", { deleteUpper: true });
    await run("umount", ["-l", small]);
  }
});

test("a damaged or missing layer is refused with its name, and a disk that lost one does not stop the others", async () => {
  await using blockd = await TestBlockd.start();
  const raw = blockd.path("raw");
  writeFileSync(raw, Buffer.alloc(MIB, 3));
  const base = blockd.layer();
  await blockd.client.importRaw(raw, base);
  const good = readFileSync(base.path);
  truncateSync(base.path, good.length - 100);
  await assert.rejects(blockd.client.createDisk(blockd.spec("d1", MIB, [base])), has("CORRUPT", base.path));
  const missing = blockd.layer();
  await assert.rejects(blockd.client.createDisk(blockd.spec("d1", MIB, [missing])), has("NOT_FOUND", missing.path));
  assert.deepEqual(await blockd.client.listDisks(), []);
  writeFileSync(base.path, good);
  await blockd.client.createDisk(blockd.spec("d1", MIB, [base]));
  await blockd.client.createDisk(blockd.spec("d2", MIB));
  await blockd.end("SIGKILL");
  renameSync(base.path, `${base.path}.away`);
  await blockd.start();
  assert.deepEqual(
    (await blockd.client.listDisks()).map((d) => d.disk),
    ["d2"],
  );
  assert.ok(readFileSync(blockd.log, "utf8").includes(base.path), "the log names the layer");
  await blockd.end("SIGTERM");
  renameSync(`${base.path}.away`, base.path);
  await blockd.start();
  assert.deepEqual((await blockd.client.listDisks()).map((d) => d.disk).sort(), ["d1", "d2"]);
});

test("a layer that shrinks while it is in use gives EIO, never zeros", async () => {
  await using blockd = await TestBlockd.start();
  const raw = blockd.path("raw");
  writeFileSync(raw, Buffer.alloc(4 * MIB, 3));
  const base = blockd.layer();
  await blockd.client.importRaw(raw, base);
  const spec = blockd.spec("d1", 4 * MIB, [base]);
  await blockd.client.createDisk(spec);
  truncateSync(base.path, 2 * MIB);
  const c = await TestClient.connect(spec.socketPath);
  assert.equal((await c.read(3 * MIB, 4096)).error, ERRNO.EIO);
  assert.equal((await c.read(0, 4096)).error, 0);
  c.close();
});

test("a seal cut off by a crash at any step is undone or completed at the next start", async () => {
  await using blockd = await TestBlockd.start();
  const raw = blockd.path("raw");
  writeFileSync(raw, Buffer.alloc(MIB, 5));
  const spec = blockd.spec("d1", MIB);
  await blockd.client.createDisk(spec);
  await run("nbdcopy", [raw, uri(spec)]);
  await blockd.end("SIGKILL");
  const record = blockd.path("state/d1.json");
  const before = JSON.parse(readFileSync(record, "utf8")) as object;
  const target = blockd.layer();
  const upper = (n: number, kind: string): string => join(spec.upperDir, `upper-${n}.${kind}`);
  // Intent written, next upper half made, nothing moved: undone.
  writeFileSync(record, JSON.stringify({ ...before, sealing: target }));
  writeFileSync(upper(1, "index"), "half");
  await blockd.start();
  assert.deepEqual((await blockd.client.listDisks())[0]?.layers, []);
  await run("qemu-img", ["compare", "-f", "raw", "-F", "raw", raw, uri(spec)]);
  const sealed = await blockd.client.sealDisk("d1", target);
  await blockd.end("SIGKILL");
  // The data file has moved, the record was not written yet: completed.
  writeFileSync(record, JSON.stringify({ ...before, sealing: target }));
  await blockd.start();
  assert.deepEqual((await blockd.client.listDisks())[0]?.layers, [target]);
  await run("qemu-img", ["compare", "-f", "raw", "-F", "raw", raw, uri(spec)]);
  assert.deepEqual(await blockd.client.sealDisk("d1", target), sealed, "the caller may ask again");
});

test("twenty seals under a writing client keep every byte, and reads go through all layers", async () => {
  await using blockd = await TestBlockd.start();
  const spec = blockd.spec("d1", 4 * MIB);
  await blockd.client.createDisk(spec);
  const c = await TestClient.connect(spec.socketPath, { structured: true });
  const model = Buffer.alloc(4 * MIB);
  for (let n = 1; n <= 20; n++) {
    const writes: Promise<unknown>[] = [];
    for (let i = 0; i < 40; i++) {
      const at = Math.floor(Math.random() * 1000) * 4096;
      model.fill(n, at, at + 8192);
      writes.push(c.write(at, Buffer.alloc(8192, n)));
    }
    writes.push(blockd.client.sealDisk("d1", blockd.layer()));
    await Promise.all(writes);
  }
  assert.ok((await c.read(0, 4 * MIB)).data?.equals(model));
  c.close();
  await blockd.end("SIGKILL");
  await blockd.start();
  const back = await TestClient.connect(spec.socketPath);
  assert.ok((await back.read(0, 4 * MIB)).data?.equals(model));
  assert.equal((await blockd.client.listDisks())[0]?.layers.length, 20);
  back.close();
});

test("a seal that fails leaves the disk in service with what it had, and the next one works", async () => {
  await using blockd = await TestBlockd.start();
  const spec = blockd.spec("d1", MIB);
  await blockd.client.createDisk(spec);
  const c = await TestClient.connect(spec.socketPath);
  await c.write(0, Buffer.alloc(4096, 1));
  const impossible = { ...blockd.layer(), path: join(blockd.log, "data.lsmt") };
  await assert.rejects(blockd.client.sealDisk("d1", impossible), (e) => e instanceof AenvError);
  const taken = blockd.layer();
  mkdirSync(taken.path, { recursive: true });
  await assert.rejects(blockd.client.sealDisk("d1", taken), has("CONFLICT", taken.path));
  assert.equal((await c.write(4096, Buffer.alloc(4096, 2))).error, 0);
  const sealed = await blockd.client.sealDisk("d1", blockd.layer());
  assert.equal(sealed.extents, 1);
  assert.equal((await c.read(0, 8192)).data?.[4096], 2);
  c.close();
});

test("closing with deleteUpper false keeps the upper, and the same spec opens it again", async () => {
  await using blockd = await TestBlockd.start();
  const spec = blockd.spec("d1", MIB);
  await blockd.client.createDisk(spec);
  const c = await TestClient.connect(spec.socketPath);
  await c.write(4096, Buffer.alloc(4096, 7));
  await blockd.client.closeDisk("d1", { deleteUpper: false });
  await c.closed;
  await blockd.client.createDisk(spec);
  const again = await TestClient.connect(spec.socketPath);
  assert.ok((await again.read(4096, 4096)).data?.every((b) => b === 7));
  again.close();
});

test("two blockds never share a state folder, and a stale control socket is replaced", async () => {
  await using blockd = await TestBlockd.start();
  const main = resolve(import.meta.dirname, "main.ts");
  const args = [
    "--socket",
    blockd.path("other.sock"),
    "--state",
    blockd.path("state"),
    "--log",
    blockd.path("other.log"),
  ];
  await assert.rejects(run(process.execPath, [main, ...args]), /another blockd/);
  await blockd.client.ping();
  await blockd.end("SIGKILL");
  assert.ok(existsSync(blockd.path("blockd.sock")));
  await blockd.start();
});

test("bad control calls get a clear error and change nothing", async () => {
  await using blockd = await TestBlockd.start();
  const raw = (method: string, path: string, body: string): Promise<{ status: number; text: string }> =>
    new Promise((done, fail) => {
      const req = request({ socketPath: blockd.path("blockd.sock"), method, path }, (res) => {
        let text = "";
        res.on("data", (d: Buffer) => (text += d.toString()));
        res.on("end", () => done({ status: res.statusCode ?? 0, text }));
      });
      req.on("error", fail);
      req.end(body);
    });
  assert.equal((await raw("POST", "/disks", "{")).status, 400);
  assert.equal((await raw("POST", "/disks", "{}")).status, 400);
  assert.equal((await raw("POST", "/disks", " ".repeat(2 * MIB))).status, 413);
  assert.equal((await raw("GET", "/nothing", "")).status, 404);
  const spec = blockd.spec("d1", MIB);
  await assert.rejects(blockd.client.createDisk({ ...spec, disk: "../x" }), has("INVALID_ARGUMENT", "disk"));
  await assert.rejects(blockd.client.createDisk({ ...spec, upperDir: "/tmp/../etc" }), has("INVALID_ARGUMENT", ".."));
  const long = { ...spec, socketPath: `/tmp/${"x".repeat(120)}` };
  await assert.rejects(blockd.client.createDisk(long), has("INVALID_ARGUMENT", "socketPath"));
  await assert.rejects(
    blockd.client.createDisk({ ...spec, sizeBytes: 1000 as never }),
    has("INVALID_ARGUMENT", "4096"),
  );
  await assert.rejects(blockd.client.sealDisk("nope", blockd.layer()), has("NOT_FOUND", "nope"));
  assert.deepEqual(await blockd.client.listDisks(), []);
  await blockd.end("SIGTERM");
  await assert.rejects(blockd.client.ping(), (e) => e instanceof AenvError && e.code === "UNAVAILABLE");
});
