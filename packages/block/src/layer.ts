import { closeSync, fstatSync, openSync, readSync } from "node:fs";
import { AenvError, errnoOf } from "@aenv/base";
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

/** An index larger than this is refused before memory is taken for it: 4 KiB extents of 64 GiB. */
const MAX_ENTRIES = 16 * 1024 * 1024;
const READ_ENTRIES = 65536;

/** An open sealed layer: the file and its index. The file number of every data extent is 0. */
export interface SealedLayer {
  path: string;
  fd: number;
  bytes: number;
  header: LayerHeader;
  extents: ExtentMap;
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
    return { path, fd, ...readSealed(fd, path) };
  } catch (e) {
    closeSync(fd);
    throw AenvError.from(e, `reading layer ${path}`);
  }
}

function readSealed(fd: number, path: string): Pick<SealedLayer, "bytes" | "header" | "extents"> {
  const bytes = fstatSync(fd).size;
  if (bytes < 2 * HEADER_BYTES) throw corrupt(path, `is too short for a sealed layer (${bytes} bytes)`);
  const header = decodeHeader(readExact(fd, 0, HEADER_BYTES, path), path);
  if (!header.header || !header.data) throw corrupt(path, "does not start with the header of a layer's data");
  const trailerAt = bytes - HEADER_BYTES;
  const trailer = decodeHeader(readExact(fd, trailerAt, HEADER_BYTES, path), path);
  if (trailer.header || !trailer.data || !trailer.sealed) throw corrupt(path, "does not end with a trailer");
  const { indexOffset, indexEntries } = trailer;
  if (indexOffset < HEADER_BYTES && indexEntries > 0) throw corrupt(path, "has its index inside the header");
  if (indexOffset % SECTOR !== 0) throw corrupt(path, "has an unaligned index");
  if (indexEntries > MAX_ENTRIES) throw corrupt(path, `has too many extents (${indexEntries})`);
  if (indexEntries > 0 && indexEntries * ENTRY_BYTES > trailerAt - indexOffset) {
    throw corrupt(path, "has an index that does not fit before its trailer");
  }
  return { bytes, header: trailer, extents: readIndex(fd, path, indexOffset, indexEntries) };
}

function readIndex(fd: number, path: string, offset: number, entries: number): ExtentMap {
  const builder = new ExtentBuilder(Math.min(entries, READ_ENTRIES));
  const limit = offset / SECTOR;
  const e: Entry = { sector: 0, length: 0, place: 0, zeroed: false };
  let end = 0;
  for (let done = 0; done < entries; done += READ_ENTRIES) {
    const n = Math.min(READ_ENTRIES, entries - done);
    const b = readExact(fd, offset + done * ENTRY_BYTES, n * ENTRY_BYTES, path);
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

export function readExact(fd: number, at: number, length: number, name: string): Buffer {
  const b = Buffer.allocUnsafe(length);
  let done = 0;
  while (done < length) {
    const n = readSync(fd, b, done, length - done, at + done);
    if (n === 0) throw corrupt(name, `ends at byte ${at + done}, in the middle of its data`);
    done += n;
  }
  return b;
}
