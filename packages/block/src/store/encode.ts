/** What files of a snapshot become in a store, and back. */
import { createHash, randomBytes } from "node:crypto";
import { closeSync } from "node:fs";
import { type FileHandle, open, rm } from "node:fs/promises";
import { join } from "node:path";
import { AenvError, errnoOf } from "@aenv/base";
import { SLOT_BYTES } from "../cache/slots.ts";
import type { LayerStub } from "../cache/stub.ts";
import { ZEROED } from "../extents.ts";
import { SECTOR } from "../format.ts";
import { writeRaw } from "../import.ts";
import { openLayer } from "../layer.ts";
import { fileSink, type Sink } from "../sink.ts";
import { FileSource, openSource, type Source } from "../source.ts";
import { openZFile } from "../zfile-file.ts";
import { ZFileWriter } from "../zfile.ts";
import type { BlobSource, BlobStore } from "./port.ts";

/**
 * "plain": the file's bytes. "zfile": the same compressed so that ranges of it can be read; for sealed layers.
 * "sparse": a flat file with holes as a compressed layer that stores no zeros.
 */
export type Encoding = "plain" | "zfile" | "sparse";

/** Whole pieces of the cache. */
const STEP_BYTES = 4 * SLOT_BYTES;

/** A file as it goes into a store. Disposing removes what was made for it, not the file itself. */
export interface Encoded extends BlobSource, AsyncDisposable {
  /** Hexadecimal, of the stored bytes. */
  sha256: string;
  /** The same of each MiB. */
  pieces: string[];
  /** Size of the file itself. */
  contentBytes: number;
}

/** Compresses, where that is asked for, to a file in `scratch`. The same file gives the same bytes every time. */
export async function encode(
  path: string,
  encoding: Encoding,
  scratch: string,
  signal?: AbortSignal,
): Promise<Encoded> {
  await using undo = new AsyncDisposableStack();
  const original = undo.adopt(await openRead(path), (f) => f.close());
  const contentBytes = (await original.stat()).size;
  let stored = original;
  if (encoding !== "plain" && contentBytes > 0) {
    const temp = join(scratch, `encode-${randomBytes(8).toString("hex")}`);
    const out = await open(temp, "wx+", 0o600);
    undo.defer(() => out.close());
    // The open file is all that is needed of it.
    await rm(temp);
    const zfile = new ZFileWriter(fileSink(out), { compression: "lz4" });
    if (encoding === "sparse") await writeRaw(path, zfile);
    else await copy(original, contentBytes, zfile, signal);
    await zfile.finish();
    stored = out;
  }
  const { size: bytes } = await stored.stat();
  const hash = createHash("sha256");
  const pieces: string[] = [];
  for (let at = 0; at < bytes; at += STEP_BYTES) {
    signal?.throwIfAborted();
    const data = await readAt(stored, at, Math.min(STEP_BYTES, bytes - at), path);
    hash.update(data);
    for (let p = 0; p < data.length; p += SLOT_BYTES) {
      pieces.push(
        createHash("sha256")
          .update(data.subarray(p, p + SLOT_BYTES))
          .digest("hex"),
      );
    }
  }
  const held = undo.move();
  return {
    bytes,
    contentBytes,
    sha256: hash.digest("hex"),
    pieces,
    read: (position, length) => readAt(stored, position, length, path),
    [Symbol.asyncDispose]: () => held.disposeAsync(),
  };
}

/** What a store has already, to be put into another one as it is. */
export function storedAlready(
  { key, sha256, pieces, bytes, contentBytes }: LayerStub,
  from: BlobStore,
  signal?: AbortSignal,
): Encoded {
  return {
    sha256,
    pieces,
    bytes,
    contentBytes,
    read: (position, length) => from.read(key, position, length, signal),
    [Symbol.asyncDispose]: () => Promise.resolve(from[Symbol.dispose]()),
  };
}

/**
 * Makes the file out of what is stored (in the file `stored`, whose digest is checked). Zeros become holes. CORRUPT when
 * it is not what the encoding says.
 */
export async function decode(
  stored: string,
  encoding: Encoding,
  contentBytes: number,
  into: FileHandle,
  signal?: AbortSignal,
): Promise<void> {
  if (encoding === "plain" || contentBytes === 0) {
    const file = await openRead(stored);
    try {
      const { size } = await file.stat();
      if (size !== contentBytes) throw wrong(stored, `has ${size} bytes, not ${contentBytes}`);
      await copy(file, size, fileSink(into), signal);
    } finally {
      await file.close();
    }
    return;
  }
  if (encoding === "zfile") return await decodeZFile(stored, contentBytes, into, signal);
  const layer = openLayer(stored);
  try {
    if (Math.ceil(contentBytes / 4096) * 4096 !== layer.header.virtualSize) {
      throw wrong(stored, `holds ${layer.header.virtualSize} bytes, not ${contentBytes}`);
    }
    await into.truncate(contentBytes);
    const source = openSource({ ...layer, warm: FileSource.warmMap(layer.bytes) });
    const map = layer.extents;
    for (let i = 0; i < map.count; i++) {
      if (map.file[i] === ZEROED) continue;
      const start = (map.start[i] as number) * SECTOR;
      const end = Math.min((map.end[i] as number) * SECTOR, contentBytes);
      await pour(source, (map.place[i] as number) * SECTOR, end - start, into, start, signal);
    }
  } finally {
    closeSync(layer.fd);
  }
}

async function decodeZFile(
  stored: string,
  contentBytes: number,
  into: FileHandle,
  signal?: AbortSignal,
): Promise<void> {
  using zfile = openZFile(stored);
  if (zfile.contentBytes !== contentBytes)
    throw wrong(stored, `holds ${zfile.contentBytes} bytes, not ${contentBytes}`);
  await pour(zfile.source, 0, contentBytes, into, 0, signal);
}

async function pour(
  source: Source,
  from: number,
  length: number,
  into: FileHandle,
  at: number,
  signal?: AbortSignal,
): Promise<void> {
  const step = Buffer.allocUnsafeSlow(Math.min(STEP_BYTES, length));
  const sink = fileSink(into, at);
  for (let done = 0; done < length; done += step.length) {
    signal?.throwIfAborted();
    const n = Math.min(step.length, length - done);
    await source.fetch(step, 0, n, from + done);
    await sink.write(step.subarray(0, n));
  }
}

async function copy(from: FileHandle, bytes: number, to: Sink, signal?: AbortSignal): Promise<void> {
  for (let at = 0; at < bytes; at += STEP_BYTES) {
    signal?.throwIfAborted();
    await to.write(await readAt(from, at, Math.min(STEP_BYTES, bytes - at), "the file"));
  }
}

async function openRead(path: string): Promise<FileHandle> {
  return await open(path, "r").catch((e: unknown) => {
    if (errnoOf(e) !== "ENOENT") throw AenvError.from(e, `opening ${path}`);
    throw new AenvError("NOT_FOUND", `${path} is missing`, { cause: e, data: { file: path } });
  });
}

async function readAt(file: FileHandle, position: number, length: number, name: string): Promise<Buffer> {
  const into = Buffer.allocUnsafeSlow(length);
  for (let done = 0; done < length; ) {
    const { bytesRead } = await file.read(into, done, length - done, position + done);
    if (bytesRead === 0) throw wrong(name, "shrank while it was read");
    done += bytesRead;
  }
  return into;
}

function wrong(path: string, what: string): AenvError {
  return new AenvError("CORRUPT", `${path} ${what}`, { data: { file: path } });
}
