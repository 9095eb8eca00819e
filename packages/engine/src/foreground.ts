/** Counts the work that a caller waits for, so that background work can let it pass. */
export class Foreground {
  #active = 0;
  #waiters: (() => void)[] = [];

  get active(): number {
    return this.#active;
  }

  enter(): Disposable {
    this.#active++;
    let left = false;
    return {
      [Symbol.dispose]: () => {
        if (left) return;
        left = true;
        if (--this.#active > 0) return;
        const waiters = this.#waiters;
        this.#waiters = [];
        for (const wake of waiters) wake();
      },
    };
  }

  /** Resolves when nobody waits for the foreground; rejects when the signal aborts first. */
  async idle(signal: AbortSignal): Promise<void> {
    while (this.#active > 0) {
      await new Promise<void>((resolve, reject) => {
        const onAbort = (): void => reject(signal.reason as Error);
        if (signal.aborted) return onAbort();
        signal.addEventListener("abort", onAbort, { once: true });
        this.#waiters.push(() => {
          signal.removeEventListener("abort", onAbort);
          resolve();
        });
      });
    }
    signal.throwIfAborted();
  }
}
