/** Runs `work` on every item, so many at a time. The first failure stops the rest and is thrown when all have ended. */
export async function eachOf<T>(
  items: Iterable<T>,
  atOnce: number,
  parent: AbortSignal,
  work: (item: T, signal: AbortSignal) => Promise<void>,
): Promise<void> {
  const stop = new AbortController();
  const signal = AbortSignal.any([parent, stop.signal]);
  let failure: { error: unknown } | undefined;
  const queue = items[Symbol.iterator]();
  const worker = async (): Promise<void> => {
    while (!signal.aborted) {
      const next = queue.next();
      if (next.done) return;
      try {
        await work(next.value, signal);
      } catch (error) {
        failure ??= { error };
        stop.abort(error);
      }
    }
  };
  await Promise.all(Array.from({ length: atOnce }, worker));
  if (failure) throw failure.error;
  parent.throwIfAborted();
}
