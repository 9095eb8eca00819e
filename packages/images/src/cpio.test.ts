import assert from "node:assert/strict";
import { execFileSync } from "node:child_process";
import { test } from "node:test";
import { writeCpio } from "./cpio.ts";
import { moduleDepends } from "./initramfs.ts";

test("GNU cpio lists the archive with modes, device numbers, sizes and link targets", () => {
  const archive = writeCpio([
    { name: "dev", type: "dir", mode: 0o755 },
    { name: "dev/console", type: "char", mode: 0o600, major: 5, minor: 1 },
    { name: "init", type: "file", mode: 0o755, data: Buffer.alloc(12_345, 7) },
    { name: "odd", type: "file", mode: 0o640, data: Buffer.from("abc") },
    { name: "link", type: "symlink", target: "init" },
  ]);
  const listing = execFileSync("cpio", ["-itv", "--quiet"], { input: archive }).toString();
  const rows = listing
    .trim()
    .split("\n")
    .map((l) => l.replace(/\s+/g, " "));
  assert.match(rows[0] ?? "", /^drwxr-xr-x .* dev$/);
  assert.match(rows[1] ?? "", /^crw------- .* 5, 1 .* dev\/console$/);
  assert.match(rows[2] ?? "", /^-rwxr-xr-x .* 12345 .* init$/);
  assert.match(rows[3] ?? "", /^-rw-r----- .* 3 .* odd$/);
  assert.match(rows[4] ?? "", /^lrwxrwxrwx .* link -> init$/);
  const content = execFileSync("cpio", ["-i", "--quiet", "--to-stdout", "odd"], { input: archive });
  assert.equal(content.toString(), "abc");
});

test("a module's dependencies are read from its modinfo with dashes made canonical", () => {
  const ko = (depends: string): Buffer => Buffer.from(`\x7fELF\0license=GPL\0depends=${depends}\0name=x\0`, "latin1");
  assert.deepEqual(moduleDepends(ko("virtio,virtio-ring")), ["virtio", "virtio_ring"]);
  assert.deepEqual(moduleDepends(ko("")), []);
  assert.deepEqual(moduleDepends(Buffer.from("no modinfo")), []);
});
