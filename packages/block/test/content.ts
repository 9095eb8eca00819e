/** Whole disks of stacks of layer files, read the way a disk reads them. */
import { closeSync } from "node:fs";
import { mkdtempSync, rmSync } from "node:fs";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { mergeStack, ZEROED } from "../src/extents.ts";
import { openLayer } from "../src/layer.ts";
import { FileSource, openSource, type Source } from "../src/source.ts";

export function withDir(fn: (dir: string) => void | Promise<void>): () => Promise<void> {
  return async () => {
    const dir = mkdtempSync(join(tmpdir(), "aenv-layer-"));
    try {
      await fn(dir);
    } finally {
      rmSync(dir, { recursive: true, force: true });
    }
  };
}

/** The virtual disk of a stack of layer files, bottom first. */
export function content(...paths: readonly string[]): Buffer {
  const layers: ReturnType<typeof openLayer>[] = [];
  try {
    for (const path of paths) layers.push(openLayer(path));
    const sources = layers.map((l) => openSource({ ...l, warm: FileSource.warmMap(l.bytes) }));
    const out = Buffer.alloc(layers.at(-1)?.header.virtualSize ?? 0);
    const map = mergeStack(layers.map((l) => l.extents));
    for (let i = 0; i < map.count; i++) {
      const file = map.file[i] as number;
      if (file === ZEROED) continue;
      const start = (map.start[i] as number) * 512;
      const length = (map.end[i] as number) * 512 - start;
      (sources[file] as Source).read(out, start, length, (map.place[i] as number) * 512);
    }
    return out;
  } finally {
    for (const l of layers) closeSync(l.fd);
  }
}
