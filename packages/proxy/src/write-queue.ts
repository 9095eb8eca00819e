/**
 * Puts off small writes until everything that waits has been read. A write wakes the process at the other end; one that is
 * awake already takes the next ones with no further wake-up, so a burst of writes costs about half of the same writes
 * with parsing between them. Order is kept; a lone write waits only for the end of the present turn of the event loop.
 */
export class WriteQueue {
  #queue: (() => void)[] = [];
  #spare: (() => void)[] = [];
  readonly #flush = (): void => {
    const due = this.#queue;
    this.#queue = this.#spare;
    try {
      for (const write of due) write();
    } finally {
      due.length = 0;
      this.#spare = due;
    }
  };

  get empty(): boolean {
    return this.#queue.length === 0;
  }

  /** `write` must not throw. */
  push(write: () => void): void {
    if (this.#queue.push(write) === 1) setImmediate(this.#flush);
  }
}
