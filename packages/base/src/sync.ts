/** At most `limit` holders at a time; waiters are served in order. */
export class Semaphore {
  readonly #limit: number;
  readonly #waiters: (() => void)[] = [];
  #held = 0;

  constructor(limit: number) {
    this.#limit = limit;
  }

  /** Resolves with a release that may be called more than once. Rejects with the signal's reason when it aborts first. */
  async acquire(signal?: AbortSignal): Promise<Disposable> {
    signal?.throwIfAborted();
    if (this.#held < this.#limit) this.#held++;
    else await this.#wait(signal);
    let released = false;
    return {
      [Symbol.dispose]: () => {
        if (released) return;
        released = true;
        const next = this.#waiters.shift();
        if (next) next();
        else this.#held--;
      },
    };
  }

  async run<T>(fn: () => Promise<T>, signal?: AbortSignal): Promise<T> {
    using _held = await this.acquire(signal);
    return await fn();
  }

  #wait(signal?: AbortSignal): Promise<void> {
    return new Promise((resolve, reject) => {
      const onAbort = (): void => {
        const at = this.#waiters.indexOf(grant);
        if (at >= 0) this.#waiters.splice(at, 1);
        reject(signal?.reason as Error);
      };
      const grant = (): void => {
        signal?.removeEventListener("abort", onAbort);
        resolve();
      };
      this.#waiters.push(grant);
      signal?.addEventListener("abort", onAbort, { once: true });
    });
  }
}

export class Mutex extends Semaphore {
  constructor() {
    super(1);
  }
}

/** Serialises work per key; a key costs nothing while unused. */
export class KeyedMutex {
  readonly #locks = new Map<string, { mutex: Mutex; users: number }>();

  async run<T>(key: string, fn: () => Promise<T>, signal?: AbortSignal): Promise<T> {
    const lock = this.#locks.get(key) ?? { mutex: new Mutex(), users: 0 };
    this.#locks.set(key, lock);
    lock.users++;
    try {
      return await lock.mutex.run(fn, signal);
    } finally {
      if (--lock.users === 0) this.#locks.delete(key);
    }
  }
}

/**
 * Background work that somebody joins: every task is named, gets a signal, and `close()` waits for all.
 * A failure goes to `onError`, never to an unhandled rejection.
 */
export class TaskGroup implements AsyncDisposable {
  readonly #abort = new AbortController();
  readonly #tasks = new Set<Promise<void>>();
  readonly #onError: (name: string, e: unknown) => void;

  constructor(onError: (name: string, e: unknown) => void) {
    this.#onError = onError;
  }

  get size(): number {
    return this.#tasks.size;
  }

  spawn(name: string, fn: (signal: AbortSignal) => Promise<void>): void {
    const signal = this.#abort.signal;
    const task = (async () => {
      try {
        await fn(signal);
      } catch (e) {
        if (!signal.aborted) this.#onError(name, e);
      }
    })();
    this.#tasks.add(task);
    void task.finally(() => this.#tasks.delete(task));
  }

  async close(): Promise<void> {
    this.#abort.abort(new DOMException("the task group was closed", "AbortError"));
    while (this.#tasks.size > 0) await Promise.all(this.#tasks);
  }

  async [Symbol.asyncDispose](): Promise<void> {
    await this.close();
  }
}
