import { AenvError } from "@aenv/base";

/** QEMU's longest answers to the commands we use are a few KiB. */
export const MAX_QMP_LINE_BYTES = 256 * 1024;

export type QmpObject = Record<string, unknown>;

/**
 * Splits a byte stream into QMP messages: one JSON object per line, LF or CRLF. The peer is a process that a guest may
 * have taken over: a line is bounded, and anything but an object ends the stream with CORRUPT.
 */
export class QmpReader {
  #parts: Buffer[] = [];
  #size = 0;

  push(chunk: Buffer): QmpObject[] {
    const out: QmpObject[] = [];
    let from = 0;
    for (let at = chunk.indexOf(10); at >= 0; at = chunk.indexOf(10, from)) {
      this.#add(chunk.subarray(from, at));
      from = at + 1;
      const line = (this.#parts.length === 1 ? this.#parts[0] : Buffer.concat(this.#parts))?.toString("utf8").trim();
      this.#parts = [];
      this.#size = 0;
      if (line) out.push(parse(line));
    }
    if (from < chunk.length) this.#add(chunk.subarray(from));
    return out;
  }

  #add(part: Buffer): void {
    this.#size += part.length;
    if (this.#size > MAX_QMP_LINE_BYTES) throw new AenvError("CORRUPT", "the VMM sent an overlong QMP line");
    this.#parts.push(part);
  }
}

function parse(line: string): QmpObject {
  let value: unknown;
  try {
    value = JSON.parse(line);
  } catch (e) {
    throw new AenvError("CORRUPT", "the VMM sent a QMP line that is not JSON", { cause: e });
  }
  if (typeof value !== "object" || value === null || Array.isArray(value))
    throw new AenvError("CORRUPT", "the VMM sent a QMP line that is not an object");
  return value as QmpObject;
}
