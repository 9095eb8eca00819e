/**
 * Sends bytes in order, one request at a time. What arrives meanwhile is joined, so fast typing and pasting cost few
 * requests. A failure ends it: how the process ended is told by its own stream.
 */
export class InputQueue {
  readonly #send: (data: Buffer) => Promise<void>;
  #waiting: Buffer[] = [];
  #running: Promise<void> | undefined;
  #failed = false;

  constructor(send: (data: Buffer) => Promise<void>) {
    this.#send = send;
  }

  get failed(): boolean {
    return this.#failed;
  }

  push(data: Buffer): void {
    if (this.#failed) return;
    this.#waiting.push(data);
    this.#running ??= this.#run().finally(() => (this.#running = undefined));
  }

  /** Resolves when everything given so far was sent, or nothing more can be. */
  async flush(): Promise<void> {
    while (this.#running) await this.#running;
  }

  async #run(): Promise<void> {
    while (this.#waiting.length > 0 && !this.#failed) {
      const data = this.#waiting.length === 1 ? (this.#waiting[0] ?? Buffer.alloc(0)) : Buffer.concat(this.#waiting);
      this.#waiting = [];
      try {
        await this.#send(data);
      } catch {
        this.#failed = true;
      }
    }
  }
}

/**
 * Watches what is typed for the way out of a terminal that does not answer: `~.` at the beginning of a line.
 * Returns what is to be sent, undefined when the user leaves. `~~` sends one tilde.
 */
export class EscapeFilter {
  #state: "line start" | "tilde" | "text" = "line start";

  push(data: Buffer): Buffer | undefined {
    const out: number[] = [];
    for (const byte of data) {
      if (this.#state === "tilde") {
        this.#state = "text";
        if (byte === DOT) return undefined;
        out.push(TILDE);
        if (byte === TILDE) continue;
      } else if (this.#state === "line start" && byte === TILDE) {
        this.#state = "tilde";
        continue;
      }
      out.push(byte);
      this.#state = byte === CR || byte === LF ? "line start" : "text";
    }
    return Buffer.from(out);
  }
}

const TILDE = 0x7e;
const DOT = 0x2e;
const CR = 0x0d;
const LF = 0x0a;
