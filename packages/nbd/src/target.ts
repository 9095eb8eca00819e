import { errnoOf } from "@aenv/base";
import type { Errno } from "./protocol.ts";

/** Done at once (undefined), or later. A failure is thrown or rejected; its `code` becomes the errno the client sees. */
export type Pending = Promise<void> | undefined;

export interface Extent {
  length: number;
  /** Reads as zeros. */
  zero: boolean;
  /** Takes no space of its own. */
  hole: boolean;
}

/**
 * The disk behind an export. Offsets and lengths are bytes inside `[0, size)`: the server has checked that, and that no
 * length is 0. They need not be aligned. Requests may overlap in time; the order of overlapping ones is not defined.
 */
export interface BlockTarget {
  readonly size: number;
  readonly readOnly: boolean;
  /** Fills `into[at, at + length)` if that needs no waiting; else starts nothing and returns false: `read` is for then. */
  readNow(offset: number, length: number, into: Buffer, at: number): boolean;
  read(offset: number, length: number, into: Buffer, at: number): Promise<void>;
  /** `data` is only valid until the call returns undefined or its promise settles. */
  write(offset: number, data: Buffer, fua: boolean): Pending;
  /** After it every write acknowledged before it survives a crash. */
  flush(): Pending;
  /** The range reads as zeros afterwards; `punch` allows to give its space back. */
  zero(offset: number, length: number, punch: boolean, fua: boolean): Pending;
  /** The range may read as anything afterwards. */
  trim(offset: number, length: number, fua: boolean): Pending;
  /** Extents from `offset` on, together at most `length` bytes and at least one byte, at most `limit` of them. */
  status(offset: number, length: number, limit: number): Extent[];
  /** Called before the answers of a batch with modifications are sent: what they acknowledge must survive our process. */
  commit(): void;
  /** Brings the range near, if that means something here. */
  cache(offset: number, length: number): Pending;
}

const ERRNO_OF_CODE: Readonly<Record<string, Errno>> = {
  ENOSPC: "ENOSPC",
  EDQUOT: "ENOSPC",
  EFBIG: "ENOSPC",
  NO_SPACE: "ENOSPC",
  EPERM: "EPERM",
  EACCES: "EPERM",
  EROFS: "EPERM",
  PERMISSION_DENIED: "EPERM",
  EINVAL: "EINVAL",
  INVALID_ARGUMENT: "EINVAL",
  ENOMEM: "ENOMEM",
  UNIMPLEMENTED: "ENOTSUP",
};

/** What a client is told about a failure: the guest must see "no space" as that, and everything unknown as EIO. */
export function wireErrno(e: unknown): Errno {
  const code = errnoOf(e);
  return (code !== undefined && Object.hasOwn(ERRNO_OF_CODE, code) ? ERRNO_OF_CODE[code] : undefined) ?? "EIO";
}
