import { Resolver } from "node:dns/promises";
import { errnoOf } from "@aenv/base";

export type Resolved = { addresses: readonly string[]; ttl: number } | { failure: "none" | "unknown" | "unavailable" };

/** Asks for the IPv4 addresses of a name. */
export interface Lookup {
  setServers(servers: readonly string[]): void;
  resolve4(name: string): Promise<{ address: string; ttl: number }[]>;
}

/** How long an answer is kept at least and at most, in seconds. */
const TTL = { least: 1, most: 300 } as const;
const MAX_CACHED = 10_000;
const UNKNOWN_TTL = 5;

export function systemLookup(): Lookup {
  const resolver = new Resolver({ timeout: 2000, tries: 3 });
  return {
    setServers: (servers) => resolver.setServers(servers),
    resolve4: (name) => resolver.resolve4(name, { ttl: true }),
  };
}

/** Names and what they mean now. Addresses that no guest may reach are never in an answer. */
export class Names {
  readonly #lookup: Lookup;
  readonly #now: () => number;
  readonly #cache = new Map<string, { until: number; answer: Promise<Resolved> }>();
  #denied: (address: string) => boolean = () => true;

  /** `now` in milliseconds. */
  constructor(lookup: Lookup, now: () => number) {
    this.#lookup = lookup;
    this.#now = now;
  }

  configure(servers: readonly string[], denied: (address: string) => boolean): void {
    this.#lookup.setServers(servers);
    this.#denied = denied;
    this.#cache.clear();
  }

  resolve(name: string): Promise<Resolved> {
    const now = this.#now();
    const cached = this.#cache.get(name);
    if (cached && cached.until > now) return cached.answer;
    const entry = { until: Number.POSITIVE_INFINITY, answer: this.#ask(name) };
    this.#cache.delete(name);
    this.#cache.set(name, entry);
    for (const oldest of this.#cache.keys()) {
      if (this.#cache.size <= MAX_CACHED) break;
      this.#cache.delete(oldest);
    }
    void entry.answer.then((a) => {
      const ttl = "ttl" in a ? a.ttl : a.failure === "unavailable" ? 0 : UNKNOWN_TTL;
      entry.until = this.#now() + ttl * 1000;
    });
    return entry.answer;
  }

  async #ask(name: string): Promise<Resolved> {
    const denied = this.#denied;
    try {
      const found = await this.#lookup.resolve4(name);
      const open = found.filter((f) => !denied(f.address));
      // All that is left out could only be reached past the rules: a name of a private machine, or an attack.
      if (open.length === 0) return { failure: "unknown" };
      const ttl = Math.min(...open.map((f) => f.ttl));
      return { addresses: open.map((f) => f.address), ttl: Math.min(TTL.most, Math.max(TTL.least, ttl)) };
    } catch (e) {
      const code = errnoOf(e);
      if (code === "ENODATA") return { failure: "none" };
      return { failure: code === "ENOTFOUND" ? "unknown" : "unavailable" };
    }
  }
}

/** Most names, and addresses of one name, that are remembered for a guest. */
const MAX_PINS = 2000;
const MAX_ADDRESSES = 64;
/** How long a guest may use an answer after its time, in milliseconds: programs keep them longer than they should. */
const GRACE_MS = 10 * 60_000;

/** What the gateway answered one guest: no other address is the name's for it. */
export class Pins {
  readonly #now: () => number;
  readonly #pins = new Map<string, Map<string, number>>();

  constructor(now: () => number) {
    this.#now = now;
  }

  add(name: string, { addresses, ttl }: { addresses: readonly string[]; ttl: number }): void {
    const until = this.#now() + ttl * 1000 + GRACE_MS;
    const known = this.#pins.get(name) ?? new Map<string, number>();
    for (const a of addresses) {
      known.delete(a);
      known.set(a, until);
    }
    this.#pins.delete(name);
    this.#pins.set(name, known);
    for (const oldest of known.keys()) {
      if (known.size <= MAX_ADDRESSES) break;
      known.delete(oldest);
    }
    for (const oldest of this.#pins.keys()) {
      if (this.#pins.size <= MAX_PINS) break;
      this.#pins.delete(oldest);
    }
  }

  has(name: string, address: string): boolean {
    return (this.#pins.get(name)?.get(address) ?? 0) > this.#now();
  }
}
