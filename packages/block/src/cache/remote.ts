import { readdir, readFile, rm, stat } from "node:fs/promises";
import { mkdirSync } from "node:fs";
import { join } from "node:path";
import { type Logger, messageOf, TaskGroup } from "@aenv/base";
import { publishFile } from "@aenv/host";
import { z } from "zod";
import type { ExtentMap } from "../extents.ts";
import { type LayerForm, readLayer } from "../layer.ts";
import { readsAsync } from "../reads.ts";
import { type Source, unwrap } from "../source.ts";
import { openStore } from "../store/open.ts";
import type { BlobStore } from "../store/port.ts";
import { BlobCache, type CacheOptions, type CacheStats } from "./cache.ts";
import { CachedSource, type LoadPieces, type SharedBlob, type SharedSlots } from "./slots.ts";
import type { LayerStub } from "./stub.ts";

/** Files that remember what was read of a blob; the oldest go when there are more. */
const MAX_WANTED_FILES = 4096;
const wantedSchema = z.array(z.number().int().nonnegative());

/** A layer of a store as threads share it. */
export interface SharedRemote {
  slots: SharedSlots;
  blob: SharedBlob;
  form: LayerForm;
}

export function openRemoteSource({ slots, blob, form }: SharedRemote, load: LoadPieces): Source {
  return unwrap(new CachedSource(slots, blob, load), form);
}

export interface RemoteLayer {
  shared: SharedRemote;
  extents: ExtentMap;
  bytes: number;
}

/**
 * Layers that stay in a store, read through one cache. What was read of a layer is remembered when it is closed, and
 * fetched ahead when it is opened again.
 */
export class RemoteLayers implements AsyncDisposable {
  readonly #options: CacheOptions;
  readonly #logger: Logger;
  readonly #stores = new Map<string, BlobStore>();
  readonly #tasks: TaskGroup;
  #cache: BlobCache | undefined;

  constructor(options: CacheOptions, logger: Logger) {
    this.#options = options;
    this.#logger = logger;
    this.#tasks = new TaskGroup((name, e) => logger.warn({ task: name, error: messageOf(e) }, "a task failed"));
  }

  get stats(): CacheStats | undefined {
    return this.#cache?.stats;
  }

  async open(stub: LayerStub): Promise<RemoteLayer> {
    const store = await this.#store(stub.store);
    // Made by the first layer that needs it.
    this.#cache ??= new BlobCache(this.#options);
    const cache = this.#cache;
    const blob = cache.attach({ store, key: stub.key, sha256: stub.sha256, bytes: stub.bytes, pieces: stub.pieces });
    try {
      const source = new CachedSource(cache.shared, blob, (b, from, to) => cache.load(b, from, to));
      const { extents, form } = await readsAsync(readLayer(stub.bytes, blob.name), async ({ position, length }) => {
        const into = Buffer.allocUnsafeSlow(length);
        await source.fetch(into, 0, length, position);
        return into;
      });
      const pieces = await this.#remembered(stub.sha256);
      if (pieces.length > 0) {
        this.#tasks.spawn("prefetch", async (signal) => {
          const count = await cache.prefetch(blob.blob, pieces, signal);
          this.#logger.debug({ blob: blob.name, count }, "pieces prefetched");
        });
      }
      return { shared: { slots: cache.shared, blob, form }, extents, bytes: stub.bytes };
    } catch (e) {
      cache.detach(blob.blob);
      throw e;
    }
  }

  /** For a worker: holds pieces while it reads them. */
  async load(blob: number, from: number, to: number): Promise<() => void> {
    if (!this.#cache) throw new Error("no layer of a store is open");
    return await this.#cache.load(blob, from, to);
  }

  close(stub: Pick<LayerStub, "sha256">, blob: number): void {
    const pieces = this.#cache?.wanted(blob) ?? [];
    this.#cache?.detach(blob);
    if (pieces.length > 0) this.#tasks.spawn("remember", () => this.#remember(stub.sha256, pieces));
  }

  async [Symbol.asyncDispose](): Promise<void> {
    await this.#tasks.close();
    this.#cache?.[Symbol.dispose]();
    for (const store of this.#stores.values()) store[Symbol.dispose]();
  }

  async #store(address: string): Promise<BlobStore> {
    const known = this.#stores.get(address);
    if (known) return known;
    const store = await openStore(address);
    // Somebody else may have been faster.
    const other = this.#stores.get(address);
    if (other) {
      store[Symbol.dispose]();
      return other;
    }
    this.#stores.set(address, store);
    return store;
  }

  #wantedPath(sha256: string): string {
    return join(this.#options.dir, "wanted", `${sha256}.json`);
  }

  async #remembered(sha256: string): Promise<number[]> {
    try {
      return wantedSchema.parse(JSON.parse(await readFile(this.#wantedPath(sha256), "utf8")));
    } catch {
      return [];
    }
  }

  async #remember(sha256: string, pieces: readonly number[]): Promise<void> {
    const dir = join(this.#options.dir, "wanted");
    mkdirSync(dir, { recursive: true, mode: 0o700 });
    await publishFile(this.#wantedPath(sha256), JSON.stringify(pieces));
    const names = await readdir(dir);
    if (names.length <= MAX_WANTED_FILES) return;
    const aged = await Promise.all(
      names.map(async (name) => ({ name, at: (await stat(join(dir, name)).catch(() => undefined))?.mtimeMs ?? 0 })),
    );
    aged.sort((a, b) => a.at - b.at);
    for (const { name } of aged.slice(0, MAX_WANTED_FILES >> 3)) await rm(join(dir, name), { force: true });
  }
}
