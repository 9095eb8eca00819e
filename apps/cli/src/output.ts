import { styleText } from "node:util";

type Style = "bold" | "dim" | "red" | "green" | "yellow" | "cyan";

export interface Column<T> {
  title: string;
  cell: (row: T) => string;
  right?: boolean;
  style?: (row: T) => Style | undefined;
}

interface Stream extends NodeJS.WritableStream {
  isTTY?: boolean;
  columns?: number;
}

/** Results go to stdout, everything said about them to stderr; colours only where a person looks. */
export class Output {
  readonly json: boolean;
  readonly stdout: Stream;
  readonly stderr: Stream;
  readonly #colour: { out: boolean; err: boolean };
  #closed: () => void = () => process.exit(0);

  constructor(options: { json: boolean; colour: boolean; stdout?: Stream; stderr?: Stream }) {
    this.json = options.json;
    this.stdout = options.stdout ?? process.stdout;
    this.stderr = options.stderr ?? process.stderr;
    this.stdout.on("error", (e: NodeJS.ErrnoException) => {
      if (e.code === "EPIPE") this.#closed();
    });
    const wanted = options.colour && !process.env["NO_COLOR"] && process.env["TERM"] !== "dumb";
    this.#colour = { out: wanted && this.stdout.isTTY === true, err: wanted && this.stderr.isTTY === true };
  }

  /** What happens when the reader of standard output goes away; by default the process ends, for nothing is left to say. */
  onClosed(fn: () => void): void {
    this.#closed = fn;
  }

  style(style: Style, text: string): string {
    return this.#colour.out ? styleText(style, text, { validateStream: false }) : text;
  }

  styleError(style: Style, text: string): string {
    return this.#colour.err ? styleText(style, text, { validateStream: false }) : text;
  }

  line(text = ""): void {
    this.stdout.write(`${text}\n`);
  }

  /** For the person at the terminal; silent with --json. */
  note(text: string): void {
    if (!this.json) this.stderr.write(`${text}\n`);
  }

  value(value: unknown): void {
    this.line(JSON.stringify(value, undefined, 2));
  }

  /** One value per line, for output that has no end. */
  event(value: unknown): void {
    this.line(JSON.stringify(value));
  }

  table<T>(rows: readonly T[], columns: readonly Column<T>[]): void {
    const cells = rows.map((row) => columns.map((c) => printable(c.cell(row))));
    const widths = columns.map((c, i) => Math.max(c.title.length, ...cells.map((r) => width(r[i] ?? ""))));
    const pad = (text: string, i: number): string => {
      const space = " ".repeat(Math.max(0, (widths[i] ?? 0) - width(text)));
      return columns[i]?.right ? space + text : text + space;
    };
    const join = (parts: string[]): string => parts.join("  ").trimEnd();
    this.line(join(columns.map((c, i) => this.style("bold", pad(c.title, i)))));
    for (const [r, row] of rows.entries())
      this.line(
        join(
          columns.map((c, i) => {
            const text = pad(cells[r]?.[i] ?? "", i);
            const style = c.style?.(row);
            return style === undefined ? text : this.style(style, text);
          }),
        ),
      );
  }

  /** Name and value pairs under each other. */
  record(pairs: readonly (readonly [string, string])[]): void {
    const widest = Math.max(...pairs.map(([k]) => k.length));
    for (const [k, v] of pairs) this.line(`${this.style("bold", k.padEnd(widest))}  ${printable(v)}`);
  }
}

/** Text from a guest or a file name must not drive the terminal. */
export function printable(text: string): string {
  // oxlint-disable-next-line no-control-regex -- control characters are what is replaced
  return text.replace(/[\u0000-\u001f\u007f-\u009f]/g, (c) => `\\x${c.charCodeAt(0).toString(16).padStart(2, "0")}`);
}

/** Columns of a terminal; wide characters count two. */
function width(text: string): number {
  let n = 0;
  for (const c of text)
    n +=
      /[\u1100-\u115f\u2e80-\ua4cf\uac00-\ud7a3\uf900-\ufaff\ufe30-\ufe6f\uff00-\uff60\uffe0-\uffe6]|\p{Emoji_Presentation}/u.test(
        c,
      )
        ? 2
        : 1;
  return n;
}

export function size(bytes: number): string {
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let n = bytes < 1024 ? Math.round(bytes) : bytes;
  let unit = 0;
  while (n >= 1024 && unit < units.length - 1) {
    n /= 1024;
    unit++;
  }
  return `${unit === 0 ? n : n.toFixed(n < 10 ? 2 : n < 100 ? 1 : 0)} ${units[unit]}`;
}

export function duration(ms: number): string {
  const s = Math.max(0, Math.round(ms / 1000));
  if (s < 60) return `${s}s`;
  if (s < 3600) return `${Math.floor(s / 60)}m${String(s % 60).padStart(2, "0")}s`;
  if (s < 86_400) return `${Math.floor(s / 3600)}h${String(Math.floor((s % 3600) / 60)).padStart(2, "0")}m`;
  return `${Math.floor(s / 86_400)}d${String(Math.floor((s % 86_400) / 3600)).padStart(2, "0")}h`;
}
