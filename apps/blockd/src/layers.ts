import { closeSync } from "node:fs";
import {
  EMPTY_MAP,
  type ExtentMap,
  FileSource,
  type LayerRef,
  type LayerStub,
  mergeStack,
  openLayer,
  readStub,
  type RemoteLayers,
  type SharedFile,
  type SharedRemote,
} from "@aenv/block";
import type { Sealed, SharedStack } from "./protocol.ts";

interface OpenLayer {
  file: SharedFile | SharedRemote;
  map: ExtentMap;
  bytes: number;
  users: number;
  close(): void;
}

interface Merged {
  map: ExtentMap;
  users: number;
}

/** The sealed layers this process has open, one file each, and one merged index per stack, for all disks that use them. */
export class LayerTable {
  readonly #layers = new Map<string, OpenLayer>();
  readonly #merged = new Map<string, Merged>();
  /** Layers of stores whose index is being read. */
  readonly #opening = new Map<string, Promise<OpenLayer>>();
  readonly #remote: RemoteLayers;

  constructor(remote: RemoteLayers) {
    this.#remote = remote;
  }

  /** Opens what is not open yet; layers of stores are read through the cache. Each needs one `release` of the same layers. */
  async acquire(layers: readonly LayerRef[]): Promise<SharedStack> {
    const held: OpenLayer[] = [];
    try {
      for (const { path } of layers) held.push(await this.#hold(path));
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
    const { file, layerMap, bytes } = sealed;
    this.#layers.set(top.path, { file, map: layerMap, bytes, users: 1, close: () => closeSync(file.fd) });
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

  async #hold(path: string): Promise<OpenLayer> {
    let layer = this.#layers.get(path);
    if (!layer) {
      const stub = readStub(path);
      layer = stub ? await this.#openRemote(path, stub) : openLocal(path);
      this.#layers.set(path, layer);
    }
    layer.users++;
    return layer;
  }

  /** Once for all that want it at the same time. */
  async #openRemote(path: string, stub: LayerStub): Promise<OpenLayer> {
    const opening = this.#opening.get(path) ?? this.#fetchIndex(stub);
    this.#opening.set(path, opening);
    try {
      return await opening;
    } finally {
      this.#opening.delete(path);
    }
  }

  async #fetchIndex(stub: LayerStub): Promise<OpenLayer> {
    const { shared, extents, bytes } = await this.#remote.open(stub);
    const close = (): void => this.#remote.close(stub, shared.blob.blob);
    return { file: shared, map: extents, bytes, users: 0, close };
  }

  #drop(path: string): void {
    const layer = this.#layers.get(path);
    if (!layer || --layer.users > 0) return;
    layer.close();
    this.#layers.delete(path);
  }

  #dropMerged(key: string): void {
    const merged = this.#merged.get(key);
    if (merged && --merged.users === 0) this.#merged.delete(key);
  }
}

function openLocal(path: string): OpenLayer {
  const { fd, form, extents, bytes } = openLayer(path);
  const file = { path, fd, form, warm: FileSource.warmMap(bytes) };
  return { file, map: extents, bytes, users: 0, close: () => closeSync(fd) };
}

function keyOf(layers: readonly LayerRef[]): string {
  return layers.map((l) => l.path).join("\0");
}
