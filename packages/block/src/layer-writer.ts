import { AenvError } from "@aenv/base";
import {
  ENTRY_BYTES,
  encodeHeader,
  HEADER_BYTES,
  HEADER_SECTORS,
  MAX_EXTENT_SECTORS,
  paddedEntries,
  putEntry,
  putInvalidEntry,
  SECTOR,
} from "./format.ts";
import type { Sink } from "./sink.ts";

/** Small pieces of data are written together. */
const STAGE_BYTES = 256 * 1024;

export interface LayerWriterOptions {
  virtualSize: number;
  uuid?: string;
  parentUuid?: string;
  userTag?: string;
}

/** Writes a sealed, compacted layer in one sequential pass: `data` and `zero` with rising offsets, then `finish`. */
export class LayerWriter {
  readonly #sink: Sink;
  readonly #options: LayerWriterOptions;
  #stage = NOTHING;
  #staged = 0;
  #position = 0;
  #sector = 0;
  #index = Buffer.alloc(4096);
  #entries = 0;
  /** The extent being gathered: neighbours become one entry. */
  #run = { start: 0, length: 0, place: 0, zeroed: false };

  constructor(sink: Sink, options: LayerWriterOptions) {
    this.#sink = sink;
    this.#options = options;
  }

  get extents(): number {
    return this.#entries + (this.#run.length > 0 ? 1 : 0);
  }

  /** Offset and length are bytes, multiples of 512. */
  async data(offset: number, data: Buffer): Promise<void> {
    await this.#header();
    this.#add(offset, data.length, false);
    await this.#append(data);
    this.#position += data.length;
  }

  /** The range reads as zeros and hides lower layers. */
  async zero(offset: number, length: number): Promise<void> {
    await this.#header();
    this.#add(offset, length, true);
  }

  /** Writes index and trailer; returns the size of the layer. Completing the sink is the caller's. */
  async finish(): Promise<{ bytes: number; extents: number }> {
    await this.#header();
    this.#endRun();
    const extents = this.#entries;
    const indexOffset = this.#position;
    const padded = paddedEntries(extents);
    this.#reserve(padded);
    for (let i = extents; i < padded; i++) putInvalidEntry(this.#index, i * ENTRY_BYTES);
    const trailer = encodeHeader("trailer", { ...this.#options, indexOffset, indexEntries: padded });
    const tail = Buffer.concat([this.#index.subarray(0, padded * ENTRY_BYTES), trailer]);
    await this.#append(tail);
    await this.#flush();
    return { bytes: indexOffset + tail.length, extents };
  }

  async #header(): Promise<void> {
    if (this.#position > 0) return;
    await this.#append(encodeHeader("sealed-header", this.#options));
    this.#position = HEADER_BYTES;
  }

  async #append(data: Buffer): Promise<void> {
    if (this.#staged + data.length > STAGE_BYTES) await this.#flush();
    if (data.length >= STAGE_BYTES) return await this.#sink.write(data);
    if (this.#stage.length === 0) this.#stage = Buffer.allocUnsafeSlow(STAGE_BYTES);
    data.copy(this.#stage, this.#staged);
    this.#staged += data.length;
  }

  async #flush(): Promise<void> {
    if (this.#staged === 0) return;
    await this.#sink.write(this.#stage.subarray(0, this.#staged));
    this.#staged = 0;
  }

  #add(offset: number, length: number, zeroed: boolean): void {
    const start = offset / SECTOR;
    let sectors = length / SECTOR;
    if (!Number.isSafeInteger(start) || !Number.isSafeInteger(sectors) || start < this.#sector) {
      throw new AenvError("INVALID_ARGUMENT", `extent ${offset}+${length} is unaligned or out of order`);
    }
    this.#sector = start + sectors;
    let at = start;
    let place = this.#position / SECTOR;
    while (sectors > 0) {
      const run = this.#run;
      const continues = run.length > 0 && run.zeroed === zeroed && run.start + run.length === at;
      if (!continues || run.length === MAX_EXTENT_SECTORS) {
        this.#endRun();
        this.#run = { start: at, length: 0, place, zeroed };
      }
      const take = Math.min(sectors, MAX_EXTENT_SECTORS - this.#run.length);
      this.#run.length += take;
      sectors -= take;
      at += take;
      if (!zeroed) place += take;
    }
  }

  #endRun(): void {
    const { start, length, place, zeroed } = this.#run;
    if (length === 0) return;
    this.#reserve(this.#entries + 1);
    putEntry(this.#index, this.#entries++ * ENTRY_BYTES, start, length, Math.max(place, HEADER_SECTORS), zeroed);
    this.#run = { start: 0, length: 0, place: 0, zeroed: false };
  }

  #reserve(entries: number): void {
    if (this.#index.length >= entries * ENTRY_BYTES) return;
    const bigger = Buffer.alloc(Math.max(this.#index.length * 2, entries * ENTRY_BYTES));
    this.#index.copy(bigger);
    this.#index = bigger;
  }
}

const NOTHING = Buffer.alloc(0);
