import assert from "node:assert/strict";
import { execFileSync } from "node:child_process";
import { mkdirSync, readFileSync, statSync, symlinkSync, writeFileSync } from "node:fs";
import { join } from "node:path";
import { after, before, test } from "node:test";
import {
  FileNotFoundError,
  type FilesystemEvent,
  FilesystemEventType,
  InvalidArgumentError,
  NotEnoughSpaceError,
  type Sandbox,
} from "e2b";
import { type Envd, eventually, startEnvd } from "./envd.ts";

let envd: Envd;
let sandbox: Sandbox;
before(async () => {
  envd = await startEnvd();
  sandbox = await envd.sandbox();
});
after(() => envd[Symbol.asyncDispose]());
const at = (name: string): string => join(envd.dir, name);

test("what was written is read back, as text, bytes, stream and blob, also when it is empty", async () => {
  for (const content of ["", "héllo", "x".repeat(3_000_000)]) {
    const info = await sandbox.files.write(at("deep/er/a.txt"), content);
    assert.deepEqual([info.name, info.path, info.type], ["a.txt", at("deep/er/a.txt"), "file"]);
    assert.equal(await sandbox.files.read(at("deep/er/a.txt")), content);
    assert.deepEqual(
      Buffer.from(await sandbox.files.read(at("deep/er/a.txt"), { format: "bytes" })),
      Buffer.from(content),
    );
    const blob = await sandbox.files.read(at("deep/er/a.txt"), { format: "blob" });
    assert.equal(await blob.text(), content);
    assert.equal(await sandbox.files.read(at("deep/er/a.txt"), { gzip: true }), content);
    const stream = await sandbox.files.read(at("deep/er/a.txt"), { format: "stream" });
    assert.equal(await new Response(stream).text(), content);
  }
  assert.equal(statSync(at("deep/er/a.txt")).mode & 0o777, 0o644);
  assert.equal(statSync(at("deep/er")).mode & 0o777, 0o755);
});

test("compressed and streamed uploads arrive unharmed", async () => {
  await sandbox.files.write(at("gz"), "z".repeat(500_000), { gzip: true });
  assert.equal(readFileSync(at("gz"), "utf8"), "z".repeat(500_000));
  const stream = new Blob(["a".repeat(200_000)]).stream();
  await sandbox.files.write(at("streamed"), stream);
  assert.equal(statSync(at("streamed")).size, 200_000);
});

test("several files of one request are answered in order", async () => {
  const infos = await sandbox.files.write([
    { path: at("m/1"), data: "1" },
    { path: at("m/2"), data: "22" },
  ]);
  assert.deepEqual(
    infos.map((i) => i.path),
    [at("m/1"), at("m/2")],
  );
});

test("metadata is kept over a rename and cleared by an upload without it", async () => {
  const written = await sandbox.files.write(at("meta"), "x", { metadata: { Owner: "me" } });
  assert.deepEqual(written.metadata, { owner: "me" });
  assert.deepEqual((await sandbox.files.rename(at("meta"), at("meta2"))).metadata, { owner: "me" });
  assert.deepEqual((await sandbox.files.getInfo(at("meta2"))).metadata, { owner: "me" });
  await sandbox.files.write(at("meta2"), "y");
  assert.equal((await sandbox.files.getInfo(at("meta2"))).metadata, undefined);
});

test("a link has the type of its target and names it", async () => {
  writeFileSync(at("real"), "12345", { mode: 0o600 });
  symlinkSync("real", at("link"));
  const info = await sandbox.files.getInfo(at("link"));
  assert.deepEqual([info.type, info.symlinkTarget, info.mode, info.permissions[0]], ["file", at("real"), 0o600, "L"]);
  symlinkSync("nowhere", at("broken"));
  assert.equal((await sandbox.files.getInfo(at("broken"))).symlinkTarget, at("nowhere"));
  assert.equal(await sandbox.files.exists(at("broken")), true);
});

test("a recursive listing comes sorted, each directory before its contents", async () => {
  for (const dir of ["l/sub1/a", "l/sub1/b", "l/sub2/c"]) mkdirSync(at(dir), { recursive: true });
  writeFileSync(at("l/file1.txt"), "");
  symlinkSync(at("l"), at("l-link"));
  const names = async (path: string, depth: number): Promise<string[]> =>
    (await sandbox.files.list(path, { depth })).map((e) => e.path.slice(path.length + 1));
  assert.deepEqual(await names(at("l"), 1), ["file1.txt", "sub1", "sub2"]);
  const two = ["file1.txt", "sub1", "sub1/a", "sub1/b", "sub2", "sub2/c"];
  assert.deepEqual(await names(at("l"), 2), two);
  assert.deepEqual(await names(at("l-link"), 3), two);
});

