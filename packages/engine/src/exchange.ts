/** What a node has to do with stores: publication, fetching, archives, and the care of the store. */
import { rm } from "node:fs/promises";
import { join } from "node:path";
import type { Readable, Writable } from "node:stream";
import { AenvError } from "@aenv/base";
import {
  collectGarbage,
  type Collected,
  exportSnapshot,
  FolderStore,
  importSnapshot,
  openStore,
  SnapshotRepository,
  storeUse,
} from "@aenv/block";
import type { Context } from "./context.ts";
import { Mover, type PublishedView, withScratch } from "./mover.ts";
import type { TemplateStore } from "./templates.ts";
import { type Transfer, Transfers } from "./transfers.ts";
import type { TemplateView } from "./types.ts";

export interface StoredSnapshot extends PublishedView {
  /** Bytes that no other snapshot of the store has. */
  aloneBytes: number;
  /** This node has it. */
  here: boolean;
}

export class Exchange {
  readonly #ctx: Context;
  readonly #store: TemplateStore;
  readonly #mover: Mover;
  readonly #transfers: Transfers;
  #repository: Promise<SnapshotRepository> | undefined;

  constructor(ctx: Context, store: TemplateStore) {
    this.#ctx = ctx;
    this.#store = store;
    this.#mover = new Mover(ctx, store);
    this.#transfers = new Transfers(ctx, async (t, onProgress, signal) => {
      const repository = await this.#open();
      if (t.kind === "publish") {
        const { id } = await this.#mover.publish(repository, t.source, { signal, onProgress });
        return { snapshotId: id };
      }
      const { templateId, snapshotId } = await this.#mover.fetch(repository, t.source, {
        ...(t.name === undefined ? {} : { name: t.name }),
        lazyFrom: this.address,
        signal,
        onProgress,
      });
      return { snapshotId, templateId };
    });
  }

  /** Goes on with what an earlier server began, and clears what it left. */
  async recover(): Promise<void> {
    await rm(this.#ctx.paths.exchange, { recursive: true, force: true });
    await this.#transfers.recover();
  }

  /** Address of the store; UNAVAILABLE where the node has none. */
  get address(): string {
    const { store } = this.#ctx.config;
    if (store !== undefined) return store;
    throw new AenvError("UNAVAILABLE", "this node has no store for snapshots", {
      hint: "Set AENV_STORE to a folder that nodes share, or to s3://BUCKET/PREFIX?endpoint=URL, and start the node again.",
    });
  }

  /** Starts a publication; NOT_FOUND when there is nothing of that name. */
  async publish(nameOrId: string): Promise<Transfer> {
    void this.address;
    // The state that it is now: a name may stand for another one later.
    return await this.#transfers.start("publish", this.#store.source(nameOrId).snapshot.id);
  }

  /** Starts making a template out of a published snapshot. NOT_FOUND when the store has none of that id. */
  async fetch(snapshotId: string, name: string | undefined, signal: AbortSignal): Promise<Transfer> {
    await (await this.#open()).get(snapshotId, signal);
    return await this.#transfers.start("fetch", snapshotId, name);
  }

  transfers(): Transfer[] {
    return this.#transfers.list();
  }

  transfer(id: string): Transfer {
    return this.#transfers.get(id);
  }

  /** Newest last. */
  async published(signal: AbortSignal): Promise<StoredSnapshot[]> {
    const repository = await this.#open();
    const alone = new Map((await storeUse(repository, signal)).map((u) => [u.id, u.aloneBytes]));
    const manifests = await repository.list(signal);
    return manifests.map((m) => ({
      ...this.#mover.describe(m),
      aloneBytes: alone.get(m.id) ?? 0,
      here: this.#store.find(m.id) !== undefined,
    }));
  }

  async unpublish(snapshotId: string, signal: AbortSignal): Promise<void> {
    const repository = await this.#open();
    await repository.get(snapshotId, signal);
    await repository.remove(snapshotId, signal);
  }

  async collect(o: { dryRun: boolean; graceMs?: number }, signal: AbortSignal): Promise<Collected> {
    return await collectGarbage(await this.#open(), { ...o, signal });
  }

  /** Writes a template or snapshot as one file; ends the stream. */
  async exportArchive(nameOrId: string, to: Writable, signal: AbortSignal): Promise<void> {
    this.#store.source(nameOrId);
    await withScratch(this.#ctx, async (dir) => {
      const repository = new SnapshotRepository(new FolderStore(join(dir, "store")));
      const { id } = await this.#mover.publish(repository, nameOrId, { signal });
      await exportSnapshot(repository, id, to, signal);
    });
  }

  async importArchive(from: Readable, name: string | undefined, signal: AbortSignal): Promise<TemplateView> {
    return await withScratch(this.#ctx, async (dir) => {
      const repository = new SnapshotRepository(new FolderStore(join(dir, "store")));
      const { id } = await importSnapshot(repository, from, join(dir, "blobs"), signal);
      return await this.#mover.fetch(repository, id, { ...(name === undefined ? {} : { name }), signal });
    });
  }

  /** Opened when it is first needed; again when that failed. */
  #open(): Promise<SnapshotRepository> {
    const address = this.address;
    this.#repository ??= openStore(address).then((store) => new SnapshotRepository(store));
    this.#repository.catch(() => (this.#repository = undefined));
    return this.#repository;
  }
}
