import assert from "node:assert/strict";
import { test } from "node:test";
import { percentile, ratio, series, single } from "./series.ts";

test("percentiles interpolate between the closest ranks and leave the input as it is", () => {
  const samples = [4, 1, 3, 2];
  assert.equal(percentile(samples, 50), 2.5);
  assert.equal(percentile(samples, 0), 1);
  assert.equal(percentile(samples, 100), 4);
  assert.deepEqual(samples, [4, 1, 3, 2]);
  assert.throws(() => percentile([], 50), RangeError);
});

test("a single value has three equal percentiles, and a ratio divides them one by one", () => {
  assert.deepEqual(single("a", "ms", 4), { metric: "a", unit: "ms", n: 1, p50: 4, p95: 4, p99: 4 });
  const r = ratio("r", series("a", "ms", [2, 2]), series("b", "ms", [4, 4, 4]));
  assert.deepEqual(r, { metric: "r", unit: "x", n: 2, p50: 0.5, p95: 0.5, p99: 0.5 });
});
