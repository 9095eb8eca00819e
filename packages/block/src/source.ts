import { read as readCallback } from "node:fs";
import { promisify } from "node:util";
import type { LayerForm } from "./layer.ts";
import { readFull } from "./upper.ts";
import { ZFileSource } from "./zfile-source.ts";

/** Unit in which we remember what the page cache holds; the kernel's own read-ahead is as long. */
const REGION_BYTES = 128 * 1024;
/** A read from the page cache takes microseconds: one this slow went to the device, so the cache has lost pages. */
const COLD_READ_MS = 4;

const readAsync = promisify(readCallback);

/** What a disk reads the data of a layer from. Positions and lengths are bytes of the layer. */
export interface Source {
  readonly path: string;
  /** `read` always gives the data, at worst after waiting for a device. */
  readonly local: boolean;
  /** `read` of the range would not wait for a device or a network. */
  isWarm(position: number, length: number): boolean;
  /** Blocks until the range is read. False when it is not here, or was lost meanwhile: then `fetch` it. */
  read(into: Buffer, at: number, length: number, position: number): boolean;
  /** Makes the range warm without blocking this thread. It may be lost again soon after. */
  load(position: number, length: number): Promise<void>;
  /** Reads without blocking this thread, from wherever the range is. */
  fetch(into: Buffer, at: number, length: number, position: number): Promise<void>;
}

/** An open file as threads share it. */
export interface SharedFile {
  path: string;
  fd: number;
  warm: Uint8Array;
  form: LayerForm;
}

/** The layer in an open file, whatever it is wrapped in. */
export function openSource({ path, fd, warm, form }: SharedFile): Source {
  return unwrap(new FileSource(path, fd, warm), form);
}

/** The layer in what `file` reads. */
export function unwrap(file: Source, form: LayerForm): Source {
  const payload = form.offset === 0 ? file : new WindowSource(file, form.offset);
  return form.zfile ? new ZFileSource(payload, form.zfile) : payload;
}

/** A file without its first bytes. */
class WindowSource implements Source {
  readonly path: string;
  readonly local: boolean;
  readonly #file: Source;
  readonly #offset: number;

  constructor(file: Source, offset: number) {
    this.path = file.path;
    this.local = file.local;
    this.#file = file;
    this.#offset = offset;
  }

  isWarm(position: number, length: number): boolean {
    return this.#file.isWarm(position + this.#offset, length);
  }

  read(into: Buffer, at: number, length: number, position: number): boolean {
    return this.#file.read(into, at, length, position + this.#offset);
  }

  fetch(into: Buffer, at: number, length: number, position: number): Promise<void> {
    return this.#file.fetch(into, at, length, position + this.#offset);
  }

  load(position: number, length: number): Promise<void> {
    return this.#file.load(position + this.#offset, length);
  }
}

/**
 * A file that is read straight from the page cache where we believe it to be there (`pread` on this thread costs a
 * tenth of a trip through the thread pool), and fetched by the thread pool where not, so that a cold disk never
 * blocks the others of this thread for long. `warm` may be shared by threads.
 */
export class FileSource implements Source {
  readonly path: string;
  readonly local = true;
  readonly fd: number;
  readonly warm: Uint8Array;
  readonly #loading = new Map<number, Promise<void>>();

  constructor(path: string, fd: number, warm: Uint8Array) {
    this.path = path;
    this.fd = fd;
    this.warm = warm;
  }

  static warmMap(bytes: number): Uint8Array {
    return new Uint8Array(new SharedArrayBuffer(Math.ceil(bytes / REGION_BYTES) + 1));
  }

  isWarm(position: number, length: number): boolean {
    const last = Math.floor((position + length - 1) / REGION_BYTES);
    for (let r = Math.floor(position / REGION_BYTES); r <= last; r++) if (this.warm[r] !== 1) return false;
    return true;
  }

  /**
   * The range was just written: its pages are in the cache. At the end of the file that goes for the whole region (there
   * is hardly anything else in it), elsewhere only for regions it covers.
   */
  wrote(position: number, length: number, appended: boolean): void {
    const round = appended ? Math.floor : Math.ceil;
    const end = appended
      ? Math.ceil((position + length) / REGION_BYTES)
      : Math.floor((position + length) / REGION_BYTES);
    for (let r = round(position / REGION_BYTES); r < end; r++) this.warm[r] = 1;
  }

  /** Blocks until the range is read. */
  read(into: Buffer, at: number, length: number, position: number): boolean {
    const started = performance.now();
    readFull(this.fd, into, at, length, position);
    if (performance.now() - started > COLD_READ_MS && length <= REGION_BYTES) this.warm.fill(0);
    return true;
  }

  async fetch(into: Buffer, at: number, length: number, position: number): Promise<void> {
    await this.load(position, length);
    this.read(into, at, length, position);
  }

  /** Brings the range into the page cache without blocking this thread. */
  async load(position: number, length: number): Promise<void> {
    const work: Promise<void>[] = [];
    const last = Math.floor((position + length - 1) / REGION_BYTES);
    for (let r = Math.floor(position / REGION_BYTES); r <= last; r++) {
      if (this.warm[r] !== 1) work.push(this.#loading.get(r) ?? this.#loadRegion(r));
    }
    await Promise.all(work);
  }

  #loadRegion(region: number): Promise<void> {
    const work = (async () => {
      try {
        await readAsync(this.fd, Buffer.allocUnsafeSlow(REGION_BYTES), 0, REGION_BYTES, region * REGION_BYTES);
        this.warm[region] = 1;
      } finally {
        this.#loading.delete(region);
      }
    })();
    this.#loading.set(region, work);
    return work;
  }
}
