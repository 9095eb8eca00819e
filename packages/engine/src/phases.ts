import type { Clock } from "@aenv/base";

/** How long each phase of one operation took. */
export class Phases {
  readonly #clock: Clock;
  readonly #started: number;
  readonly #ms: Record<string, number> = {};

  constructor(clock: Clock) {
    this.#clock = clock;
    this.#started = clock.mono();
  }

  /** A phase that runs twice (a spare that failed, then another launch) is added up. */
  async time<T>(name: string, fn: () => Promise<T>): Promise<T> {
    const from = this.#clock.mono();
    try {
      return await fn();
    } finally {
      this.#ms[name] = (this.#ms[name] ?? 0) + this.#clock.mono() - from;
    }
  }

  timeNow<T>(name: string, fn: () => T): T {
    const from = this.#clock.mono();
    try {
      return fn();
    } finally {
      this.#ms[name] = (this.#ms[name] ?? 0) + this.#clock.mono() - from;
    }
  }

  get totalMs(): number {
    return this.#clock.mono() - this.#started;
  }

  get phases(): Record<string, number> {
    return { ...this.#ms };
  }
}