test("directories are made once, removed twice, and files are not directories", async () => {
  assert.equal(await sandbox.files.makeDir(at("d/e")), true);
  assert.equal(await sandbox.files.makeDir(at("d/e")), false);
  writeFileSync(at("plain"), "");
  await assert.rejects(sandbox.files.makeDir(at("plain")), InvalidArgumentError);
  await assert.rejects(sandbox.files.list(at("plain")), InvalidArgumentError);
  await assert.rejects(sandbox.files.read(at("d")), InvalidArgumentError);
  await assert.rejects(sandbox.files.read(at("nothing")), FileNotFoundError);
  await assert.rejects(sandbox.files.list(at("nothing")), FileNotFoundError);
  await assert.rejects(sandbox.files.rename(at("nothing"), at("x")), FileNotFoundError);
  await sandbox.files.remove(at("d"));
  await sandbox.files.remove(at("d"));
  assert.equal(await sandbox.files.exists(at("d")), false);
  await assert.rejects(sandbox.files.remove("/"), InvalidArgumentError);
});

test("a relative path starts at the home of the user", async (t) => {
  const name = `aenv-test-${process.pid}`;
  t.after(() => sandbox.files.remove(name));
  assert.equal((await sandbox.files.write(`${name}/x`, "1")).path, `/root/${name}/x`);
  assert.equal((await sandbox.files.getInfo(`~/${name}/x`)).path, `/root/${name}/x`);
  await assert.rejects(sandbox.files.getInfo("~other/x"), InvalidArgumentError);
});

test("files of /proc, which claim to be empty, are read to their end", async () => {
  assert.equal(await sandbox.files.read("/proc/version"), readFileSync("/proc/version", "utf8"));
  assert.equal(await sandbox.files.read("/proc/version", { gzip: true }), readFileSync("/proc/version", "utf8"));
});

test("a full disk is told apart, and the half file is gone", async (t) => {
  mkdirSync(at("small"));
  execFileSync("mount", ["-t", "tmpfs", "-o", "size=256k", "tmpfs", at("small")]);
  t.after(() => execFileSync("umount", [at("small")]));
  await assert.rejects(sandbox.files.write(at("small/big"), "x".repeat(2_000_000)), NotEnoughSpaceError);
  assert.equal(await sandbox.files.exists(at("small/big")), false);
  await sandbox.files.write(at("small/fits"), "x");
});

const KINDS = {
  create: FilesystemEventType.CREATE,
  write: FilesystemEventType.WRITE,
  remove: FilesystemEventType.REMOVE,
  rename: FilesystemEventType.RENAME,
  chmod: FilesystemEventType.CHMOD,
};

test("a recursive watch tells what happens, also in directories made later, with the entries", async () => {
  mkdirSync(at("w"));
  const events: FilesystemEvent[] = [];
  const handle = await sandbox.files.watchDir(at("w"), (e) => void events.push(e), {
    recursive: true,
    includeEntry: true,
  });
  const wait = (type: keyof typeof KINDS, name: string): Promise<FilesystemEvent> =>
    eventually(() => events.find((e) => e.type === KINDS[type] && e.name === name));
  await sandbox.files.write(at("w/a"), "1");
  assert.equal((await wait("create", "a")).entry?.path, at("w/a"));
  await wait("write", "a");
  await sandbox.files.makeDir(at("w/new/deep"));
  await wait("create", "new/deep");
  await sandbox.files.write(at("w/new/deep/f"), "1");
  await wait("write", "new/deep/f");
  await sandbox.files.rename(at("w/a"), at("w/b"));
  assert.equal((await wait("rename", "a")).entry, undefined);
  await wait("create", "b");
  await sandbox.commands.run(`chmod 600 ${at("w/b")}; mv ${at("w/new")} ${at("w/moved")}`);
  assert.equal((await wait("chmod", "b")).entry?.mode, 0o600);
  await sandbox.files.write(at("w/moved/deep/g"), "1");
  await wait("create", "moved/deep/g");
  await sandbox.files.remove(at("w/b"));
  assert.equal((await wait("remove", "b")).entry, undefined);
  await handle.stop();
});

test("only directories that exist can be watched", async () => {
  writeFileSync(at("file"), "");
  await assert.rejects(
    sandbox.files.watchDir(at("file"), () => {}),
    InvalidArgumentError,
  );
  await assert.rejects(
    sandbox.files.watchDir(at("missing"), () => {}),
    FileNotFoundError,
  );
});
