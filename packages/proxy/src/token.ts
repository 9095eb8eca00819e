import { timingSafeEqual } from "node:crypto";

/** In constant time; false for a header that is missing or repeated. */
export function sameToken(wanted: string, given: string | string[] | undefined): boolean {
  if (typeof given !== "string") return false;
  const a = Buffer.from(wanted);
  const b = Buffer.from(given);
  return a.length === b.length && timingSafeEqual(a, b);
}
