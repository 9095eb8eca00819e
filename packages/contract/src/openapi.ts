import { ERROR_CODES, type ErrorCode } from "@aenv/base";
import { z } from "zod";
import { type Answer, COMMON_ERRORS, type RouteDef } from "./route.ts";
import { ROUTES } from "./routes.ts";
import * as account from "./schemas/account.ts";
import * as common from "./schemas/common.ts";
import * as node from "./schemas/node.ts";
import * as sandboxes from "./schemas/sandboxes.ts";
import * as state from "./schemas/state.ts";
import * as store from "./schemas/store.ts";
import * as templates from "./schemas/templates.ts";

export type Json = null | boolean | number | string | Json[] | { [key: string]: Json };
type JsonObject = { [key: string]: Json };

/** Statuses that a route may fail with, each with its error codes. */
export function errorsOf(def: RouteDef): Map<number, ErrorCode[]> {
  const codes: ErrorCode[] = [...def.errors, ...(def.auth === "key" ? (["UNAUTHENTICATED"] as const) : [])];
  const byStatus = new Map<number, ErrorCode[]>();
  for (const code of new Set([...codes, ...COMMON_ERRORS])) {
    const { status } = ERROR_CODES[code];
    byStatus.set(status, [...(byStatus.get(status) ?? []), code]);
  }
  return new Map([...byStatus].toSorted(([a], [b]) => a - b));
}

/** Every exported schema becomes a named component. */
function components(): z.core.$ZodRegistry<{ id: string }> {
  const registry = z.registry<{ id: string }>();
  for (const room of [common, sandboxes, state, templates, store, account, node]) {
    for (const [name, value] of Object.entries(room)) {
      if (value instanceof z.ZodType) registry.add(value, { id: name === "ErrorBody" ? "Error" : name });
    }
  }
  return registry;
}

const ref = (id: string): string => `#/components/schemas/${id}`;

function clean(ctx: { jsonSchema: Record<string, unknown> }): void {
  const s = ctx.jsonSchema;
  // The format says it; the pattern is long and unreadable.
  if (s["format"] === "date-time") delete s["pattern"];
  if (s["minimum"] === Number.MIN_SAFE_INTEGER) delete s["minimum"];
  if (s["maximum"] === Number.MAX_SAFE_INTEGER) delete s["maximum"];
}

function jsonSchema(schema: z.ZodType, registry: z.core.$ZodRegistry<{ id: string }>, io: "input" | "output"): Json {
  const id = registry.get(schema)?.id;
  if (id !== undefined) return { $ref: ref(id) };
  if (schema instanceof z.ZodArray) {
    const item = registry.get(schema.element as z.ZodType)?.id;
    if (item !== undefined) return { type: "array", items: { $ref: ref(item) } };
  }
  const { $schema: _, ...rest } = z.toJSONSchema(schema, { io, override: clean });
  return rest as Json;
}

function parametersOf(def: RouteDef): Json[] {
  const out: Json[] = [...def.path.matchAll(/\{(\w+)\}/g)].map(([, name]) => ({
    name: name ?? "",
    in: "path",
    required: true,
    schema: { type: "string" },
  }));
  for (const [name, description] of Object.entries(def.headers ?? {})) {
    out.push({ name, in: "header", required: false, description, schema: { type: "string" } });
  }
  if (def.query) {
    const { properties = {}, required = [] } = z.toJSONSchema(def.query, { io: "input", override: clean });
    for (const [name, schema] of Object.entries(properties)) {
      const { description, ...bare } = schema as JsonObject;
      out.push({
        name,
        in: "query",
        required: required.includes(name),
        ...(description === undefined ? {} : { description }),
        schema: bare,
        ...(bare["type"] === "array" ? { style: "form", explode: false } : {}),
      });
    }
  }
  return out;
}

function answerOf(a: Answer, registry: z.core.$ZodRegistry<{ id: string }>): Json {
  const schema = a.schema
    ? jsonSchema(a.schema, registry, "output")
    : { type: a.contentType === "application/json" ? "object" : "string" };
  return {
    description: a.description,
    ...(a.headers
      ? {
          headers: Object.fromEntries(
            Object.entries(a.headers).map(([name, description]) => [name, { description, schema: { type: "string" } }]),
          ),
        }
      : {}),
    ...(a.schema || a.contentType ? { content: { [a.contentType ?? "application/json"]: { schema } } } : {}),
  };
}

function operation(id: string, def: RouteDef, registry: z.core.$ZodRegistry<{ id: string }>): Json {
  const responses: JsonObject = {};
  for (const [status, answer] of Object.entries(def.success)) responses[status] = answerOf(answer, registry);
  for (const [status, codes] of errorsOf(def)) {
    responses[String(status)] = {
      description: codes.map((c) => `${c}: ${ERROR_CODES[c].hint}`).join(" "),
      content: { "application/json": { schema: { $ref: ref("Error") } } },
    };
  }
  return {
    operationId: id,
    tags: [def.tag],
    summary: def.summary,
    ...(def.description === undefined ? {} : { description: def.description }),
    ...(def.deprecated ? { deprecated: true } : {}),
    security: def.auth === "key" ? [{ ApiKeyAuth: [] }, { BearerAuth: [] }] : [],
    parameters: parametersOf(def),
    ...(def.body
      ? {
          requestBody: {
            required: def.bodyOptional !== true,
            content: {
              "application/json": {
                schema: jsonSchema(def.body, registry, "input"),
                ...(def.example === undefined ? {} : { example: def.example as Json }),
              },
            },
          },
        }
      : {}),
    ...(def.stream
      ? {
          requestBody: {
            required: true,
            content: { "application/octet-stream": { schema: { type: "string", format: "binary" } } },
          },
        }
      : {}),
    responses,
  };
}

/** The whole API as an OpenAPI 3.1 document. */
export function openApiDocument(info: { version: string; serverUrl?: string }): JsonObject {
  const registry = components();
  const { schemas } = z.toJSONSchema(registry, { uri: ref, override: clean, io: "input" });
  const named: JsonObject = {};
  for (const [id, schema] of Object.entries(schemas)) {
    const { $schema: _s, $id: _i, ...rest } = schema;
    named[id] = rest as Json;
  }
  const paths: { [path: string]: JsonObject } = {};
  for (const [id, def] of Object.entries(ROUTES)) {
    const item = (paths[def.path] ??= {});
    item[def.method.toLowerCase()] = operation(id, def, registry);
  }
  return {
    openapi: "3.1.0",
    info: {
      title: "AgentENV",
      version: info.version,
      description: "Sandboxes that are virtual machines. The official E2B SDKs work with it unchanged.",
      license: { name: "MIT", identifier: "MIT" },
    },
    ...(info.serverUrl === undefined ? {} : { servers: [{ url: info.serverUrl }] }),
    tags: ["Sandboxes", "State", "Templates", "Store", "Account", "Events", "Node"].map((name) => ({ name })),
    paths,
    components: {
      schemas: named,
      securitySchemes: {
        ApiKeyAuth: { type: "apiKey", in: "header", name: "X-API-KEY" },
        BearerAuth: { type: "http", scheme: "bearer", description: "The API key as a bearer token." },
      },
    },
  };
}
