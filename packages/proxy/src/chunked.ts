import { MalformedResponse, parseTrailers } from "./response-head.ts";

const LF = 10;
const CR = 13;
const SEMICOLON = 59;
/** Chunk extensions are read over; one chunk's are bounded by this. */
const MAX_EXTENSION_BYTES = 4096;
const MAX_TRAILER_BYTES = 16 * 1024;
/** 13 hexadecimal digits stay below 2^53. */
const MAX_SIZE_DIGITS = 13;

type State = "size" | "extension" | "size-lf" | "data" | "data-end" | "trailer" | "done";

/** Incremental decoder of the chunked coding (RFC 9112, section 7.1); bytes go on to `sink` without being copied. */
export class ChunkedDecoder {
  #state: State = "size";
  #left = 0;
  #digits = 0;
  #extension = 0;
  #line = "";
  #trailerBytes = 0;
  #trailerText = "";
  trailers: [string, string][] = [];

  get done(): boolean {
    return this.#state === "done";
  }

  /** Returns how many bytes belong to the body; less than the chunk's length only when the body has ended. */
  push(chunk: Buffer, sink: (data: Buffer) => void): number {
    let at = 0;
    while (at < chunk.length && this.#state !== "done") {
      if (this.#state === "data") {
        const take = Math.min(this.#left, chunk.length - at);
        sink(at === 0 && take === chunk.length ? chunk : chunk.subarray(at, at + take));
        at += take;
        this.#left -= take;
        if (this.#left === 0) this.#state = "data-end";
      } else {
        this.#byte(chunk[at++] as number);
      }
    }
    return at;
  }

  #byte(b: number): void {
    switch (this.#state) {
      case "size": {
        const digit = hex(b);
        if (digit >= 0) {
          if (++this.#digits > MAX_SIZE_DIGITS) throw new MalformedResponse("its chunk size is too large");
          this.#left = this.#left * 16 + digit;
        } else if (this.#digits === 0) throw new MalformedResponse("its chunk size is not a number");
        else if (b === SEMICOLON || b === 32 || b === 9) this.#state = "extension";
        else if (b === CR) this.#state = "size-lf";
        else if (b === LF) this.#sizeEnd();
        else throw new MalformedResponse("its chunk size is not a number");
        return;
      }
      case "extension":
        if (b === LF) this.#sizeEnd();
        else if (++this.#extension > MAX_EXTENSION_BYTES)
          throw new MalformedResponse("its chunk extension is too large");
        return;
      case "size-lf":
        if (b !== LF) throw new MalformedResponse("its chunk size line does not end");
        this.#sizeEnd();
        return;
      case "data-end":
        if (b === LF) {
          this.#state = "size";
          this.#left = this.#digits = this.#extension = 0;
        } else if (b !== CR) throw new MalformedResponse("a chunk is longer than it said");
        return;
      case "trailer":
        if (++this.#trailerBytes > MAX_TRAILER_BYTES) throw new MalformedResponse("its trailers are too large");
        if (b !== LF) {
          this.#line += String.fromCharCode(b);
          return;
        }
        if (this.#line === "" || this.#line === "\r") {
          this.trailers = parseTrailers(this.#trailerText);
          this.#state = "done";
        } else this.#trailerText += `${this.#line}\n`;
        this.#line = "";
        return;
      case "data":
      case "done":
    }
  }

  #sizeEnd(): void {
    this.#state = this.#left === 0 ? "trailer" : "data";
  }
}

function hex(b: number): number {
  if (b >= 48 && b <= 57) return b - 48;
  const lower = b | 32;
  return lower >= 97 && lower <= 102 ? lower - 87 : -1;
}
