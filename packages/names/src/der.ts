/** A writer of DER (ITU-T X.690), as far as certificates need it. Values go in as bytes and come out with tag and length. */

function tlv(tag: number, ...parts: readonly Uint8Array[]): Buffer {
  const content = Buffer.concat(parts);
  const n = content.length;
  if (n < 0x80) return Buffer.concat([Buffer.from([tag, n]), content]);
  const bytes: number[] = [];
  for (let left = n; left > 0; left = Math.floor(left / 256)) bytes.unshift(left % 256);
  return Buffer.concat([Buffer.from([tag, 0x80 | bytes.length, ...bytes]), content]);
}

export const sequence = (...parts: readonly Uint8Array[]): Buffer => tlv(0x30, ...parts);
export const set = (...parts: readonly Uint8Array[]): Buffer => tlv(0x31, ...parts);
export const octets = (bytes: Uint8Array): Buffer => tlv(0x04, bytes);
export const bool = (value: boolean): Buffer => tlv(0x01, Buffer.from([value ? 0xff : 0]));
export const utf8 = (text: string): Buffer => tlv(0x0c, Buffer.from(text, "utf8"));
/** A bit string whose last byte has `unused` bits that do not count. */
export const bits = (bytes: Uint8Array, unused = 0): Buffer => tlv(0x03, Buffer.from([unused]), bytes);
/** Context-specific tag: `constructed` holds values, else raw bytes. */
export const context = (n: number, constructed: boolean, ...parts: readonly Uint8Array[]): Buffer =>
  tlv((constructed ? 0xa0 : 0x80) | n, ...parts);

/** A number that is not negative, from its big-endian bytes. */
export function integer(bytes: Uint8Array): Buffer {
  let at = 0;
  while (at < bytes.length - 1 && bytes[at] === 0) at++;
  const plain = bytes.subarray(at);
  return tlv(0x02, ...((plain[0] ?? 0) & 0x80 ? [Buffer.from([0])] : []), plain);
}

export function oid(dotted: string): Buffer {
  const [first = 0, second = 0, ...rest] = dotted.split(".").map(Number);
  const bytes = [first * 40 + second];
  for (const n of rest) {
    const group = [n & 0x7f];
    for (let left = n >> 7; left > 0; left >>= 7) group.unshift((left & 0x7f) | 0x80);
    bytes.push(...group);
  }
  return tlv(0x06, Buffer.from(bytes));
}

/** RFC 5280, 4.1.2.5: UTCTime through 2049, GeneralizedTime from then on; whole seconds. */
export function time(ms: number): Buffer {
  const plain = `${new Date(ms).toISOString().replace(/[-:T]/g, "").slice(0, 14)}Z`;
  return plain < "2050" ? tlv(0x17, Buffer.from(plain.slice(2), "latin1")) : tlv(0x18, Buffer.from(plain, "latin1"));
}
