import { z } from "zod";

export type QueryValue = string | readonly string[] | undefined;

function bare(schema: unknown): unknown {
  let s = schema;
  while (s instanceof z.ZodOptional || s instanceof z.ZodDefault || s instanceof z.ZodNullable) s = s.unwrap();
  return s;
}

/**
 * Gives query text the types its schema names, so that the schema can be a plain one: numbers are read, lists are split
 * at commas (and may repeat the name). What does not look like a number stays text, for the schema to refuse.
 */
export function decodeQuery(schema: z.ZodObject, raw: Readonly<Record<string, QueryValue>>): Record<string, unknown> {
  const out: Record<string, unknown> = {};
  for (const [name, field] of Object.entries(schema.shape)) {
    const given = Object.hasOwn(raw, name) ? raw[name] : undefined;
    // SDKs of some languages send `name=` for "not set".
    if (given === undefined || given === "") continue;
    const type = bare(field);
    if (type instanceof z.ZodArray) {
      const list = (typeof given === "string" ? [given] : given).flatMap((v) => v.split(","));
      out[name] = list.filter((v) => v !== "");
    } else if (type instanceof z.ZodNumber && typeof given === "string" && /^-?\d{1,17}(\.\d+)?$/.test(given)) {
      out[name] = Number(given);
    } else if (type instanceof z.ZodBoolean && (given === "true" || given === "false")) out[name] = given === "true";
    else out[name] = given;
  }
  return out;
}

/** The other direction, for clients: lists are joined by commas, undefined is left out. */
export function encodeQuery(
  values: Readonly<Record<string, string | number | boolean | readonly string[] | undefined>>,
): string {
  const query = new URLSearchParams();
  for (const [name, value] of Object.entries(values)) {
    if (value !== undefined) query.set(name, Array.isArray(value) ? value.join(",") : String(value));
  }
  const text = query.toString();
  return text === "" ? "" : `?${text}`;
}

/** `/a/{x}` with its values, each percent-encoded as one segment. */
export function fillPath(path: string, params: Readonly<Record<string, string>>): string {
  return path.replace(/\{(\w+)\}/g, (_, name: string) => {
    const value = params[name];
    if (value === undefined) throw new TypeError(`no value for {${name}} of ${path}`);
    return encodeURIComponent(value);
  });
}
