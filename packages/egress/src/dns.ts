/** The messages of DNS (RFC 1035) that the gateway speaks: one question in, addresses out. */

export interface Question {
  id: number;
  /** Lower case, without a final dot. */
  name: string;
  type: number;
  recursion: boolean;
  /** Header and question as they came. */
  raw: Buffer;
}

export const TYPE_A = 1;
export const RCODE = { ok: 0, formErr: 1, servFail: 2, nxDomain: 3, notImp: 4, refused: 5 } as const;
export type Rcode = (typeof RCODE)[keyof typeof RCODE];

const HEADER = 12;
const CLASS_IN = 1;
const MAX_NAME = 253;
/** With all of these an answer still fits into 512 bytes, which every asker takes over UDP. */
export const MAX_ANSWERS = 12;

/** A question, or the code to refuse with; undefined: not even that. */
export function parseQuestion(data: Buffer): Question | { id: number; rcode: Rcode } | undefined {
  if (data.length < HEADER) return undefined;
  const id = data.readUInt16BE(0);
  const flags = data.readUInt16BE(2);
  // An answer to an answer could go on for ever.
  if ((flags & 0x8000) !== 0) return undefined;
  if ((flags & 0x7800) !== 0) return { id, rcode: RCODE.notImp };
  if (data.readUInt16BE(4) !== 1) return { id, rcode: RCODE.formErr };
  const labels: string[] = [];
  let at = HEADER;
  for (;;) {
    const size = data[at];
    // Compression has no place in a first name.
    if (size === undefined || size > 63 || at + 1 + size > data.length) return { id, rcode: RCODE.formErr };
    if (size === 0) break;
    labels.push(data.toString("latin1", at + 1, at + 1 + size));
    at += 1 + size;
  }
  const end = at + 5;
  const name = labels.join(".").toLowerCase();
  if (data.length < end || name.length > MAX_NAME) return { id, rcode: RCODE.formErr };
  if (data.readUInt16BE(at + 3) !== CLASS_IN) return { id, rcode: RCODE.refused };
  return { id, name, type: data.readUInt16BE(at + 1), recursion: (flags & 0x0100) !== 0, raw: data.subarray(0, end) };
}

export function refusal(id: number, rcode: Rcode): Buffer {
  const out = Buffer.alloc(HEADER);
  out.writeUInt16BE(id, 0);
  out.writeUInt16BE(0x8080 | rcode, 2);
  return out;
}

/** `ttl` in seconds. */
export function answer(q: Question, rcode: Rcode, addresses: readonly string[] = [], ttl = 0): Buffer {
  const head = Buffer.from(q.raw);
  head.writeUInt16BE(0x8080 | (q.recursion ? 0x0100 : 0) | rcode, 2);
  head.writeUInt16BE(Math.min(addresses.length, MAX_ANSWERS), 6);
  head.writeUInt16BE(0, 8);
  head.writeUInt16BE(0, 10);
  const records = addresses.slice(0, MAX_ANSWERS).map((ip) => {
    const r = Buffer.alloc(16);
    // The name is the question's.
    r.writeUInt16BE(0xc000 | HEADER, 0);
    r.writeUInt16BE(TYPE_A, 2);
    r.writeUInt16BE(CLASS_IN, 4);
    r.writeUInt32BE(ttl, 6);
    r.writeUInt16BE(4, 10);
    r.set(ip.split(".").map(Number), 12);
    return r;
  });
  return Buffer.concat([head, ...records]);
}
