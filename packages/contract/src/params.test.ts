import assert from "node:assert/strict";
import { test } from "node:test";
import fc from "fast-check";
import { z } from "zod";
import { decodeQuery, encodeQuery, fillPath } from "./params.ts";

const schema = z.object({
  limit: z.int().min(1).optional(),
  state: z.array(z.string()).optional(),
  name: z.string().optional(),
});

const raw = (query: string): Record<string, string | string[]> => {
  const out: Record<string, string | string[]> = {};
  for (const k of new Set(new URLSearchParams(query).keys())) {
    const all = new URLSearchParams(query).getAll(k);
    out[k] = all.length > 1 ? all : (all[0] ?? "");
  }
  return out;
};

test("query values get the types that the schema names", () => {
  assert.deepEqual(decodeQuery(schema, raw("limit=5&state=running,paused&name=7&unknown=1")), {
    limit: 5,
    state: ["running", "paused"],
    name: "7",
  });
});

test("a list may also repeat its name", () => {
  assert.deepEqual(decodeQuery(schema, raw("state=running&state=paused")), { state: ["running", "paused"] });
});

test("an empty value counts as not given", () => {
  assert.deepEqual(decodeQuery(schema, raw("limit=&state=&name=")), {});
});

test("what is no number stays text, for the schema to refuse", () => {
  for (const bad of ["abc", "1e9", "0x10", " 1", "١", "--1"]) {
    const decoded = decodeQuery(schema, { limit: bad });
    assert.equal(decoded["limit"], bad);
    assert.equal(schema.safeParse(decoded).success, false);
  }
});

test("names of Object.prototype are no query values", () => {
  assert.deepEqual(decodeQuery(z.object({ constructor: z.string().optional() }), {}), {});
});

test("a query is read back as a client wrote it", () => {
  // An empty text or list counts as not given, and a comma separates.
  const item = fc.string({ minLength: 1, maxLength: 8, unit: "grapheme" }).filter((s) => !s.includes(","));
  const values = fc.record(
    {
      limit: fc.integer({ min: -1e9, max: 1e9 }),
      state: fc.array(item, { minLength: 1, maxLength: 3 }),
      name: fc.string({ minLength: 1, maxLength: 8, unit: "grapheme" }),
    },
    { requiredKeys: [] },
  );
  fc.assert(
    fc.property(values, (v) => {
      assert.deepEqual(decodeQuery(schema, raw(encodeQuery(v).slice(1))), { ...v });
    }),
    { numRuns: 300 },
  );
});

test("path values are one segment each, whatever they hold", () => {
  assert.equal(fillPath("/templates/{templateID}", { templateID: "team/name:tag" }), "/templates/team%2Fname%3Atag");
  assert.throws(() => fillPath("/a/{b}", {}), TypeError);
});
