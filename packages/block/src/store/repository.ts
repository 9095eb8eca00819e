import { createHash, randomBytes } from "node:crypto";
import { mkdir, open, rename, rm } from "node:fs/promises";
import { dirname } from "node:path";
import { AenvError, messageOf, Semaphore } from "@aenv/base";
import { z } from "zod";
import { decode, encode, type Encoded, type Encoding } from "./encode.ts";
import type { BlobStore } from "./port.ts";

/**
 * Snapshots in a store: `blobs/SHA256` are contents, shared by whoever has the same; `snapshots/ID.json` names the blobs
 * of one snapshot and is written last, so that a snapshot is there whole or not at all. `pending/` says what is being
 * published, `doomed.json` which blobs the garbage collection will delete next time: a publisher uses none of those.
 */
const KEY = /^blobs\/[0-9a-f]{64}(-[0-9a-f]{8})?$/;
const SNAPSHOT_ID = /^[a-z0-9][a-z0-9_-]{0,63}$/;
export const MAX_JSON_BYTES = 16 * 1024 * 1024;
const MAX_FILES = 1024;
const FETCH_BYTES = 8 * 1024 * 1024;
const PARALLEL_READS = 4;

const blobSchema = z.object({
  /** What it is to the snapshot; unique in it. */
  name: z.string().min(1).max(200),
  key: z.string().regex(KEY),
  sha256: z.string().regex(/^[0-9a-f]{64}$/),
  bytes: z.number().int().nonnegative(),
  /** SHA-256 of each MiB, so that ranges can be checked. */
  pieces: z.array(z.string().regex(/^[0-9a-f]{64}$/)),
  contentBytes: z.number().int().nonnegative(),
  encoding: z.enum(["plain", "zfile", "sparse"]),
});
export type StoredBlob = z.infer<typeof blobSchema>;

export const manifestSchema = z.object({
  version: z.literal(1),
  id: z.string().regex(SNAPSHOT_ID),
  /** Milliseconds since 1970. */
  publishedAt: z.number().int(),
  /** What the snapshot is; not this package's business. */
  record: z.unknown(),
  blobs: z.array(blobSchema).max(MAX_FILES),
});
export type SnapshotManifest = z.infer<typeof manifestSchema>;

const pendingSchema = z.object({ startedAt: z.number(), keys: z.array(z.string().regex(KEY)).max(MAX_FILES) });
const doomedSchema = z.object({ since: z.record(z.string(), z.number()) });

/** A file of this machine, or what another store has of one already. */
export type PublishFile = { name: string; encoding: Encoding } & ({ path: string } | { encoded: Encoded });

export interface PublishOptions {
  id: string;
  record: unknown;
  files: readonly PublishFile[];
  /** A folder for compressed copies: as large as the files in the worst case. */
  scratch: string;
  signal?: AbortSignal;
  /** Bytes of stored content that are there, and of all there is. */
  onProgress?: (done: number, total: number) => void;
}

export const manifestKey = (id: string): string => `snapshots/${id}.json`;

export class SnapshotRepository {
  readonly store: BlobStore;

  constructor(store: BlobStore) {
    this.store = store;
  }

