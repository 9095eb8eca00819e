import type { Clock, SandboxId } from "@aenv/base";
import type { LaunchSource, Operation } from "./types.ts";

/** How long each phase of one operation took, when its turning points were, and how much it moved. */
export class Phases {
  readonly #clock: Clock;
  readonly #started: number;
  readonly #ms: Record<string, number> = {};
  readonly #marks: Record<string, number> = {};
  readonly #counts: Record<string, number> = {};
  /** Of a launch: what it found ready. */
  source: LaunchSource | undefined;

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

  /** A turning point: the last one of a name counts. */
  mark(name: string): void {
    this.#marks[name] = this.totalMs;
  }

  count(name: string, n: number): void {
    this.#counts[name] = (this.#counts[name] ?? 0) + n;
  }

  /** On the monotonic clock. */
  get startedAt(): number {
    return this.#started;
  }

  get totalMs(): number {
    return this.#clock.mono() - this.#started;
  }

  get phases(): Record<string, number> {
    return { ...this.#ms };
  }

  /** Milliseconds from the start. */
  get marks(): Record<string, number> {
    return { ...this.#marks };
  }

  get counts(): Record<string, number> {
    return { ...this.#counts };
  }

  /** What is told about the operation. */
  timing(op: Operation["op"], sandboxId: SandboxId): Operation {
    const { source, startedAt, totalMs, phases, marks, counts } = this;
    return { op, sandboxId, ...(source === undefined ? {} : { source }), startedAt, totalMs, phases, marks, counts };
  }
}
