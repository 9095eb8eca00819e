/** Numbers of the NBD protocol: https://github.com/NetworkBlockDevice/nbd/blob/master/doc/proto.md. All integers are big-endian. */

/** "NBDMAGIC" and "IHAVEOPT" as two u32 each. */
export const NBD_MAGIC = [0x4e42444d, 0x41474943] as const;
export const OPTION_MAGIC = [0x49484156, 0x454f5054] as const;
export const OPTION_REPLY_MAGIC = [0x0003e889, 0x045565a9] as const;
export const REQUEST_MAGIC = 0x25609513;
export const SIMPLE_REPLY_MAGIC = 0x67446698;
export const STRUCTURED_REPLY_MAGIC = 0x668e33ef;

export const HANDSHAKE_FIXED_NEWSTYLE = 1;
export const HANDSHAKE_NO_ZEROES = 2;

export const OPT = {
  EXPORT_NAME: 1,
  ABORT: 2,
  LIST: 3,
  INFO: 6,
  GO: 7,
  STRUCTURED_REPLY: 8,
  LIST_META_CONTEXT: 9,
  SET_META_CONTEXT: 10,
} as const;

const ERR = 0x80000000;
export const REP = {
  ACK: 1,
  SERVER: 2,
  INFO: 3,
  META_CONTEXT: 4,
  ERR_UNSUP: ERR + 1,
  ERR_INVALID: ERR + 3,
  ERR_UNKNOWN: ERR + 6,
  ERR_TOO_BIG: ERR + 9,
} as const;

export const INFO = { EXPORT: 0, NAME: 1, DESCRIPTION: 2, BLOCK_SIZE: 3 } as const;

export const TRANSMISSION = {
  HAS_FLAGS: 1,
  READ_ONLY: 2,
  SEND_FLUSH: 4,
  SEND_FUA: 8,
  SEND_TRIM: 32,
  SEND_WRITE_ZEROES: 64,
  SEND_DF: 128,
  CAN_MULTI_CONN: 256,
  SEND_CACHE: 1024,
  SEND_FAST_ZERO: 2048,
} as const;

export const CMD = {
  READ: 0,
  WRITE: 1,
  DISC: 2,
  FLUSH: 3,
  TRIM: 4,
  CACHE: 5,
  WRITE_ZEROES: 6,
  BLOCK_STATUS: 7,
} as const;

export const CMD_FLAG = { FUA: 1, NO_HOLE: 2, DF: 4, REQ_ONE: 8, FAST_ZERO: 16 } as const;

export const REPLY_FLAG_DONE = 1;
export const CHUNK = {
  NONE: 0,
  OFFSET_DATA: 1,
  OFFSET_HOLE: 2,
  BLOCK_STATUS: 5,
  ERROR: 0x8001,
} as const;

/** base:allocation */
export const STATE_HOLE = 1;
export const STATE_ZERO = 2;

export const REQUEST_BYTES = 28;
export const SIMPLE_REPLY_BYTES = 16;
export const CHUNK_HEADER_BYTES = 20;

/** The errnos that may go on the wire. */
export const ERRNO = {
  EPERM: 1,
  EIO: 5,
  ENOMEM: 12,
  EINVAL: 22,
  ENOSPC: 28,
  ENOTSUP: 95,
  ESHUTDOWN: 108,
} as const;
export type Errno = keyof typeof ERRNO;

/** Largest READ and WRITE we take, and what the export announces. QEMU's own limit is the same. */
export const MAX_PAYLOAD_BYTES = 32 * 1024 * 1024;
/** Longest export or context name the protocol allows. */
export const MAX_NAME_BYTES = 4096;
