import type { Operation, Timing } from "@aenv/contract";

/** So many of the latest values of each series are kept. */
const KEEP = 512;
/** So many of the latest operations are kept whole. */
const KEEP_OPERATIONS = 256;

/** Quantiles of the recent past, by series. The set of series is closed: phases and sources are names in the code. */
export class Timings {
  readonly #series = new Map<string, { values: number[]; next: number; n: number }>();
  readonly #operations: Operation[] = [];
  #seq = 0;

  add(metric: string, ms: number): void {
    let s = this.#series.get(metric);
    if (!s) this.#series.set(metric, (s = { values: [], next: 0, n: 0 }));
    s.values[s.next] = ms;
    s.next = (s.next + 1) % KEEP;
    s.n++;
  }

  /** An operation with its phases; launches by what they found ready, too. */
  addOperation(operation: Omit<Operation, "seq">): void {
    const { op, source, totalMs, phases, marks } = operation;
    const name = source === undefined ? op : `${op}.${source}`;
    this.add(op, totalMs);
    if (name !== op) this.add(name, totalMs);
    for (const [phase, ms] of Object.entries(phases)) this.add(`${name}.${phase}`, ms);
    const { stop, go } = marks;
    if (stop !== undefined && go !== undefined) this.add(`${name}.stopped`, go - stop);
    this.#operations.push({ seq: ++this.#seq, ...operation });
    if (this.#operations.length > KEEP_OPERATIONS) this.#operations.shift();
  }

  operations(after: number): Operation[] {
    return this.#operations.filter((o) => o.seq > after);
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
