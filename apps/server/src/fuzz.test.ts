import assert from "node:assert/strict";
import { test } from "node:test";
import { ErrorBody, type RouteDef, ROUTE_IDS, ROUTES } from "@aenv/contract";
import fc from "fast-check";
import { send } from "../test/client.ts";
import { fakeServer } from "../test/fake-server.ts";

const LIMIT = { timeout: 60_000 };
const RUNS = { numRuns: 1500 };
const defs: RouteDef[] = ROUTE_IDS.map((id) => ROUTES[id]);

/** Never a 5xx; an error has our body with the right code. */
function assertSane(r: { status: number; text: string }, what: string): void {
  assert.ok(r.status < 500, `${what}: ${r.status} ${r.text}`);
  if (r.status >= 400) assert.equal(ErrorBody.parse(JSON.parse(r.text)).code, r.status, what);
}

/** Bodies near the real ones: known names with any value. */
const names = [...new Set(defs.flatMap((d) => Object.keys(d.body?.shape ?? {})))];
const body = fc.oneof(
  fc.jsonValue({ maxDepth: 3 }),
  fc.dictionary(fc.constantFrom(...names), fc.oneof(fc.jsonValue({ maxDepth: 2 }), fc.constant("base")), {
    maxKeys: 6,
  }),
);

test("any JSON as the body of any route gets a sane answer", LIMIT, async () => {
  await using server = fakeServer();
  const withBody = defs.filter((d) => d.body);
  const { sandboxID } = JSON.parse(
    (await send(server, "POST", "/v2/sandboxes", { body: { templateID: "base", timeout: 3600 } })).text,
  ) as { sandboxID: string };
  await fc.assert(
    fc.asyncProperty(fc.constantFrom(...withBody), body, async (def, value) => {
      const url = def.path.replace(/\{\w+\}/g, sandboxID);
      assertSane(await send(server, def.method, url, { body: value }), `${def.method} ${url} ${JSON.stringify(value)}`);
    }),
    RUNS,
  );
});

test("any bytes as a body get a sane answer", LIMIT, async () => {
  await using server = fakeServer();
  await fc.assert(
    fc.asyncProperty(fc.uint8Array({ maxLength: 200 }), async (bytes) => {
      assertSane(await send(server, "POST", "/v2/sandboxes", { payload: Buffer.from(bytes) }), String(bytes));
    }),
    RUNS,
  );
});

test("any query and any path get a sane answer", LIMIT, async () => {
  await using server = fakeServer();
  const queries = [...new Set(defs.flatMap((d) => Object.keys(d.query?.shape ?? {})))];
  const value = fc.oneof(
    fc.string({ unit: "binary", maxLength: 30 }),
    fc.integer().map(String),
    fc.constant("running"),
  );
  const pairs = fc.array(fc.tuple(fc.constantFrom(...queries), value), { maxLength: 4 });
  const segment = fc.string({ unit: "binary", minLength: 1, maxLength: 40 });
  const text = (s: string): string => encodeURIComponent(s.toWellFormed());
  await fc.assert(
    fc.asyncProperty(fc.constantFrom(...defs), segment, pairs, async (def, name, query) => {
      // Not the one that would delete the key that the test uses.
      if (def.path === "/api-keys/{apiKeyID}") return;
      const path = def.path.replace(/\{\w+\}/g, () => text(name));
      const url = `${path}?${query.map(([k, v]) => `${k}=${text(v)}`).join("&")}`;
      assertSane(await send(server, def.method, url), `${def.method} ${url}`);
    }),
    RUNS,
  );
});
