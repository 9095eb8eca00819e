import assert from "node:assert/strict";
import { test } from "node:test";
import { ERROR_CODES } from "@aenv/base";
import { Validator } from "@seriousme/openapi-schema-validator";
import { LATER } from "./later.ts";
import { openApiDocument } from "./openapi.ts";
import type { RouteDef } from "./route.ts";
import { ROUTE_IDS, ROUTES } from "./routes.ts";

const document = openApiDocument({ version: "1.2.3", serverUrl: "http://localhost:8000" });
const defs: [string, RouteDef][] = ROUTE_IDS.map((id) => [id, ROUTES[id]]);

test("the document is valid OpenAPI 3.1", async () => {
  const validator = new Validator();
  const result = await validator.validate(structuredClone(document));
  assert.deepEqual(result.errors ?? [], []);
  assert.equal(result.valid, true);
  assert.equal(validator.version, "3.1");
});

test("every reference of the document resolves", () => {
  const schemas = (document["components"] as { schemas: Record<string, unknown> }).schemas;
  const refs = [...JSON.stringify(document).matchAll(/"\$ref":"#\/components\/schemas\/([^"]+)"/g)].map((m) => m[1]);
  assert.ok(refs.length > 30);
  for (const name of new Set(refs)) assert.ok(name !== undefined && name in schemas, name);
});

test("every route is in the document with its parameters, answers and errors", () => {
  const paths = document["paths"] as unknown as Record<string, Record<string, Operation>>;
  interface Operation {
    operationId: string;
    parameters: { name: string; in: string }[];
    responses: Record<string, unknown>;
    requestBody?: unknown;
  }
  let count = 0;
  for (const item of Object.values(paths)) count += Object.keys(item).length;
  assert.equal(count, defs.length);
  for (const [id, def] of defs) {
    const op = paths[def.path]?.[def.method.toLowerCase()];
    assert.equal(op?.operationId, id);
    const inPath = op.parameters.filter((p) => p.in === "path").map((p) => p.name);
    assert.deepEqual(
      inPath,
      [...def.path.matchAll(/\{(\w+)\}/g)].map((m) => m[1]),
    );
    for (const status of Object.keys(def.success)) assert.ok(op.responses[status], `${id} ${status}`);
    for (const code of def.errors) assert.ok(op.responses[ERROR_CODES[code].status], `${id} ${code}`);
    assert.equal(op.requestBody !== undefined, def.body !== undefined || def.stream === true);
  }
});

test("an endpoint is either there or announced for later, never both", () => {
  const real = new Set(defs.map(([, d]) => `${d.method} ${d.path}`));
  const later = LATER.map((l) => `${l.method} ${l.path}`);
  assert.equal(new Set(later).size, later.length);
  for (const name of later) assert.equal(real.has(name), false, name);
});

test("an example of a body fits its schema", () => {
  for (const [id, def] of defs) {
    if (def.example !== undefined) assert.equal(def.body?.safeParse(def.example).success, true, id);
  }
});