  /** Puts what the store does not have yet, then the manifest. Again is fine. */
  async publish(o: PublishOptions): Promise<SnapshotManifest> {
    if (!SNAPSHOT_ID.test(o.id)) throw new AenvError("INVALID_ARGUMENT", `${o.id} is not an id of a snapshot`);
    const { signal } = o;
    await mkdir(o.scratch, { recursive: true });
    await using held = new AsyncDisposableStack();
    const encoded: Encoded[] = [];
    for (const f of o.files) {
      encoded.push(held.use("path" in f ? await encode(f.path, f.encoding, o.scratch, signal) : f.encoded));
    }
    const salt = randomBytes(4).toString("hex");
    const plain = (e: Encoded): string => `blobs/${e.sha256}`;
    const salted = (e: Encoded): string => `${plain(e)}-${salt}`;
    const pending = `pending/${o.id}-${salt}.json`;
    const note = { startedAt: Date.now(), keys: [...new Set(encoded.flatMap((e) => [plain(e), salted(e)]))] };
    await this.store.put(pending, Buffer.from(JSON.stringify(note)), signal);
    try {
      // Read after the note was written: what is not doomed now is not collected while the note is there.
      const doomed = await this.doomed(signal);
      const total = encoded.reduce((n, e) => n + e.bytes, 0);
      let done = 0;
      const blobs: StoredBlob[] = [];
      for (const [i, e] of encoded.entries()) {
        const { name, encoding } = o.files[i] as PublishFile;
        const key = doomed.has(plain(e)) ? salted(e) : plain(e);
        const there = await this.store.stat(key, signal);
        if (there?.bytes !== e.bytes) await this.store.put(key, e, signal);
        done += e.bytes;
        o.onProgress?.(done, total);
        const { sha256, bytes, pieces, contentBytes } = e;
        blobs.push({ name, key, sha256, bytes, pieces, contentBytes, encoding });
      }
      const manifest: SnapshotManifest = { version: 1, id: o.id, publishedAt: Date.now(), record: o.record, blobs };
      await this.store.put(manifestKey(o.id), Buffer.from(JSON.stringify(manifest)), signal);
      return manifest;
    } finally {
      // Left behind it only keeps blobs for a while.
      await this.store.delete(pending, AbortSignal.timeout(10_000)).catch(() => {});
    }
  }

  async list(signal?: AbortSignal): Promise<SnapshotManifest[]> {
    const out: SnapshotManifest[] = [];
    for await (const { key } of this.store.list("snapshots/", signal)) {
      const manifest = await this.#manifest(key, signal);
      if (manifest) out.push(manifest);
    }
    return out.toSorted((a, b) => a.publishedAt - b.publishedAt || (a.id < b.id ? -1 : 1));
  }

  /** NOT_FOUND for a snapshot that is not there, or not yet. */
  async get(id: string, signal?: AbortSignal): Promise<SnapshotManifest> {
    const manifest = SNAPSHOT_ID.test(id) ? await this.#manifest(manifestKey(id), signal) : undefined;
    if (manifest) return manifest;
    throw new AenvError("NOT_FOUND", `${this.store.name} has no snapshot ${id}`, {
      hint: "It was deleted, or never published completely: publish it again.",
    });
  }

  /** The snapshot is gone; its blobs go with the next garbage collections, where no other has them. */
  async remove(id: string, signal?: AbortSignal): Promise<void> {
    if (SNAPSHOT_ID.test(id)) await this.store.delete(manifestKey(id), signal);
  }

  /**
   * Makes the file of a blob at `path`, whole or not at all. CORRUPT when the store gives other bytes than were
   * published.
   */
  async fetch(blob: StoredBlob, path: string, signal?: AbortSignal): Promise<void> {
    await mkdir(dirname(path), { recursive: true });
    const stem = `${path}.fetch-${randomBytes(6).toString("hex")}`;
    const temp = { stored: `${stem}.stored`, file: stem };
    try {
      await this.#download(blob, temp.stored, signal);
      if (blob.encoding === "plain") {
        await rename(temp.stored, path);
        return;
      }
      const file = await open(temp.file, "wx", 0o644);
      try {
        await decode(temp.stored, blob.encoding, blob.contentBytes, file, signal);
        await file.sync();
      } finally {
        await file.close();
      }
      await rename(temp.file, path);
    } finally {
      await rm(temp.stored, { force: true });
      await rm(temp.file, { force: true });
    }
  }

