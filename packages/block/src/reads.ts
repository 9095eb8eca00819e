import { readSync } from "node:fs";
import { corrupt } from "./format.ts";

/** A piece of a file that a parser wants next. Bytes. */
export interface Wanted {
  position: number;
  length: number;
}

/**
 * A parser that does no I/O of its own: it yields what it wants to see and is given exactly those bytes, so that the same
 * code reads local files, remote ones, and what is wrapped in other formats.
 */
export type Reads<T> = Generator<Wanted, T, Buffer>;

export function* wanted(position: number, length: number): Reads<Buffer> {
  return yield { position, length };
}

/** Runs a parser over an open file, blocking. CORRUPT names the file when it ends too early. */
export function readsSync<T>(parser: Reads<T>, fd: number, name: string): T {
  let step = parser.next();
  while (!step.done) step = parser.next(readExact(fd, step.value.position, step.value.length, name));
  return step.value;
}

export async function readsAsync<T>(parser: Reads<T>, read: (w: Wanted) => Promise<Buffer>): Promise<T> {
  let step = parser.next();
  while (!step.done) step = parser.next(await read(step.value));
  return step.value;
}

/** The parser sees only the bytes from `offset` on. */
export function* readsFrom<T>(parser: Reads<T>, offset: number): Reads<T> {
  let step = parser.next();
  while (!step.done) step = parser.next(yield* wanted(step.value.position + offset, step.value.length));
  return step.value;
}

export function readExact(fd: number, at: number, length: number, name: string): Buffer {
  const b = Buffer.allocUnsafe(length);
  let done = 0;
  while (done < length) {
    const n = readSync(fd, b, done, length - done, at + done);
    if (n === 0) throw corrupt(name, `ends at byte ${at + done}, in the middle of its data`);
    done += n;
  }
  return b;
}
