import { closeSync } from "node:fs";
import {
  EMPTY_MAP,
  type ExtentMap,
  FileSource,
  type LayerRef,
  mergeStack,
  openLayer,
  type SharedFile,
} from "@aenv/block";
import type { Sealed, SharedStack } from "./protocol.ts";

interface OpenLayer {
  file: SharedFile;
  map: ExtentMap;
  bytes: number;
  users: number;
}

interface Merged {
  map: ExtentMap;
  users: number;
}

/** The sealed layers this process has open, one file each, and one merged index per stack, for all disks that use them. */
export class LayerTable {
  readonly #layers = new Map<string, OpenLayer>();
  readonly #merged = new Map<string, Merged>();

  /** Opens what is not open yet. Each `acquire` needs one `release` of the same layers. */
  acquire(layers: readonly LayerRef[]): SharedStack {
    const held: OpenLayer[] = [];
    try {
      for (const { path } of layers) held.push(this.#hold(path));
    } catch (e) {
      for (const { path } of layers.slice(0, held.length)) this.#drop(path);
      throw e;
    }
    const key = keyOf(layers);
    let merged = this.#merged.get(key);
    if (!merged) {
      merged = { map: held.length === 0 ? EMPTY_MAP : mergeStack(held.map((l) => l.map)), users: 0 };
      this.#merged.set(key, merged);
    }
    merged.users++;
    return { map: merged.map, files: held.map((l) => l.file) };
  }

  release(layers: readonly LayerRef[]): void {
    this.#dropMerged(keyOf(layers));
    for (const { path } of layers) this.#drop(path);
  }

  /** A worker sealed a layer on top of `below`, which its disk holds: from now on the disk holds the longer stack. */
  pushed(below: readonly LayerRef[], top: LayerRef, sealed: Sealed): void {
    this.#layers.set(top.path, { file: sealed.file, map: sealed.layerMap, bytes: sealed.bytes, users: 1 });
    this.#dropMerged(keyOf(below));
    this.#merged.set(keyOf([...below, top]), { map: sealed.map, users: 1 });
  }

  info(path: string): { bytes: number; extents: number } | undefined {
    const layer = this.#layers.get(path);
    return layer && { bytes: layer.bytes, extents: layer.map.count };
  }

  isOpen(path: string): boolean {
    return this.#layers.has(path);
  }

  #hold(path: string): OpenLayer {
    let layer = this.#layers.get(path);
    if (!layer) {
      const opened = openLayer(path);
      const { fd, form } = opened;
      const file = { path, fd, form, warm: FileSource.warmMap(opened.bytes) };
      layer = { file, map: opened.extents, bytes: opened.bytes, users: 0 };
      this.#layers.set(path, layer);
    }
    layer.users++;
    return layer;
  }

  #drop(path: string): void {
    const layer = this.#layers.get(path);
    if (!layer || --layer.users > 0) return;
    closeSync(layer.file.fd);
    this.#layers.delete(path);
  }

  #dropMerged(key: string): void {
    const merged = this.#merged.get(key);
    if (merged && --merged.users === 0) this.#merged.delete(key);
  }
}

function keyOf(layers: readonly LayerRef[]): string {
  return layers.map((l) => l.path).join("\0");
}