  /** Keys that the next garbage collection deletes unless they are referenced again, since when. */
  async doomed(signal?: AbortSignal): Promise<Map<string, number>> {
    const json = await this.#json("doomed.json", signal);
    return new Map(json === undefined ? [] : Object.entries(this.#parse(doomedSchema, json, "doomed.json").since));
  }

  async setDoomed(since: ReadonlyMap<string, number>, signal?: AbortSignal): Promise<void> {
    const json = JSON.stringify({ since: Object.fromEntries(since) });
    await this.store.put("doomed.json", Buffer.from(json), signal);
  }

  /** What publishers say they are at; notes older than `before` are of publishers that died. */
  async pending(before: number, signal?: AbortSignal): Promise<{ keys: Set<string>; dead: string[] }> {
    const keys = new Set<string>();
    const dead: string[] = [];
    for await (const { key, modifiedAt } of this.store.list("pending/", signal)) {
      if (modifiedAt < before) {
        dead.push(key);
        continue;
      }
      const json = await this.#json(key, signal);
      if (json !== undefined) for (const k of this.#parse(pendingSchema, json, key).keys) keys.add(k);
    }
    return { keys, dead };
  }

  async #download(blob: StoredBlob, path: string, signal?: AbortSignal): Promise<void> {
    const hash = createHash("sha256");
    const file = await open(path, "wx", 0o644);
    try {
      // Read ahead, written and summed in order.
      const slots = new Semaphore(PARALLEL_READS);
      const reads: Promise<Buffer>[] = [];
      let next = 0;
      const ahead = (): void => {
        if (next >= blob.bytes) return;
        const length = Math.min(FETCH_BYTES, blob.bytes - next);
        const position = next;
        next += length;
        const read = slots.run(() => this.store.read(blob.key, position, length, signal));
        read.catch(() => {});
        reads.push(read);
      };
      for (let i = 0; i < PARALLEL_READS; i++) ahead();
      for (let at = 0; at < blob.bytes; ) {
        const data = await (reads.shift() as Promise<Buffer>);
        ahead();
        hash.update(data);
        await file.writeFile(data);
        at += data.length;
      }
      await file.sync();
    } finally {
      await file.close();
    }
    if (hash.digest("hex") !== blob.sha256) throw wrongBytes(this.store.name, blob);
  }

  async #manifest(key: string, signal?: AbortSignal): Promise<SnapshotManifest | undefined> {
    const json = await this.#json(key, signal);
    if (json === undefined) return undefined;
    const manifest = this.#parse(manifestSchema, json, key);
    if (manifestKey(manifest.id) !== key) throw this.#corrupt(key, `is of snapshot ${manifest.id}`);
    return manifest;
  }

  async #json(key: string, signal?: AbortSignal): Promise<unknown> {
    const info = await this.store.stat(key, signal);
    if (!info) return undefined;
    if (info.bytes > MAX_JSON_BYTES) throw this.#corrupt(key, `has ${info.bytes} bytes`);
    try {
      return JSON.parse((await this.store.read(key, 0, info.bytes, signal)).toString("utf8"));
    } catch (e) {
      if (e instanceof SyntaxError) throw this.#corrupt(key, "is not JSON");
      // Deleted between the two.
      if (e instanceof AenvError && e.code === "NOT_FOUND") return undefined;
      throw e;
    }
  }

  #parse<T>(schema: z.ZodType<T>, json: unknown, key: string): T {
    const parsed = schema.safeParse(json);
    if (parsed.success) return parsed.data;
    throw this.#corrupt(key, `is not valid: ${messageOf(parsed.error).slice(0, 300)}`);
  }

  #corrupt(key: string, what: string): AenvError {
    return new AenvError("CORRUPT", `${key} in ${this.store.name} ${what}`, {
      data: { store: this.store.name, key },
      hint: "Delete the object, and publish the snapshot again.",
    });
  }
}

export function wrongBytes(store: string, blob: StoredBlob): AenvError {
  return new AenvError("CORRUPT", `${blob.key} in ${store} is not what was published: its digest is another`, {
    data: { store, key: blob.key, sha256: blob.sha256 },
    hint: "Delete the object, and publish again what uses it.",
  });
}
