import { createHash } from "node:crypto";
import { AenvError } from "@aenv/base";
import type { Context } from "./context.ts";
import type { CreateOptions, SandboxView } from "./types.ts";

const MAX_KEY_LENGTH = 256;

interface Flight {
  hash: string;
  answer: Promise<SandboxView>;
}

/** Same key and same request: same answer, also while the first one is still being made. A request that failed is forgotten. */
export class IdempotentCreates {
  readonly #ctx: Context;
  readonly #flights = new Map<string, Flight>();

  constructor(ctx: Context) {
    this.#ctx = ctx;
  }

  /** `make` gets what must be part of the transaction that makes its answer visible. */
  async run(
    team: string,
    key: string,
    options: CreateOptions,
    signal: AbortSignal,
    make: (commit: (view: SandboxView) => void) => Promise<SandboxView>,
  ): Promise<SandboxView> {
    if (key.length === 0 || key.length > MAX_KEY_LENGTH)
      throw new AenvError("INVALID_ARGUMENT", `an idempotency key has 1 to ${MAX_KEY_LENGTH} characters`);
    const hash = hashOf(options);
    const known = this.#ctx.state.idempotency.get(team, key);
    if (known) {
      check(known.hash, hash, key);
      return known.answer as SandboxView;
    }
    const name = `${team}\0${key}`;
    const flight = this.#flights.get(name);
    if (flight) {
      check(flight.hash, hash, key);
      try {
        return await flight.answer;
      } catch (e) {
        // The other caller gave up, not this one.
        if (e instanceof AenvError && e.code === "CANCELLED" && !signal.aborted)
          return await this.run(team, key, options, signal, make);
        throw e;
      }
    }
    const answer = make((view) => {
      this.#ctx.state.idempotency.put(
        team,
        key,
        { hash, sandbox: view.sandboxId, answer: view },
        this.#ctx.clock.now(),
      );
    });
    this.#flights.set(name, { hash, answer });
    try {
      return await answer;
    } finally {
      this.#flights.delete(name);
    }
  }
}

function check(known: string, asked: string, key: string): void {
  if (known === asked) return;
  throw new AenvError("CONFLICT", `the idempotency key ${JSON.stringify(key)} was used with another request`, {
    hint: "Use a new key for a new request.",
  });
}

/** Independent of the order of object keys. */
function hashOf(options: CreateOptions): string {
  const { idempotencyKey: _key, ...rest } = options;
  const canonical = JSON.stringify(rest, (_name, value: unknown) =>
    typeof value === "object" && value !== null && !Array.isArray(value)
      ? Object.fromEntries(Object.entries(value).sort(([a], [b]) => (a < b ? -1 : 1)))
      : value,
  );
  return createHash("sha256").update(canonical).digest("hex");
}
