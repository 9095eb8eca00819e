/** A disk under test beside a plain array of bytes that does the same. Sealing goes the way blockd goes. */
import { mkdtempSync, renameSync, rmSync } from "node:fs";
import { closeSync } from "node:fs";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { Disk, EMPTY_STACK, type Stack } from "../src/disk.ts";
import { overlay } from "../src/extents.ts";
import { openLayer, type SealedLayer } from "../src/layer.ts";
import { FileSource, openSource, type Source } from "../src/source.ts";

import { type Durability, Upper, type UpperFiles } from "../src/upper.ts";

const sourceOf = (layer: SealedLayer): Source => openSource({ ...layer, warm: FileSource.warmMap(layer.bytes) });

/** Reads like `source`, but most often only after it was asked to fetch, as a layer of a store does. */
export class FarSource implements Source {
  readonly path: string;
  readonly local = false;
  readonly #source: Source;
  #n = 1;

  constructor(source: Source) {
    this.path = source.path;
    this.#source = source;
  }

  isWarm(): boolean {
    return this.#chance(2);
  }

  read(into: Buffer, at: number, length: number, position: number): boolean {
    return this.#chance(2) && this.#source.read(into, at, length, position);
  }

  async load(): Promise<void> {
    await new Promise((r) => setImmediate(r));
  }

  async fetch(into: Buffer, at: number, length: number, position: number): Promise<void> {
    await this.load();
    await this.#source.fetch(into, at, length, position);
  }

  #chance(of: number): boolean {
    this.#n = (this.#n * 48_271) % 2_147_483_647;
    return this.#n % 1000 < 1000 / of;
  }
}

export class ModelDisk implements AsyncDisposable {
  readonly dir: string;
  readonly size: number;
  readonly model: Buffer;
  readonly durability: Durability;
  disk: Disk;
  #generation = 0;
  #stack: Stack = EMPTY_STACK;
  readonly #fds: number[] = [];
  readonly #slowWriteMs: number | undefined;

  constructor(
    size: number,
    durability: Durability = "process",
    dir = mkdtempSync(join(tmpdir(), "aenv-block-")),
    slowWriteMs?: number,
  ) {
    this.dir = dir;
    this.#slowWriteMs = slowWriteMs;
    this.size = size;
    this.durability = durability;
    this.model = Buffer.alloc(size);
    this.disk = new Disk(size, this.#stack, Upper.create(this.#files(), size, durability), slowWriteMs);
  }

  get layers(): readonly string[] {
    return this.#stack.files.map((f) => f.path);
  }

  #files(): UpperFiles {
    const base = join(this.dir, `upper-${this.#generation}`);
    return { data: `${base}.data`, index: `${base}.index` };
  }

  async write(offset: number, data: Buffer): Promise<void> {
    await this.disk.write(offset, data, false);
    this.disk.commit();
    data.copy(this.model, offset);
  }

  /** All at once; they must not overlap. */
  async burst(writes: readonly { at: number; data: Buffer }[]): Promise<void> {
    await Promise.all(writes.map(async (w) => await this.disk.write(w.at, w.data, false)));
    this.disk.commit();
    for (const w of writes) w.data.copy(this.model, w.at);
  }

  async zero(offset: number, length: number): Promise<void> {
    await this.disk.zero(offset, length, true, false);
    this.disk.commit();
    this.model.fill(0, offset, offset + length);
  }

  /** A trimmed range may read as anything; ours reads as before or as zeros: the model takes over what it finds. */
  async trim(offset: number, length: number): Promise<void> {
    await this.disk.trim(offset, length, false);
    this.disk.commit();
    const found = await this.read(offset, length);
    for (let i = 0; i < length; i++) {
      if (found[i] !== 0 && found[i] !== this.model[offset + i]) throw new Error(`byte ${offset + i} is neither`);
    }
    found.copy(this.model, offset);
  }

  async read(offset: number, length: number): Promise<Buffer> {
    const into = Buffer.alloc(length + 2, 0xee);
    if (!this.disk.readNow(offset, length, into, 1)) await this.disk.read(offset, length, into, 1);
    if (into[0] !== 0xee || into[length + 1] !== 0xee) throw new Error("a read wrote outside of its range");
    return into.subarray(1, length + 1);
  }

  /** What another process finds after this one was killed. */
  crash(): void {
    const { upper } = this.disk;
    upper.close();
    this.disk = new Disk(
      this.size,
      this.#stack,
      Upper.open(this.#files(), this.size, this.durability),
      this.#slowWriteMs,
    );
  }

  /** Puts a layer made elsewhere beneath; only for a disk that holds nothing yet. */
  async base(path: string, content: Buffer, wrap = (s: Source): Source => s): Promise<void> {
    const layer = openLayer(path);
    this.#fds.push(layer.fd);
    this.#stack = {
      map: layer.extents,
      files: [wrap(sourceOf(layer))],
    };
    content.copy(this.model);
    await this.disk.close();
    this.disk = new Disk(this.size, this.#stack, Upper.open(this.#files(), this.size, this.durability));
  }

  async seal(): Promise<void> {
    await this.disk.freeze();
    const old = this.disk.upper;
    old.commit();
    old.seal();
    const path = join(this.dir, `layer-${this.#generation}.lsmt`);
    renameSync(old.files.data, path);
    this.#generation++;
    const layer = openLayer(path);
    this.#fds.push(layer.fd);
    const map = overlay(this.#stack.map, layer.extents, this.#stack.files.length);
    this.#stack = { map, files: [...this.#stack.files, sourceOf(layer)] };
    this.disk.replace(this.#stack, Upper.create(this.#files(), this.size, this.durability));
    old.close();
  }

  /** Throws at the first difference between disk, model and the allocation map. */
  async check(): Promise<void> {
    const found = await this.read(0, this.size);
    if (!found.equals(this.model)) {
      const at = found.findIndex((b, i) => b !== this.model[i]);
      throw new Error(`byte ${at} is ${found[at]}, not ${this.model[at]}`);
    }
    let at = 0;
    for (const e of this.disk.status(0, this.size, 1_000_000)) {
      if (e.zero && this.model.subarray(at, at + e.length).some((b) => b !== 0)) throw new Error(`${at} is not zero`);
      at += e.length;
    }
    if (at !== this.size) throw new Error("the allocation map is too short");
  }

  async [Symbol.asyncDispose](): Promise<void> {
    await this.disk.close();
    for (const fd of this.#fds) closeSync(fd);
    rmSync(this.dir, { recursive: true, force: true });
  }
}
