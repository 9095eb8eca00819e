import assert from "node:assert/strict";
import { createHash, randomBytes } from "node:crypto";
import { test } from "node:test";
import {
  FileNotFoundError,
  type FilesystemEvent,
  FilesystemEventType,
  InvalidArgumentError,
  NotEnoughSpaceError,
} from "e2b";
import { eventually, sandboxFor } from "./node.ts";

const LIMIT = { timeout: 120_000 };

test("files are written, read in every format, listed, renamed and removed", LIMIT, async (t) => {
  const { files } = await sandboxFor(t);
  const info = await files.write("a/b/hello.txt", "héllo");
  assert.deepEqual(JSON.parse(JSON.stringify(info)), {
    name: "hello.txt",
    path: "/home/user/a/b/hello.txt",
    type: "file",
  });
  assert.equal(await files.read("a/b/hello.txt"), "héllo");
  assert.equal(Buffer.from(await files.read("a/b/hello.txt", { format: "bytes" })).toString(), "héllo");
  const listed = await files.list("a", { depth: 2 });
  assert.deepEqual(
    listed.map((e) => [e.path, e.type]),
    [
      ["/home/user/a/b", "dir"],
      ["/home/user/a/b/hello.txt", "file"],
    ],
  );
  assert.equal((await files.rename("a/b/hello.txt", "moved.txt")).path, "/home/user/moved.txt");
  assert.equal(await files.exists("a/b/hello.txt"), false);
  await files.remove("moved.txt");
  await assert.rejects(files.read("moved.txt"), FileNotFoundError);
});

test("an empty file, a file of odd bytes and many files at once come back equal", LIMIT, async (t) => {
  const { files } = await sandboxFor(t);
  await files.write("empty", "");
  assert.equal(await files.read("empty"), "");
  const noise = randomBytes(3_000_001);
  await files.write("noise", new Blob([noise]));
  assert.equal(Buffer.compare(Buffer.from(await files.read("noise", { format: "bytes" })), noise), 0);
  const many = Array.from({ length: 20 }, (_, i) => ({ path: `many/file ${i}.txt`, data: `content ${i}` }));
  assert.equal((await files.write(many)).length, 20);
  assert.equal(await files.read("many/file 13.txt"), "content 13");
});

test("a 32 MiB stream goes up and down unchanged, gzip included", LIMIT, async (t) => {
  const { files } = await sandboxFor(t);
  const chunk = randomBytes(1 << 20);
  const wanted = createHash("sha256");
  let sent = 0;
  const source = new ReadableStream<Uint8Array>({
    pull(controller) {
      if (sent++ === 32) return controller.close();
      wanted.update(chunk);
      controller.enqueue(new Uint8Array(chunk));
    },
  });
  await files.write("big", source, { gzip: true });
  const got = createHash("sha256");
  for await (const part of await files.read("big", { format: "stream", gzip: true })) got.update(part);
  assert.equal(got.digest("hex"), wanted.digest("hex"));
});

test("metadata is kept with a file, moves with it and is cleared by an upload without any", LIMIT, async (t) => {
  const { files } = await sandboxFor(t);
  const written = await files.write("m.txt", "x", { metadata: { origin: "test", stage: "1" } });
  assert.deepEqual(written.metadata, { origin: "test", stage: "1" });
  assert.deepEqual((await files.rename("m.txt", "n.txt")).metadata, { origin: "test", stage: "1" });
  await files.write("n.txt", "y");
  assert.deepEqual((await files.getInfo("n.txt")).metadata ?? {}, {});
});

test("a folder made twice is false, and links, modes and owners are told", LIMIT, async (t) => {
  const sandbox = await sandboxFor(t);
  assert.equal(await sandbox.files.makeDir("d/e"), true);
  assert.equal(await sandbox.files.makeDir("d/e"), false);
  await sandbox.commands.run("echo t > target; chmod 600 target; ln -s target link");
  const info = await sandbox.files.getInfo("link");
  assert.equal(info.symlinkTarget, "/home/user/target");
  assert.deepEqual([info.mode, info.owner, info.group], [0o600, "user", "user"]);
  await assert.rejects(sandbox.files.list("target"), InvalidArgumentError);
});

test("a watcher reports what happens, recursively", LIMIT, async (t) => {
  const { files } = await sandboxFor(t);
  await files.makeDir("w");
  const events: FilesystemEvent[] = [];
  const watch = await files.watchDir("w", (e) => void events.push(e), { recursive: true });
  await files.write("w/sub/one.txt", "1");
  await eventually(async () => events.some((e) => e.name === "sub" && e.type === FilesystemEventType.CREATE));
  await files.write("w/sub/two.txt", "2");
  await eventually(async () => events.some((e) => e.name === "sub/two.txt" && e.type === FilesystemEventType.WRITE));
  await files.remove("w/sub/two.txt");
  await eventually(async () => events.some((e) => e.name === "sub/two.txt" && e.type === FilesystemEventType.REMOVE));
  await watch.stop();
});

test("an upload to a full disk is told as no space, and the sandbox goes on", LIMIT, async (t) => {
  const sandbox = await sandboxFor(t);
  await sandbox.commands.run("mkdir /tmp/small && mount -t tmpfs -o size=1m tmpfs /tmp/small", { user: "root" });
  await assert.rejects(
    sandbox.files.write("/tmp/small/big", new Blob([randomBytes(4 << 20)]), { user: "root" }),
    NotEnoughSpaceError,
  );
  assert.equal((await sandbox.commands.run("echo alive")).stdout, "alive\n");
});
