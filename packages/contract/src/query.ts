import { AenvError } from "@aenv/base";

const bad = (message: string): AenvError => new AenvError("INVALID_ARGUMENT", message);

/**
 * The `metadata` filter is a form whose keys and values are percent-encoded once more: `k 1`=`v&w` is the form string
 * `k%25201=v%2526w`. This gives the value *before* the encoding that every query value gets.
 */
export function encodeMetadataFilter(metadata: Readonly<Record<string, string>>): string {
  const form = new URLSearchParams();
  for (const [k, v] of Object.entries(metadata)) form.append(encodeURIComponent(k), encodeURIComponent(v));
  return form.toString();
}

/** The reverse; `text` is the query value after the URL's own decoding. Values that were encoded only once also parse. */
export function parseMetadataFilter(text: string): Map<string, string> {
  const wanted = new Map<string, string>();
  for (const [k, v] of new URLSearchParams(text)) {
    const key = decodeAgain(k);
    const value = decodeAgain(v);
    const before = wanted.get(key);
    if (before !== undefined && before !== value)
      throw bad(`the metadata filter asks for two values of ${JSON.stringify(key)}; no sandbox can have both`);
    wanted.set(key, value);
  }
  return wanted;
}

function decodeAgain(text: string): string {
  try {
    return decodeURIComponent(text);
  } catch {
    throw bad(`the metadata filter holds ${JSON.stringify(text.slice(0, 64))}, which is not percent-encoded text`);
  }
}

/** RFC 3339 with an offset, or a date; the result is milliseconds since the epoch. */
export function parseInstant(name: string, text: string): number {
  // A `+` of the offset that was not percent-encoded arrives as a space.
  const shape = /^\d{4}-\d{2}-\d{2}(T\d{2}:\d{2}(:\d{2}(\.\d{1,9})?)?(Z|[+ -]\d{2}:\d{2}))?$/i;
  const ms = shape.test(text) ? Date.parse(text.replace(/ (?=\d{2}:\d{2}$)/, "+").toUpperCase()) : Number.NaN;
  if (Number.isNaN(ms))
    throw bad(`${name} is ${JSON.stringify(text.slice(0, 64))}; write a time like 2026-01-31T12:00:00.000Z`);
  return ms;
}

/** Where a page ended: the sort key of its last row and the direction it was read in. */
export interface Cursor {
  /** Milliseconds since the epoch. */
  at: number;
  id: string;
  order: "asc" | "desc";
}

const CURSOR_SHAPE = /^(\d{1,15})_([a-z0-9]{1,64})_(asc|desc)$/;

export function encodeCursor(c: Cursor): string {
  return Buffer.from(`${c.at}_${c.id}_${c.order}`).toString("base64url");
}

export function parseCursor(token: string): Cursor {
  const m = /^[A-Za-z0-9_-]{1,160}$/.test(token)
    ? CURSOR_SHAPE.exec(Buffer.from(token, "base64url").toString("latin1"))
    : null;
  if (!m) throw bad("nextToken is not one that this server gave out; start again without it");
  return { at: Number(m[1]), id: m[2] ?? "", order: m[3] === "asc" ? "asc" : "desc" };
}
