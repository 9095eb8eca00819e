/** A line longer than this ends the connection: the longest is a spawn request with its argv. */
const MAX_LINE_BYTES = 1024 * 1024;

/** Splits a byte stream into JSON values, one a line. `push` throws on an overlong line or on what is not JSON. */
export class JsonLines {
  #rest = "";
  readonly #decoder = new TextDecoder();

  push(chunk: Buffer): unknown[] {
    const lines = (this.#rest + this.#decoder.decode(chunk, { stream: true })).split("\n");
    this.#rest = lines.pop() ?? "";
    if (this.#rest.length > MAX_LINE_BYTES) throw new Error("overlong line");
    return lines.filter((l) => l !== "").map((l) => JSON.parse(l) as unknown);
  }
}

export const jsonLine = (value: unknown): string => `${JSON.stringify(value)}\n`;
