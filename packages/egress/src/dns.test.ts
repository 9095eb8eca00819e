import assert from "node:assert/strict";
import { test } from "node:test";
import fc from "fast-check";
import { answer, parseQuestion, RCODE, TYPE_A } from "./dns.ts";
import { Names, Pins } from "./names.ts";

function question(name: string, type = TYPE_A, flags = 0x0100, count = 1): Buffer {
  const head = Buffer.alloc(12);
  head.writeUInt16BE(77, 0);
  head.writeUInt16BE(flags, 2);
  head.writeUInt16BE(count, 4);
  const labels = name.split(".").map((l) => Buffer.concat([Buffer.from([l.length]), Buffer.from(l)]));
  return Buffer.concat([head, ...labels, Buffer.from([0, type >> 8, type & 255, 0, 1])]);
}

test("a question is read, in lower case", () => {
  const q = parseQuestion(question("WWW.Example.com", 28));
  assert.ok(q && "name" in q);
  assert.deepEqual([q.id, q.name, q.type, q.recursion], [77, "www.example.com", 28, true]);
});

test("what is no single question is refused, and an answer is not answered", () => {
  assert.equal(parseQuestion(question("a.test", 1, 0x8100)), undefined);
  assert.equal(parseQuestion(Buffer.alloc(11)), undefined);
  assert.deepEqual(parseQuestion(question("a.test", 1, 0x2800)), { id: 77, rcode: RCODE.notImp });
  assert.deepEqual(parseQuestion(question("a.test", 1, 0x0100, 2)), { id: 77, rcode: RCODE.formErr });
  const pointing = question("a.test");
  pointing[12] = 0xc0;
  assert.deepEqual(parseQuestion(pointing), { id: 77, rcode: RCODE.formErr });
  assert.deepEqual(parseQuestion(question("a.test").subarray(0, -1)), { id: 77, rcode: RCODE.formErr });
});

test("no bytes make the reader throw, and every answer fits into 512 bytes", () => {
  fc.assert(
    fc.property(fc.uint8Array({ maxLength: 600 }), (bytes) => {
      parseQuestion(Buffer.from(bytes));
    }),
  );
  const q = parseQuestion(question(Array<string>(4).fill("a".repeat(62)).join(".")));
  assert.ok(q && "name" in q);
  assert.ok(answer(q, RCODE.ok, Array<string>(40).fill("1.2.3.4"), 60).length <= 512);
});

const lookup = (found: Record<string, { address: string; ttl: number }[]>, asked: string[] = []) => ({
  setServers: () => {},
  resolve4: async (name: string) => {
    asked.push(name);
    const answers = found[name];
    if (!answers) throw Object.assign(new Error(name), { code: "ENOTFOUND" });
    return answers;
  },
});

test("forbidden addresses are in no answer; what is left without any does not exist", async () => {
  const found = {
    "a.test": [
      { address: "10.0.0.1", ttl: 5 },
      { address: "9.9.9.9", ttl: 50 },
    ],
    "b.test": [{ address: "10.0.0.1", ttl: 5 }],
  };
  const names = new Names(lookup(found), () => 0);
  names.configure([], (ip) => ip.startsWith("10."));
  assert.deepEqual(await names.resolve("a.test"), { addresses: ["9.9.9.9"], ttl: 50 });
  assert.deepEqual(await names.resolve("b.test"), { failure: "unknown" });
  assert.deepEqual(await names.resolve("c.test"), { failure: "unknown" });
});

test("an answer is asked for once in its time, by however many at once", async () => {
  let now = 0;
  const asked: string[] = [];
  const names = new Names(lookup({ "a.test": [{ address: "9.9.9.9", ttl: 10 }] }, asked), () => now);
  names.configure([], () => false);
  await Promise.all([names.resolve("a.test"), names.resolve("a.test")]);
  now = 9999;
  await names.resolve("a.test");
  assert.deepEqual(asked, ["a.test"]);
  now = 10_001;
  await names.resolve("a.test");
  assert.deepEqual(asked, ["a.test", "a.test"]);
});

test("what a guest was told holds for its time and a grace, for that name only, and is bounded", () => {
  let now = 0;
  const pins = new Pins(() => now);
  pins.add("a.test", { addresses: ["9.9.9.9"], ttl: 10 });
  assert.ok(pins.has("a.test", "9.9.9.9"));
  assert.ok(!pins.has("b.test", "9.9.9.9"));
  now = 10_000 + 11 * 60_000;
  assert.ok(!pins.has("a.test", "9.9.9.9"));
  now = 0;
  for (let i = 0; i < 100; i++) pins.add("a.test", { addresses: [`1.1.1.${i}`], ttl: 10 });
  assert.ok(!pins.has("a.test", "1.1.1.0"));
  assert.ok(pins.has("a.test", "1.1.1.99"));
  for (let i = 0; i < 2000; i++) pins.add(`n${i}.test`, { addresses: ["1.1.1.1"], ttl: 10 });
  assert.ok(!pins.has("a.test", "1.1.1.99"));
});
