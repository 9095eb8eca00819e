import { closeSync, fstatSync, openSync } from "node:fs";
import { corrupt } from "./format.ts";
import { readsSync } from "./reads.ts";
import { FileSource, type Source } from "./source.ts";
import { readZFile } from "./zfile.ts";
import { ZFileSource } from "./zfile-source.ts";

/** A compressed file, whatever it holds. Throws CORRUPT naming it. */
export function openZFile(path: string): Disposable & { source: Source; contentBytes: number } {
  const fd = openSync(path, "r");
  try {
    const { size } = fstatSync(fd);
    const index = readsSync(readZFile(size, path), fd, path);
    if (!index) throw corrupt(path, "is not a compressed file");
    const source = new ZFileSource(new FileSource(path, fd, FileSource.warmMap(size)), index);
    return { source, contentBytes: index.bytes, [Symbol.dispose]: () => closeSync(fd) };
  } catch (e) {
    closeSync(fd);
    throw e;
  }
}
