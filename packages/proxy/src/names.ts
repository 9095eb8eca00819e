const TOKEN = /^[!#$%&'*+\-.^_`|~0-9A-Za-z]+$/;
/** Header names that were seen, to their lower case; peers can fill it only to the bound. */
const SEEN = new Map<string, string>();
const MAX_SEEN = 1024;
const MAX_LENGTH = 64;

function learn(name: string): string {
  const lower = name.toLowerCase();
  // What is kept must not hold on to the whole head that it was cut out of.
  if (SEEN.size < MAX_SEEN && name.length <= MAX_LENGTH && TOKEN.test(name)) {
    SEEN.set(Buffer.from(name, "latin1").toString("latin1"), lower);
  }
  return lower;
}

export function lowerName(name: string): string {
  return SEEN.get(name) ?? learn(name);
}

export function isToken(name: string): boolean {
  return SEEN.has(name) || TOKEN.test(name);
}
