/** Time as an argument, so that tests can own it. */
export interface Clock {
  /** Wall clock, milliseconds since the epoch. */
  now(): number;
  /** Monotonic milliseconds with a fraction; only differences mean something. */
  mono(): number;
  /** Calls `fn` once at or after `ms` from now. The timer never keeps the process alive. Returns its cancellation. */
  after(ms: number, fn: () => void): () => void;
}

/** setTimeout fires at once above this; longer waits are chained. */
const MAX_TIMER_MS = 2 ** 31 - 1;

export const systemClock: Clock = {
  now: () => Date.now(),
  mono: () => performance.now(),
  after(ms, fn) {
    let timer: NodeJS.Timeout;
    const arm = (left: number): void => {
      const step = Math.min(left, MAX_TIMER_MS);
      timer = setTimeout(() => (left > step ? arm(left - step) : fn()), Math.max(0, step));
      timer.unref();
    };
    arm(ms);
    return () => clearTimeout(timer);
  },
};

/** Resolves after `ms`; rejects with the signal's reason when it aborts first. */
export function sleep(ms: number, signal?: AbortSignal): Promise<void> {
  return new Promise((resolve, reject) => {
    if (signal?.aborted) return reject(signal.reason as Error);
    const onAbort = (): void => {
      clearTimeout(timer);
      reject(signal?.reason as Error);
    };
    const timer = setTimeout(() => {
      signal?.removeEventListener("abort", onAbort);
      resolve();
    }, ms);
    signal?.addEventListener("abort", onAbort, { once: true });
  });
}

/** A signal that aborts with a TimeoutError after `ms` or with `parent`'s reason, whichever is first. */
export function deadline(ms: number, parent?: AbortSignal): AbortSignal {
  const own = AbortSignal.timeout(ms);
  return parent ? AbortSignal.any([own, parent]) : own;
}
