/** A snapshot as one file that any node can take: a tar of its manifest and then its blobs, in the manifest's order. */
import { createHash, randomBytes } from "node:crypto";
import { open, rm, mkdir } from "node:fs/promises";
import { join } from "node:path";
import type { Readable, Writable } from "node:stream";
import { pipeline } from "node:stream/promises";
import { AenvError, messageOf } from "@aenv/base";
import { extract, pack } from "tar-stream";
import {
  MAX_JSON_BYTES,
  manifestKey,
  manifestSchema,
  type SnapshotManifest,
  type SnapshotRepository,
  type StoredBlob,
} from "./repository.ts";

const MANIFEST = "manifest.json";
const STEP_BYTES = 8 * 1024 * 1024;

/** Writes the archive of a published snapshot; ends the stream. */
export async function exportSnapshot(
  repository: SnapshotRepository,
  id: string,
  to: Writable,
  signal?: AbortSignal,
): Promise<SnapshotManifest> {
  const manifest = await repository.get(id, signal);
  const tar = pack();
  const sent = pipeline(tar, to, signal === undefined ? {} : { signal });
  sent.catch(() => {});
  const json = Buffer.from(JSON.stringify(manifest));
  tar.entry({ name: MANIFEST, size: json.length }, json);
  try {
    for (const blob of uniqueBlobs(manifest)) await exportBlob(repository, blob, tar, signal);
    tar.finalize();
  } catch (e) {
    tar.destroy(e as Error);
    await sent.catch(() => {});
    throw e;
  }
  await sent;
  return manifest;
}

async function exportBlob(
  repository: SnapshotRepository,
  blob: StoredBlob,
  tar: ReturnType<typeof pack>,
  signal?: AbortSignal,
): Promise<void> {
  const done = Promise.withResolvers<void>();
  const entry = tar.entry({ name: blob.key, size: blob.bytes }, (e) => (e ? done.reject(e) : done.resolve()));
  done.promise.catch(() => {});
  // A reader that goes away ends the tar, and the entry with it.
  tar.once("close", () => done.reject(new AenvError("CANCELLED", "the archive was not taken")));
  for (let at = 0; at < blob.bytes; at += STEP_BYTES) {
    const data = await repository.store.read(blob.key, at, Math.min(STEP_BYTES, blob.bytes - at), signal);
    if (!entry.write(data)) {
      await Promise.race([new Promise<void>((go) => entry.once("drain", () => go(undefined))), done.promise]);
    }
  }
  entry.end(null);
  await done.promise;
}

/**
 * Puts a snapshot out of an archive into a repository, its manifest last. INVALID_ARGUMENT for what is no archive of
 * ours, CORRUPT for one whose blobs are not what its manifest says. `scratch` is a folder for one blob at a time.
 */
export async function importSnapshot(
  repository: SnapshotRepository,
  from: Readable,
  scratch: string,
  signal?: AbortSignal,
): Promise<SnapshotManifest> {
  await mkdir(scratch, { recursive: true });
  const tar = extract();
  const read = pipeline(from, tar, signal === undefined ? {} : { signal });
  read.catch(() => {});
  let manifest: SnapshotManifest | undefined;
  let expected: StoredBlob[] = [];
  try {
    for await (const entry of tar) {
      const { name, size, type } = entry.header;
      if (type !== "file") throw notOurs(`holds ${JSON.stringify(name.slice(0, 100))}, which is not a file`);
      if (!manifest) {
        if (name !== MANIFEST) throw notOurs(`does not start with ${MANIFEST}`);
        if (size > MAX_JSON_BYTES) throw notOurs(`has a manifest of ${size} bytes`);
        manifest = parse(await gather(entry as AsyncIterable<Buffer>, size));
        expected = uniqueBlobs(manifest);
        continue;
      }
      const blob = expected.shift();
      if (blob?.key !== name || blob.bytes !== size) {
        throw notOurs(`holds ${JSON.stringify(name.slice(0, 100))} where its manifest has another`);
      }
      await importBlob(repository, blob, entry as AsyncIterable<Buffer>, scratch, signal);
    }
    await read;
  } catch (e) {
    tar.destroy();
    if (e instanceof AenvError) throw e;
    signal?.throwIfAborted();
    throw notOurs(`cannot be read: ${messageOf(e)}`, e);
  }
  if (!manifest || expected.length > 0) throw notOurs("ends early");
  const json = Buffer.from(JSON.stringify({ ...manifest, publishedAt: Date.now() }));
  await repository.store.put(manifestKey(manifest.id), json, signal);
  return manifest;
}

async function importBlob(
  repository: SnapshotRepository,
  blob: StoredBlob,
  entry: AsyncIterable<Buffer>,
  scratch: string,
  signal?: AbortSignal,
): Promise<void> {
  const path = join(scratch, `import-${randomBytes(8).toString("hex")}`);
  const file = await open(path, "wx+", 0o600);
  try {
    await rm(path);
    const hash = createHash("sha256");
    for await (const data of entry) {
      hash.update(data);
      await file.writeFile(data);
    }
    if (hash.digest("hex") !== blob.sha256) {
      throw new AenvError("CORRUPT", `the archive's ${blob.key} is not what its manifest says`, {
        hint: "Export the snapshot again.",
      });
    }
    if ((await repository.store.stat(blob.key, signal))?.bytes === blob.bytes) return;
    await repository.store.put(
      blob.key,
      {
        bytes: blob.bytes,
        async read(position, length) {
          const into = Buffer.allocUnsafeSlow(length);
          for (let done = 0; done < length; ) {
            const { bytesRead } = await file.read(into, done, length - done, position + done);
            if (bytesRead === 0) throw new AenvError("INTERNAL", "a file of ours ended early");
            done += bytesRead;
          }
          return into;
        },
      },
      signal,
    );
  } finally {
    await file.close();
  }
}

async function gather(entry: AsyncIterable<Buffer>, size: number): Promise<Buffer> {
  const parts: Buffer[] = [];
  let bytes = 0;
  for await (const data of entry) {
    bytes += data.length;
    if (bytes > size) throw notOurs("has a manifest that is longer than it says");
    parts.push(data);
  }
  return Buffer.concat(parts);
}

function parse(json: Buffer): SnapshotManifest {
  let value: unknown;
  try {
    value = JSON.parse(json.toString("utf8"));
  } catch (e) {
    throw notOurs("has a manifest that is not JSON", e);
  }
  const parsed = manifestSchema.safeParse(value);
  if (!parsed.success) throw notOurs(`has a manifest that is not valid: ${parsed.error.message.slice(0, 300)}`);
  return parsed.data;
}

function uniqueBlobs(manifest: SnapshotManifest): StoredBlob[] {
  return [...new Map(manifest.blobs.map((b) => [b.key, b])).values()];
}

function notOurs(what: string, cause?: unknown): AenvError {
  return new AenvError("INVALID_ARGUMENT", `the archive ${what}`, {
    ...(cause === undefined ? {} : { cause }),
    hint: "Give a file that aenv snapshot export wrote.",
  });
}
