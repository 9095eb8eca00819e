import { AenvError } from "@aenv/base";

/**
 * The LSMT layer format of overlaybd. All integers are little-endian; a sector is 512 bytes.
 *
 * Header and trailer, 4096 bytes each: magic 8+16 | size u32 | flags u32 | index offset u64 | index entries u64 |
 * virtual size u64 | uuid 37 | parent uuid 37 | reserved 2 | version u8 | sub version u8 | user tag 256 | zeros.
 */
export const SECTOR = 512;
export const HEADER_BYTES = 4096;
export const HEADER_SECTORS = HEADER_BYTES / SECTOR;
export const ENTRY_BYTES = 16;
/** A length field has 14 bits. */
export const MAX_EXTENT_SECTORS = 16383;
/** Sealed indexes written by us are padded to a multiple of this. */
const INDEX_PAD_ENTRIES = 256;

const MAGIC = Buffer.from("4c534d5400010200657e63d29444084ca2d2c8ec4fcfae8a", "hex");
const STRUCT_BYTES = 390;
const TAG_BYTES = 256;
const UUID_TEXT = /^[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}$/i;
const NIL_UUID = "00000000-0000-0000-0000-000000000000";

const FLAG_HEADER = 1;
const FLAG_DATA = 2;
const FLAG_SEALED = 4;
const FLAG_SPARSE = 16;

export type BlockKind = "sealed-header" | "trailer" | "rw-data" | "rw-index";

export interface LayerHeader {
  header: boolean;
  data: boolean;
  sealed: boolean;
  sparse: boolean;
  indexOffset: number;
  indexEntries: number;
  virtualSize: number;
  /** Lower case; undefined for nil and absent. */
  uuid: string | undefined;
  parentUuid: string | undefined;
  userTag: string;
}

export interface HeaderFields {
  virtualSize: number;
  uuid?: string | undefined;
  parentUuid?: string | undefined;
  userTag?: string;
  indexOffset?: number;
  indexEntries?: number;
}

const FLAGS: Record<BlockKind, number> = {
  "sealed-header": FLAG_HEADER | FLAG_DATA | FLAG_SEALED,
  trailer: FLAG_DATA | FLAG_SEALED,
  "rw-data": FLAG_HEADER | FLAG_DATA,
  "rw-index": FLAG_HEADER,
};

export function encodeHeader(kind: BlockKind, fields: HeaderFields): Buffer {
  const b = Buffer.alloc(HEADER_BYTES);
  MAGIC.copy(b, 0);
  b.writeUInt32LE(STRUCT_BYTES, 24);
  b.writeUInt32LE(FLAGS[kind], 28);
  b.writeBigUInt64LE(BigInt(fields.indexOffset ?? (kind === "rw-index" ? HEADER_BYTES : 0)), 32);
  b.writeBigUInt64LE(BigInt(fields.indexEntries ?? 0), 40);
  b.writeBigUInt64LE(BigInt(fields.virtualSize), 48);
  b.write(fields.uuid ?? NIL_UUID, 56, "latin1");
  b.write(fields.parentUuid ?? NIL_UUID, 93, "latin1");
  b.writeUInt8(1, 132);
  b.writeUInt8(1, 133);
  b.write(fields.userTag ?? "", 134, TAG_BYTES, "utf8");
  return b;
}

/** Throws CORRUPT when the magic is wrong; the flags are for the caller to judge. `name` is the file, for the message. */
export function decodeHeader(b: Buffer, name: string): LayerHeader {
  if (b.length < HEADER_BYTES) throw corrupt(name, "is too short for a layer");
  if (MAGIC.compare(b, 0, MAGIC.length) !== 0) throw corrupt(name, "does not have the magic of a layer");
  const flags = b.readUInt32LE(28);
  return {
    header: (flags & FLAG_HEADER) !== 0,
    data: (flags & FLAG_DATA) !== 0,
    sealed: (flags & FLAG_SEALED) !== 0,
    sparse: (flags & FLAG_SPARSE) !== 0,
    indexOffset: u64(b, 32, name),
    indexEntries: u64(b, 40, name),
    virtualSize: u64(b, 48, name),
    uuid: uuidAt(b, 56),
    parentUuid: uuidAt(b, 93),
    userTag: textAt(b, 134, TAG_BYTES),
  };
}

/** Word 0: virtual sector 50 bits | length 14 bits. Word 1: place in the file 55 bits | zeroed 1 bit | tag 8 bits (kept 0). */
export function putEntry(b: Buffer, at: number, sector: number, length: number, place: number, zeroed: boolean): void {
  b.writeUInt32LE(sector % 0x100000000, at);
  b.writeUInt32LE((Math.floor(sector / 0x100000000) | (length << 18)) >>> 0, at + 4);
  b.writeUInt32LE(place % 0x100000000, at + 8);
  b.writeUInt32LE((Math.floor(place / 0x100000000) | (zeroed ? 1 << 23 : 0)) >>> 0, at + 12);
}

const INVALID_OFFSET = 2 ** 50 - 1;

/** Number of entries that a sealed index of `count` extents takes. */
export function paddedEntries(count: number): number {
  return Math.ceil(count / INDEX_PAD_ENTRIES) * INDEX_PAD_ENTRIES;
}

/** The padding entry: readers skip it. */
export function putInvalidEntry(b: Buffer, at: number): void {
  putEntry(b, at, INVALID_OFFSET, 0, 0, false);
}

export interface Entry {
  sector: number;
  length: number;
  place: number;
  zeroed: boolean;
}

/** False for padding. Fills `into` else. */
export function readEntry(b: Buffer, at: number, into: Entry): boolean {
  const w1 = b.readUInt32LE(at + 4);
  into.sector = b.readUInt32LE(at) + (w1 & 0x3ffff) * 0x100000000;
  into.length = w1 >>> 18;
  if (into.length === 0 || into.sector === INVALID_OFFSET) return false;
  const w3 = b.readUInt32LE(at + 12);
  into.place = b.readUInt32LE(at + 8) + (w3 & 0x7fffff) * 0x100000000;
  into.zeroed = (w3 & 0x800000) !== 0;
  return true;
}

export function corrupt(name: string, what: string, cause?: unknown): AenvError {
  return new AenvError("CORRUPT", `${name} ${what}`, {
    ...(cause === undefined ? {} : { cause }),
    data: { file: name },
    hint: `Delete ${name} and what uses it (aenv doctor lists that), then build or pull it again.`,
  });
}

function u64(b: Buffer, at: number, name: string): number {
  const n = b.readUInt32LE(at) + b.readUInt32LE(at + 4) * 0x100000000;
  if (!Number.isSafeInteger(n)) throw corrupt(name, `has an impossible number at byte ${at} of its header`);
  return n;
}

function textAt(b: Buffer, at: number, length: number): string {
  const end = b.subarray(at, at + length).indexOf(0);
  return b.toString("utf8", at, end < 0 ? at + length : at + end);
}

function uuidAt(b: Buffer, at: number): string | undefined {
  const text = textAt(b, at, 37).toLowerCase();
  return UUID_TEXT.test(text) && text !== NIL_UUID ? text : undefined;
}
