import { Transform } from "node:stream";
import { type Output, printable, size } from "../output.ts";

const REDRAW_MS = 100;
const BAR = 24;

/** Counts bytes; draws a bar where a person looks at standard error. */
export class Progress {
  readonly #out: Output;
  readonly #started = performance.now();
  readonly #total: number | undefined;
  readonly #drawn: boolean;
  #bytes = 0;
  #files = 0;
  #label = "";
  #last = 0;

  constructor(out: Output, total: number | undefined) {
    this.#out = out;
    this.#total = total;
    this.#drawn = !out.json && out.stderr.isTTY === true;
  }

  get files(): number {
    return this.#files;
  }

  /** Passes bytes through and counts them. */
  counter(label: string): Transform {
    this.#label = label;
    return new Transform({
      transform: (chunk: Buffer, _encoding, done) => {
        this.#bytes += chunk.length;
        this.#draw();
        done(null, chunk);
      },
    });
  }

  fileDone(): void {
    this.#files++;
  }

  /** Removes the bar. */
  clear(): void {
    if (this.#drawn && this.#last > 0) this.#out.stderr.write("\r\u001b[K");
    this.#last = 0;
  }

  summary(): { files: number; bytes: number; seconds: number } {
    return { files: this.#files, bytes: this.#bytes, seconds: Math.round(performance.now() - this.#started) / 1000 };
  }

  summaryText(): string {
    const { files, bytes, seconds } = this.summary();
    const rate = seconds > 0 ? `, ${size(bytes / seconds)}/s` : "";
    return `${files} file${files === 1 ? "" : "s"}, ${size(bytes)} in ${seconds.toFixed(1)} s${rate}`;
  }

  #draw(): void {
    if (!this.#drawn) return;
    const now = performance.now();
    if (now - this.#last < REDRAW_MS) return;
    this.#last = now;
    const width = this.#out.stderr.columns ?? 80;
    this.#out.stderr.write(
      `\r${progressLine(this.#bytes, this.#total, now - this.#started, this.#label, width)}\u001b[K`,
    );
  }
}

export function progressLine(
  bytes: number,
  total: number | undefined,
  ms: number,
  label: string,
  width: number,
): string {
  const rate = ms > 0 ? bytes / (ms / 1000) : 0;
  const parts: string[] = [];
  if (total !== undefined && total > 0) {
    const share = Math.min(1, bytes / total);
    const full = Math.round(share * BAR);
    parts.push(`${"█".repeat(full)}${"░".repeat(BAR - full)} ${String(Math.floor(share * 100)).padStart(3)}%`);
    parts.push(`${size(bytes)} / ${size(total)}`, `${size(rate)}/s`);
    if (rate > 0) parts.push(`${Math.max(0, Math.ceil((total - bytes) / rate))} s left`);
  } else parts.push(size(bytes), `${size(rate)}/s`);
  const line = parts.join("  ");
  const room = width - line.length - 3;
  return room > 8 ? `${line}  ${fit(printable(label), room)}` : line.slice(0, Math.max(0, width - 1));
}

const fit = (text: string, room: number): string => (text.length <= room ? text : `…${text.slice(1 - room)}`);
