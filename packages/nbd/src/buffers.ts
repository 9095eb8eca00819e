/** Replies of one turn of the event loop are gathered in one of these; a batch of 4 KiB reads fills it at depth 32. */
const BLOCK_BYTES = 256 * 1024;
/** Kept for reuse per size class; the rest goes back to the allocator. */
const KEEP_BYTES = 16 * 1024 * 1024;

/**
 * Reply memory, reused: a fresh large buffer costs more in page faults than the copy into it. Sizes are powers of two
 * from BLOCK_BYTES up.
 */
export class BufferPool {
  readonly #free = new Map<number, Buffer[]>();

  take(bytes: number): Buffer {
    let size = BLOCK_BYTES;
    while (size < bytes) size *= 2;
    return this.#free.get(size)?.pop() ?? Buffer.allocUnsafeSlow(size);
  }

  give(buffer: Buffer): void {
    const size = buffer.length;
    const list = this.#free.get(size) ?? [];
    if (list.length === 0) this.#free.set(size, list);
    if (list.length * size < KEEP_BYTES) list.push(buffer);
  }
}

/** Gathers replies in pool buffers and hands them to the socket as one write. Several may be reserved and filled out of order. */
export class ReplyBuffer {
  readonly #pool: BufferPool;
  #current: Buffer;
  #fill = 0;
  readonly #full: { buffer: Buffer; length: number }[] = [];
  #reserved: { buffer: Buffer; at: number } = { buffer: Buffer.alloc(0), at: 0 };

  constructor(pool: BufferPool) {
    this.#pool = pool;
    this.#current = pool.take(BLOCK_BYTES);
  }

  /** Bytes that a flush would send. */
  get size(): number {
    let n = this.#fill;
    for (const f of this.#full) n += f.length;
    return n;
  }

  /** `bytes` contiguous bytes that will be sent next. The result object is reused by the next call. */
  reserve(bytes: number): { buffer: Buffer; at: number } {
    if (this.#fill + bytes > this.#current.length) {
      if (this.#fill > 0) this.#full.push({ buffer: this.#current, length: this.#fill });
      else this.#pool.give(this.#current);
      this.#current = this.#pool.take(bytes);
      this.#fill = 0;
    }
    this.#reserved.buffer = this.#current;
    this.#reserved.at = this.#fill;
    this.#fill += bytes;
    return this.#reserved;
  }

  /** Takes back the end of the last reservation. */
  shrink(bytes: number): void {
    this.#fill -= bytes;
  }

  /** What was gathered, in order; the caller gives each buffer back to the pool once the kernel has it. */
  take(): { buffer: Buffer; length: number }[] {
    const out = this.#full.splice(0);
    if (this.#fill > 0) {
      out.push({ buffer: this.#current, length: this.#fill });
      this.#current = this.#pool.take(BLOCK_BYTES);
      this.#fill = 0;
    }
    return out;
  }

  dispose(): void {
    for (const { buffer } of this.take()) this.#pool.give(buffer);
    this.#pool.give(this.#current);
  }
}
