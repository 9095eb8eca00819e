import assert from "node:assert/strict";
import { test } from "node:test";
import { Deadlines } from "./expiry.ts";
import { ManualClock } from "./testing.ts";

test("keys fire in the order of their time, each once, at its time", () => {
  const clock = new ManualClock();
  const fired: [string, number][] = [];
  const start = clock.now();
  const due = new Deadlines<string>(clock, (key) => fired.push([key, clock.now() - start]));
  for (const [key, ms] of [
    ["c", 30],
    ["a", 10],
    ["d", 400_000],
    ["b", 20],
  ] as const)
    due.set(key, start + ms);
  clock.advance(1_000_000);
  assert.deepEqual(fired, [
    ["a", 10],
    ["b", 20],
    ["c", 30],
    ["d", 400_000],
  ]);
  assert.equal(due.size, 0);
});

test("a key that was moved fires only at its last time, and a removed one never", () => {
  const clock = new ManualClock();
  const fired: string[] = [];
  const due = new Deadlines<string>(clock, (key) => fired.push(key));
  const at = clock.now();
  due.set("later", at + 10);
  due.set("sooner", at + 1000);
  due.set("gone", at + 10);
  due.set("later", at + 50);
  due.set("sooner", at + 5);
  due.delete("gone");
  clock.advance(20);
  assert.deepEqual(fired, ["sooner"]);
  clock.advance(30);
  assert.deepEqual(fired, ["sooner", "later"]);
});

test("thousands of keys, moved again and again, fire in order", () => {
  const clock = new ManualClock();
  const fired: number[] = [];
  const at = clock.now();
  const want = new Map<number, number>();
  const due = new Deadlines<number>(clock, (key) => fired.push(want.get(key) ?? -1));
  for (let round = 0; round < 5; round++)
    for (let key = 0; key < 2000; key++) {
      const ms = (key * 7919 + round * 104_729) % 100_003;
      want.set(key, ms);
      due.set(key, at + ms);
    }
  clock.advance(100_003);
  assert.equal(fired.length, 2000);
  assert.deepEqual(
    fired,
    [...fired].sort((a, b) => a - b),
  );
});

test("nothing fires after close, and a key set while another fires is kept", () => {
  const clock = new ManualClock();
  const fired: string[] = [];
  const due = new Deadlines<string>(clock, (key) => {
    fired.push(key);
    if (key === "first") due.set("second", clock.now() + 5);
  });
  due.set("first", clock.now() + 5);
  clock.advance(20);
  assert.deepEqual(fired, ["first", "second"]);
  due.set("third", clock.now() + 5);
  due.close();
  clock.advance(20);
  assert.deepEqual(fired, ["first", "second"]);
});
