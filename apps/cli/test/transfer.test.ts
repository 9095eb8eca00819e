import assert from "node:assert/strict";
import { createHash, randomBytes } from "node:crypto";
import { chmodSync, mkdirSync, readdirSync, readFileSync, statSync, symlinkSync, writeFileSync } from "node:fs";
import { join } from "node:path";
import { after, before, describe, test } from "node:test";
import { finished, startSandbox, Terminal, temporaryFolder } from "./harness.ts";

describe("files", () => {
  let world: Awaited<ReturnType<typeof startSandbox>>;
  before(async () => {
    world = await startSandbox();
  });
  after(async () => {
    await world[Symbol.asyncDispose]();
  });
  const sha = (data: Buffer): string => createHash("sha256").update(data).digest("hex");

  test("a file goes up and comes back, its bytes and permissions kept", async () => {
    using here = temporaryFolder();
    using there = temporaryFolder();
    const data = randomBytes(5 * 1024 * 1024 + 17);
    writeFileSync(join(here.path, "a.bin"), data);
    chmodSync(join(here.path, "a.bin"), 0o750);
    await world.cli.ok(["upload", world.id, join(here.path, "a.bin"), join(there.path, "b.bin")]);
    assert.equal(sha(readFileSync(join(there.path, "b.bin"))), sha(data));
    assert.equal(statSync(join(there.path, "b.bin")).mode & 0o7777, 0o750);
    const said = JSON.parse(
      await world.cli.ok(["download", "--json", world.id, join(there.path, "b.bin"), join(here.path, "c.bin")]),
    ) as { files: number; bytes: number; local: string };
    assert.deepEqual([said.files, said.bytes, said.local], [1, data.length, join(here.path, "c.bin")]);
    assert.equal(sha(readFileSync(join(here.path, "c.bin"))), sha(data));
    assert.equal(statSync(join(here.path, "c.bin")).mode & 0o7777, 0o750);
  });

  test("an empty file stays one", async () => {
    using here = temporaryFolder();
    using there = temporaryFolder();
    writeFileSync(join(here.path, "empty"), "");
    await world.cli.ok(["upload", world.id, join(here.path, "empty"), `${there.path}/`]);
    assert.equal(statSync(join(there.path, "empty")).size, 0);
    await world.cli.ok(["download", world.id, join(there.path, "empty"), join(here.path, "back")]);
    assert.equal(statSync(join(here.path, "back")).size, 0);
  });

  test("a folder goes up and comes back: depth, names, empty folders, permissions, links followed", async () => {
    using here = temporaryFolder();
    using there = temporaryFolder();
    const tree = join(here.path, "tree");
    mkdirSync(join(tree, "deep/er"), { recursive: true });
    mkdirSync(join(tree, "empty"), { mode: 0o700 });
    writeFileSync(join(tree, "deep/er/x y.txt"), "spaces");
    writeFileSync(join(tree, "ünï & $HOME"), "odd name");
    writeFileSync(join(tree, "run.sh"), "#!/bin/sh\n", { mode: 0o755 });
    symlinkSync("run.sh", join(tree, "link"));
    await world.cli.ok(["upload", world.id, tree, there.path]);
    const up = join(there.path, "tree");
    assert.deepEqual(namesBelow(up), namesBelow(tree));
    assert.equal(readFileSync(join(up, "deep/er/x y.txt"), "utf8"), "spaces");
    assert.equal(readFileSync(join(up, "link"), "utf8"), "#!/bin/sh\n");
    assert.equal(statSync(join(up, "run.sh")).mode & 0o777, 0o755);
    assert.equal(statSync(join(up, "empty")).mode & 0o777, 0o700);
    await world.cli.ok(["download", world.id, up, join(here.path, "back")]);
    const back = join(here.path, "back");
    assert.deepEqual(namesBelow(back), namesBelow(tree));
    assert.equal(readFileSync(join(back, "ünï & $HOME"), "utf8"), "odd name");
    assert.equal(statSync(join(back, "run.sh")).mode & 0o777, 0o755);
  });

  test("links that lead nowhere or in a circle are named and do not stop the rest", async () => {
    using here = temporaryFolder();
    using there = temporaryFolder();
    const tree = join(here.path, "tree");
    mkdirSync(tree);
    writeFileSync(join(tree, "good"), "1");
    symlinkSync("nowhere", join(tree, "dangling"));
    symlinkSync(".", join(tree, "circle"));
    const r = await world.cli.run(["upload", world.id, tree, there.path]);
    assert.equal(r.code, 1);
    assert.match(r.stderr, /dangling: the link leads nowhere/);
    assert.match(r.stderr, /circle: the link leads back/);
    assert.equal(readFileSync(join(there.path, "tree/good"), "utf8"), "1");
  });

  test("standard input becomes a file, a file goes to standard output", async () => {
    using there = temporaryFolder();
    const path = join(there.path, "piped");
    const data = randomBytes(1024 * 1024);
    const up = await world.cli.run(["upload", world.id, "-", path], { input: data });
    assert.equal(up.code, 0, up.stderr);
    assert.equal(sha(readFileSync(path)), sha(data));
    const child = world.cli.spawn(["download", world.id, path, "-"]);
    const parts: Buffer[] = [];
    child.stdout?.on("data", (d: Buffer) => parts.push(d));
    assert.equal((await finished(child)).code, 0);
    assert.equal(sha(Buffer.concat(parts)), sha(data));
  });

  test("an existing file is only replaced with --force", async () => {
    using here = temporaryFolder();
    using there = temporaryFolder();
    writeFileSync(join(there.path, "f"), "new");
    writeFileSync(join(here.path, "f"), "old");
    const r = await world.cli.run(["download", world.id, join(there.path, "f"), here.path]);
    assert.equal(r.code, 6);
    assert.match(r.stderr, /exists already/);
    assert.equal(readFileSync(join(here.path, "f"), "utf8"), "old");
    await world.cli.ok(["download", "--force", world.id, join(there.path, "f"), here.path]);
    assert.equal(readFileSync(join(here.path, "f"), "utf8"), "new");
  });

  test("what is missing is named, here and there, and nothing is left behind", async () => {
    using here = temporaryFolder();
    const up = await world.cli.run(["upload", world.id, join(here.path, "none")]);
    assert.equal(up.code, 3);
    assert.match(up.stderr, /none does not exist here/);
    const down = await world.cli.run(["download", world.id, "/no/such/file", here.path]);
    assert.equal(down.code, 3);
    assert.match(down.stderr, /\/no\/such\/file/);
    assert.deepEqual(readdirSync(here.path), []);
    const folder = await world.cli.run(["download", world.id, "/etc/hostname", join(here.path, "no/such/folder")]);
    assert.equal(folder.code, 3);
  });

  test("a folder does not go to standard output, and the error says what does", async () => {
    using there = temporaryFolder();
    const r = await world.cli.run(["download", world.id, there.path, "-"]);
    assert.equal(r.code, 2);
    assert.match(r.stderr, /tar c/);
  });

  test("an interrupted download leaves no half file", async () => {
    using here = temporaryFolder();
    using there = temporaryFolder();
    // Too big to be through before the signal, and without blocks on the disk.
    await world.cli.ok(["exec", world.id, "--", "truncate", "-s", "8G", join(there.path, "huge")]);
    const child = world.cli.spawn(["download", world.id, join(there.path, "huge"), here.path]);
    const ended = finished(child);
    await appears(here.path);
    child.kill("SIGINT");
    assert.equal((await ended).code, 130);
    assert.deepEqual(readdirSync(here.path), []);
  });

  test("on a terminal a bar shows share, rate and name, and is gone at the end", async () => {
    using here = temporaryFolder();
    using there = temporaryFolder();
    writeFileSync(join(here.path, "big.bin"), Buffer.alloc(96 * 1024 * 1024));
    const args = ["upload", world.id, join(here.path, "big.bin"), there.path];
    await using t = new Terminal(world.cli, args, [100, 24]);
    assert.equal((await t.ended()).exit, 0);
    assert.match(t.output, /[█░]{24} +\d+% {2}[\d.]+ MiB \/ 96\.0 MiB {2}[\d.]+ \wiB\/s/);
    assert.ok(t.output.includes("\r\u001b[K1 file, 96.0 MiB in "), t.output.slice(-200));
  });

  test("many small files go at once and all arrive", async () => {
    using here = temporaryFolder();
    using there = temporaryFolder();
    const tree = join(here.path, "many");
    mkdirSync(tree);
    for (let i = 0; i < 120; i++) writeFileSync(join(tree, `f${i}`), String(i));
    await world.cli.ok(["upload", "-p", "8", world.id, tree, there.path]);
    for (let i = 0; i < 120; i++) assert.equal(readFileSync(join(there.path, "many", `f${i}`), "utf8"), String(i));
  });
});

const namesBelow = (folder: string): string[] => readdirSync(folder, { recursive: true, encoding: "utf8" }).toSorted();

async function appears(folder: string): Promise<void> {
  const { watch } = await import("node:fs/promises");
  const stop = new AbortController();
  const watcher = watch(folder, { signal: stop.signal });
  if (readdirSync(folder).length > 0) return stop.abort();
  for await (const _ of watcher) return stop.abort();
}
