import assert from "node:assert/strict";
import test from "node:test";
import { progressLine } from "./progress.ts";

test("a known size gives a bar, a share, a rate and the time left", () => {
  const bar = "█".repeat(12) + "░".repeat(12);
  const line = progressLine(512 * 1024, 1024 * 1024, 1000, "/tmp/a", 120);
  assert.equal(line, `${bar}  50%  512 KiB / 1.00 MiB  512 KiB/s  1 s left  /tmp/a`);
});

test("an unknown size gives bytes and a rate", () => {
  assert.equal(progressLine(2048, undefined, 2000, "x", 80), "2.00 KiB  1.00 KiB/s  x");
});

test("a line never fills the last column, however narrow the terminal", () => {
  for (let width = 1; width < 130; width++)
    assert.ok(progressLine(5e9, 6e9, 1234, "/a/very/long/path/".repeat(9), width).length < width, `width ${width}`);
});

test("control characters of a name do not reach the terminal", () => {
  assert.ok(!progressLine(1, 2, 1, "\u001b[2Jx", 120).includes("\u001b"));
});
