import assert from "node:assert/strict";
import { test } from "node:test";
import fc from "fast-check";
import {
  blockOf,
  type Cidr,
  chooseBlock,
  coverIps,
  formatCidr,
  formatIp,
  lastOf,
  mergeCidrs,
  overlaps,
  parseCidr,
  parseIp,
} from "./address.ts";

const anyIp = fc.integer({ min: 0, max: 2 ** 32 - 1 });
const anyCidr = fc
  .tuple(anyIp, fc.integer({ min: 0, max: 32 }))
  .map(([ip, bits]) => parseCidr(`${formatIp(ip)}/${bits}`));
const within = (ip: number, c: Cidr): boolean => c.base <= ip && ip <= lastOf(c);

test("addresses and prefixes survive printing and parsing", () => {
  fc.assert(fc.property(anyIp, (ip) => parseIp(formatIp(ip)) === ip));
  fc.assert(fc.property(anyCidr, (c) => assert.deepEqual(parseCidr(formatCidr(c)), c)));
});

test("what is no IPv4 address or prefix is refused", () => {
  for (const bad of ["", "1.2.3", "1.2.3.4.5", "256.1.1.1", "01.2.3.4", "1.2.3.4 ", "::1", "1.2.3.-4", "a.b.c.d"])
    assert.throws(() => parseIp(bad), { code: "INVALID_ARGUMENT" }, bad);
  for (const bad of ["1.2.3.4/33", "1.2.3.4/", "1.2.3.4/8/8", "1.2.3.4/-1", "1.2.3.4/8 }; flush ruleset"])
    assert.throws(() => parseCidr(bad), { code: "INVALID_ARGUMENT" }, bad);
});

test("merging keeps the covered addresses and leaves no overlap", () => {
  fc.assert(
    fc.property(fc.array(anyCidr, { maxLength: 20 }), anyIp, (list, ip) => {
      const merged = mergeCidrs(list);
      assert.equal(
        merged.some((c) => within(ip, c)),
        list.some((c) => within(ip, c)),
      );
      for (const c of list) assert.ok(merged.some((m) => within(c.base, m) && within(lastOf(c), m)));
      merged.forEach((c, i) => assert.ok(!merged.slice(i + 1).some((d) => overlaps(c, d))));
    }),
  );
});

test("a cover of slots holds these slots' addresses and no other slot's", () => {
  const base = parseIp("10.128.0.0");
  fc.assert(
    fc.property(fc.uniqueArray(fc.integer({ min: 0, max: 200 })), (indexes) => {
      const cover = coverIps(indexes.map((i) => base + 2 * i + 1));
      for (let i = 0; i <= 201; i++)
        assert.equal(
          cover.some((c) => within(base + 2 * i + 1, c)),
          indexes.includes(i),
        );
    }),
  );
  const all = Array.from({ length: 64 }, (_, i) => base + 2 * i + 1);
  assert.deepEqual(coverIps(all).map(formatCidr), ["10.128.0.0/25"]);
});

test("the chosen block overlaps nothing that is taken, follows from the instance, and differs between instances", () => {
  assert.equal(formatCidr(chooseBlock("fe01", [])), formatCidr(chooseBlock("fe01", [])));
  const first = Array.from({ length: 64 }, (_, i) => formatCidr(chooseBlock(i.toString(16).padStart(4, "0"), [])));
  assert.equal(new Set(first).size, 64);
  fc.assert(
    fc.property(
      fc.array(
        anyCidr.filter((c) => c.bits >= 10),
        { maxLength: 30 },
      ),
      (taken) => {
        const block = chooseBlock("0001", taken);
        assert.ok(!taken.some((t) => overlaps(t, block)));
        assert.deepEqual(blockOf(block.base + 77), block);
      },
    ),
  );
  assert.match(formatCidr(chooseBlock("0001", [parseCidr("10.0.0.0/8")])), /^100\./);
  assert.throws(() => chooseBlock("0001", [parseCidr("0.0.0.0/0")]), { code: "UNAVAILABLE" });
});
