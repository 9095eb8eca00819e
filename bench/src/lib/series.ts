/** One measured distribution. A single value has n = 1 and three equal percentiles. */
export interface Series {
  metric: string;
  unit: string;
  n: number;
  p50: number;
  p95: number;
  p99: number;
}

/** What a benchmark module `bench/src/NAME.ts` exports as `run`. Throws an AenvError that says why when it cannot run. */
export type Bench = (options: BenchOptions) => Promise<BenchOutcome>;

export interface BenchOptions {
  /** `all` sets it: seconds instead of minutes, fewer rounds, same metrics. */
  brief: boolean;
  signal: AbortSignal;
  /** Progress for a person; goes to standard error. */
  log(line: string): void;
}

export interface BenchOutcome {
  results: Series[];
  /** Facts beyond the common ones (accelerator, peers and their versions, sizes); they win over the common ones. */
  conditions?: Record<string, string | number>;
}

/** Percentile by linear interpolation between the closest ranks. The samples need not be sorted. */
export function percentile(samples: readonly number[], p: number): number {
  const sorted = samples.toSorted((a, b) => a - b);
  const at = (sorted.length - 1) * (p / 100);
  const low = sorted[Math.floor(at)];
  const high = sorted[Math.ceil(at)];
  if (low === undefined || high === undefined) throw new RangeError("no samples");
  return low + (high - low) * (at - Math.floor(at));
}

export function series(metric: string, unit: string, samples: readonly number[]): Series {
  return {
    metric,
    unit,
    n: samples.length,
    p50: percentile(samples, 50),
    p95: percentile(samples, 95),
    p99: percentile(samples, 99),
  };
}

export function single(metric: string, unit: string, value: number): Series {
  return series(metric, unit, [value]);
}

/** Percentile by percentile: ours / theirs. For a rate more is better, for a time less; the metric's name should say which. */
export function ratio(metric: string, ours: Series, theirs: Series): Series {
  return {
    metric,
    unit: "x",
    n: Math.min(ours.n, theirs.n),
    p50: ours.p50 / theirs.p50,
    p95: ours.p95 / theirs.p95,
    p99: ours.p99 / theirs.p99,
  };
}
