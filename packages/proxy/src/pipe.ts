import { Duplex } from "node:stream";

const HIGH_WATER_BYTES = 64 * 1024;

/** One end of a connection within the process. What is written to one end is read at the other, each half ends on its own. */
export class PipeEnd extends Duplex {
  /** As of a socket: what the server says about the client. */
  readonly remoteAddress: string | undefined;
  readonly encrypted: boolean;
  #peer: PipeEnd | undefined;
  #taken: (() => void) | undefined;

  private constructor(about: { remoteAddress: string | undefined; encrypted: boolean }) {
    super({ allowHalfOpen: true, highWaterMark: HIGH_WATER_BYTES });
    this.remoteAddress = about.remoteAddress;
    this.encrypted = about.encrypted;
  }

  static pair(about: { remoteAddress: string | undefined; encrypted: boolean }): [PipeEnd, PipeEnd] {
    const [a, b] = [new PipeEnd(about), new PipeEnd(about)];
    a.#peer = b;
    b.#peer = a;
    return [a, b];
  }

  /** The other end sees the connection break. */
  resetAndDestroy(): void {
    this.#peer?.destroy();
    this.destroy();
  }

  /** What the other end wrote last has been read: it may write more. */
  taken(): void {
    const done = this.#taken;
    this.#taken = undefined;
    done?.();
  }

  override _read(): void {
    this.#peer?.taken();
  }

  override _write(chunk: Buffer, _encoding: BufferEncoding, done: (e?: Error | null) => void): void {
    if (!this.#peer || this.#peer.destroyed) done();
    else if (this.#peer.push(chunk)) done();
    else this.#taken = done;
  }

  override _final(done: (e?: Error | null) => void): void {
    if (this.#peer && !this.#peer.destroyed) this.#peer.push(null);
    done();
  }

  override _destroy(error: Error | null, done: (e?: Error | null) => void): void {
    const peer = this.#peer;
    this.#peer = undefined;
    this.#taken = undefined;
    // After a whole end the peer may still have bytes of ours to read.
    if (peer && !this.writableFinished) process.nextTick(() => peer.destroy());
    // A peer that waits for us to read will not be read any more.
    peer?.taken();
    done(error);
  }
}
