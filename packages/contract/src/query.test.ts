import assert from "node:assert/strict";
import { test } from "node:test";
import { AenvError } from "@aenv/base";
import fc from "fast-check";
import {
  type Cursor,
  encodeCursor,
  encodeMetadataFilter,
  parseCursor,
  parseInstant,
  parseMetadataFilter,
} from "./query.ts";

const RUNS = { numRuns: 300 };

/** Runs the parser on anything: it gives a value or throws INVALID_ARGUMENT, nothing else. */
function onlyRefuses(parse: () => unknown): void {
  try {
    parse();
  } catch (e) {
    assert.ok(e instanceof AenvError, String(e));
    assert.equal(e.code, "INVALID_ARGUMENT");
  }
}

// Lone surrogates are no text: encodeURIComponent refuses them.
const text = fc.string({ unit: "grapheme", maxLength: 20 });

test("a metadata filter is read back as it was written, through the URL", () => {
  fc.assert(
    fc.property(fc.dictionary(text, text, { noNullPrototype: true, maxKeys: 5 }), (metadata) => {
      const url = new URL("http://x/");
      url.searchParams.set("metadata", encodeMetadataFilter(metadata));
      const arrived = new URL(url.href).searchParams.get("metadata") ?? "";
      assert.deepEqual(parseMetadataFilter(arrived), new Map(Object.entries(metadata)));
    }),
    RUNS,
  );
});

test("the metadata filter of the SDKs is doubly encoded", () => {
  const arrived = new URL("http://x/?metadata=k%2525201%3Dv%252526w").searchParams.get("metadata") ?? "";
  assert.deepEqual([...parseMetadataFilter(arrived)], [["k 1", "v&w"]]);
});

test("a metadata filter written by hand with one encoding parses too", () => {
  assert.deepEqual(
    [...parseMetadataFilter("user=abc&purpose=demo")],
    [
      ["user", "abc"],
      ["purpose", "demo"],
    ],
  );
  assert.deepEqual([...parseMetadataFilter("")], []);
});

test("a metadata filter that no sandbox can match is refused", () => {
  assert.throws(() => parseMetadataFilter("a=1&a=2"), { code: "INVALID_ARGUMENT" });
  assert.throws(() => parseMetadataFilter("a=%25zz"), { code: "INVALID_ARGUMENT" });
});

test("parsers of the API refuse what they do not understand, and never fail otherwise", () => {
  const anything = fc.oneof(fc.string({ unit: "binary", maxLength: 200 }), text, fc.webQueryParameters());
  fc.assert(
    fc.property(anything, (s) => {
      onlyRefuses(() => parseMetadataFilter(s));
      onlyRefuses(() => parseCursor(s));
      onlyRefuses(() => parseInstant("startedAfter", s));
    }),
    { numRuns: 2000 },
  );
});

const cursor = fc.record<Cursor>({
  at: fc.integer({ min: 0, max: 4e12 }),
  id: fc.stringMatching(/^[a-z0-9]{1,64}$/),
  order: fc.constantFrom("asc", "desc"),
});

test("a cursor is read back as it was written", () => {
  fc.assert(
    fc.property(cursor, (c) => assert.deepEqual(parseCursor(encodeCursor(c)), { ...c })),
    RUNS,
  );
});

test("a cursor that was cut or changed is refused or is another valid cursor", () => {
  fc.assert(
    fc.property(cursor, fc.nat(), fc.string({ maxLength: 3 }), (c, at, noise) => {
      const token = encodeCursor(c);
      const cut = at % token.length;
      onlyRefuses(() => parseCursor(token.slice(0, cut) + noise + token.slice(cut + noise.length)));
    }),
    RUNS,
  );
});

test("a time is read to the millisecond", () => {
  fc.assert(
    fc.property(fc.date({ min: new Date(0), max: new Date(4e12), noInvalidDate: true }), (d) =>
      assert.equal(parseInstant("startedAfter", d.toISOString()), d.getTime()),
    ),
    RUNS,
  );
});

test("times are understood with offsets, without seconds, and with a plus sign that became a space", () => {
  const want = Date.parse("2026-01-31T10:00:00Z");
  for (const s of [
    "2026-01-31T10:00:00Z",
    "2026-01-31t10:00:00.000z",
    "2026-01-31T12:00:00+02:00",
    "2026-01-31T12:00:00 02:00",
    "2026-01-31T05:00-05:00",
  ])
    assert.equal(parseInstant("startedAfter", s), want, s);
  assert.equal(parseInstant("startedAfter", "2026-01-31"), Date.parse("2026-01-31T00:00:00Z"));
  for (const s of [
    "",
    "now",
    "1700000000",
    "2026-13-01",
    "2026-01-31T10:00",
    "Sat, 31 Jan 2026",
    "2026-01-31T25:00:00Z",
  ])
    assert.throws(() => parseInstant("startedAfter", s), { code: "INVALID_ARGUMENT" }, s);
});
