import assert from "node:assert/strict";
import { test } from "node:test";
import type { Lineage, LineageNode } from "@aenv/client";
import { lineageLines } from "./lineage.ts";

const NOW = Date.parse("2026-01-01T01:00:00Z");
const size = { ownBytes: 1024, sharedBytes: 0 };
let minute = 0;
function state(nodeID: string, parentID: string | undefined, more: Partial<LineageNode> = {}): LineageNode {
  return {
    nodeID,
    ...(parentID === undefined ? {} : { parentID }),
    cause: "checkpoint",
    sandboxID: "ia",
    names: [],
    createdAt: new Date(Date.parse("2026-01-01T00:00:00Z") + minute++ * 60_000).toISOString(),
    memory: size,
    disk: size,
    ...more,
  };
}
const lines = (lineage: Lineage): string[] =>
  lineageLines(lineage, NOW, (_style, text) => text).map((l) => l.replace(/ {2}(\S+ ago.*)$/, ""));

test("states and sandboxes are a tree, with the line of the sandbox asked about going straight down", () => {
  minute = 0;
  const base: LineageNode = { ...state("root", undefined, { cause: "build", names: ["base"] }) };
  delete base.sandboxID;
  const lineage: Lineage = {
    sandboxID: "ia",
    nodeID: "two",
    nodes: [
      base,
      state("fork", "root", { cause: "fork" }),
      state("one", "fork", { names: ["before-tests"] }),
      state("side", "fork", { cause: "snapshot", sandboxID: "ib", names: ["default/kept:v1"] }),
      state("two", "one", { cause: "pause" }),
    ],
    sandboxes: [
      { sandboxID: "ib", nodeID: "side", state: "running" },
      { sandboxID: "ic", nodeID: "fork", state: "paused" },
      { sandboxID: "ia", nodeID: "two", state: "paused" },
    ],
  };
  assert.deepEqual(lines(lineage), [
    "● template base",
    "│",
    "● fork of ia",
    "├─○ ic paused",
    "├─● snapshot default/kept:v1 of ib",
    "│ ╰─○ ib running",
    "│",
    "● checkpoint before-tests of ia",
    "│",
    "● pause of ia",
    "╰─○ ia paused  ← this sandbox",
  ]);
});

test("a long chain stays in its column, and each line tells age and size", () => {
  minute = 0;
  const nodes = Array.from({ length: 50 }, (_, i) => state(`n${i}`, i === 0 ? undefined : `n${i - 1}`));
  const drawn = lineageLines({ sandboxID: "ia", nodeID: "n49", nodes, sandboxes: [] }, NOW, (_style, text) => text);
  assert.ok(drawn.every((l) => l.startsWith("●") || l === "│"));
  assert.equal(drawn[0], "● checkpoint of ia  1h00m ago, own 2.00 KiB, shared 0 B");
});

test("states whose parent is not told stand on their own, and a name cannot drive the terminal", () => {
  minute = 0;
  const nodes = [state("a", "gone"), state("b", undefined, { names: ["\u001b[2J"] })];
  const drawn = lines({ sandboxID: "ia", nodeID: "a", nodes, sandboxes: [] });
  assert.deepEqual(drawn, ["● checkpoint of ia", "● checkpoint \\x1b[2J of ia"]);
});
