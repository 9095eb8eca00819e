import type { Timing } from "@aenv/contract";

/** So many of the latest values of each series are kept. */
const KEEP = 512;

/** Quantiles of the recent past, by series. The set of series is closed: phases and sources are names in the code. */
export class Timings {
  readonly #series = new Map<string, { values: number[]; next: number; n: number }>();

  add(metric: string, ms: number): void {
    let s = this.#series.get(metric);
    if (!s) this.#series.set(metric, (s = { values: [], next: 0, n: 0 }));
    s.values[s.next] = ms;
    s.next = (s.next + 1) % KEEP;
    s.n++;
  }

  /** A create with its phases. */
  addCreate(source: string, totalMs: number, phases: Readonly<Record<string, number>>): void {
    this.add("create", totalMs);
    this.add(`create.${source}`, totalMs);
    for (const [name, ms] of Object.entries(phases)) this.add(`create.${source}.${name}`, ms);
  }

  list(): Timing[] {
    return [...this.#series].map(([metric, { values, n }]) => {
      const sorted = values.toSorted((a, b) => a - b);
      return { metric, unit: "ms", n, p50: at(sorted, 0.5), p95: at(sorted, 0.95), p99: at(sorted, 0.99) };
    });
  }
}

function at(sorted: readonly number[], q: number): number {
  const value = sorted[Math.min(sorted.length - 1, Math.floor(q * sorted.length))] ?? 0;
  return Math.round(value * 100) / 100;
}
