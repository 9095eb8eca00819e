import { closeSync, fstatSync, openSync } from "node:fs";
import { AenvError, errnoOf } from "@aenv/base";
import { readStub } from "./cache/stub.ts";
import { type ExtentMap, ExtentBuilder, ZEROED } from "./extents.ts";
import {
  corrupt,
  decodeHeader,
  ENTRY_BYTES,
  type Entry,
  HEADER_BYTES,
  HEADER_SECTORS,
  type LayerHeader,
  readEntry,
  SECTOR,
} from "./format.ts";
import { type Reads, readsFrom, readsSync, wanted } from "./reads.ts";
import { readTar } from "./tar.ts";
import { readsThrough, readZFile, type ZFileIndex } from "./zfile.ts";

/** An index larger than this is refused before memory is taken for it: 4 KiB extents of 64 GiB. */
const MAX_ENTRIES = 16 * 1024 * 1024;
const READ_ENTRIES = 65536;

/** How a layer lies in its file: alone, in a tar, compressed, or both. Can be sent to another thread. */
export interface LayerForm {
  /** Byte of the file at which the payload starts. */
  offset: number;
  /** Where each compressed block of the payload is; undefined when it is plain. */
  zfile: ZFileIndex | undefined;
}

export interface Layer {
  header: LayerHeader;
  /** The file number of every data extent is 0; places are those of the plain layer. */
  extents: ExtentMap;
  form: LayerForm;
}

/** An open sealed layer: the file and its index. */
export interface SealedLayer extends Layer {
  path: string;
  fd: number;
  bytes: number;
}

/** Opens and validates a sealed layer. Throws NOT_FOUND or CORRUPT naming the file. The caller closes `fd`. */
export function openLayer(path: string): SealedLayer {
  let fd: number;
  try {
    fd = openSync(path, "r");
  } catch (e) {
    if (errnoOf(e) === "ENOENT") {
      throw new AenvError("NOT_FOUND", `layer ${path} is missing`, {
        cause: e,
        data: { file: path },
        hint: "Build or pull again what uses it.",
      });
    }
    throw AenvError.from(e, `opening layer ${path}`);
  }
  try {
    const bytes = fstatSync(fd).size;
    return { path, fd, bytes, ...readsSync(readLayer(bytes, path), fd, path) };
  } catch (e) {
    closeSync(fd);
    if (readStub(path)) {
      throw new AenvError("INVALID_ARGUMENT", `layer ${path} is in a store`, {
        cause: e,
        hint: "Fetch it from its store first.",
      });
    }
    throw AenvError.from(e, `reading layer ${path}`);
  }
}

/** Parses and validates the layer in a file of `size` bytes. Throws CORRUPT naming the file. */
export function* readLayer(size: number, name: string): Reads<Layer> {
  const payload = yield* readTar(size, name);
  const zfile = yield* readsFrom(readZFile(payload.length, name), payload.offset);
  const sealed = readSealed(zfile ? zfile.bytes : payload.length, name);
  const plain = zfile ? readsThrough(sealed, zfile, name) : sealed;
  return { ...(yield* readsFrom(plain, payload.offset)), form: { offset: payload.offset, zfile } };
}

function* readSealed(bytes: number, path: string): Reads<Pick<Layer, "header" | "extents">> {
  if (bytes < 2 * HEADER_BYTES) throw corrupt(path, `is too short for a sealed layer (${bytes} bytes)`);
  const header = decodeHeader(yield* wanted(0, HEADER_BYTES), path);
  if (!header.header || !header.data) throw corrupt(path, "does not start with the header of a layer's data");
  const trailerAt = bytes - HEADER_BYTES;
  const trailer = decodeHeader(yield* wanted(trailerAt, HEADER_BYTES), path);
  if (trailer.header || !trailer.data || !trailer.sealed) throw corrupt(path, "does not end with a trailer");
  const { indexOffset, indexEntries } = trailer;
  if (indexOffset < HEADER_BYTES && indexEntries > 0) throw corrupt(path, "has its index inside the header");
  if (indexOffset % SECTOR !== 0) throw corrupt(path, "has an unaligned index");
  if (indexEntries > MAX_ENTRIES) throw corrupt(path, `has too many extents (${indexEntries})`);
  if (indexEntries > 0 && indexEntries * ENTRY_BYTES > trailerAt - indexOffset) {
    throw corrupt(path, "has an index that does not fit before its trailer");
  }
  return { header: trailer, extents: yield* readIndex(path, indexOffset, indexEntries) };
}

function* readIndex(path: string, offset: number, entries: number): Reads<ExtentMap> {
  const builder = new ExtentBuilder(Math.min(entries, READ_ENTRIES));
  const limit = offset / SECTOR;
  const e: Entry = { sector: 0, length: 0, place: 0, zeroed: false };
  let end = 0;
  for (let done = 0; done < entries; done += READ_ENTRIES) {
    const n = Math.min(READ_ENTRIES, entries - done);
    const b = yield* wanted(offset + done * ENTRY_BYTES, n * ENTRY_BYTES);
    for (let i = 0; i < n; i++) {
      if (!readEntry(b, i * ENTRY_BYTES, e)) continue;
      if (e.sector < end) throw corrupt(path, `has unsorted or overlapping extents at sector ${e.sector}`);
      const dataEnd = e.zeroed ? e.place : e.place + e.length;
      if (e.place < HEADER_SECTORS || dataEnd > limit || (!e.zeroed && e.place >= limit)) {
        throw corrupt(path, `has an extent outside of its data at sector ${e.sector}`);
      }
      end = e.sector + e.length;
      builder.add(e.sector, end, e.place, e.zeroed ? ZEROED : 0);
    }
  }
  return builder.build();
}
