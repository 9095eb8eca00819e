import { createHash } from "node:crypto";
import { mkdir, open, rename, rm, stat } from "node:fs/promises";
import { join } from "node:path";
import { AenvError, KeyedMutex, randomName, Semaphore } from "@aenv/base";
import {
  choosePlatform,
  type Descriptor,
  type ImageConfig,
  INDEX_TYPES,
  layerCompression,
  type LayerCompression,
  parseConfig,
  parseManifest,
} from "./manifest.ts";
import { formatReference, type ImageReference } from "./reference.ts";
import type { RegistryClient } from "./registry.ts";

const PARALLEL = 3;

export interface PulledLayer {
  digest: string;
  /** Of the tar within. */
  diffId: string;
  bytes: number;
  compression: LayerCompression;
  path: string;
}

export interface PulledImage {
  reference: string;
  /** Of the image's manifest. */
  digest: string;
  config: ImageConfig;
  /** Bottom first. */
  layers: PulledLayer[];
}

export interface PullOptions {
  /** As registries name it: amd64, arm64. */
  architecture: string;
  signal: AbortSignal;
  onProgress?: (done: number, total: number) => void;
}

/** Images of registries as files in a folder: one per blob, named by its digest, each fetched once however many want it. */
export class ImageStore {
  readonly #dir: string;
  readonly #registry: RegistryClient;
  readonly #fetching = new KeyedMutex();
  readonly #slots = new Semaphore(PARALLEL);

  constructor(dir: string, registry: RegistryClient) {
    this.#dir = dir;
    this.#registry = registry;
  }

  /** Fetches what is missing. Blobs whose content is not what their digest says never get their name. */
  async pull(ref: ImageReference, o: PullOptions): Promise<PulledImage> {
    const name = formatReference(ref);
    let found = await this.#registry.manifest(ref, o.signal);
    // An index, which says so or has what an index has.
    if (INDEX_TYPES.includes(found.mediaType) || "manifests" in (found.json as object)) {
      const { digest } = choosePlatform(found.json, name, o.architecture);
      found = await this.#registry.manifest({ ...ref, tag: undefined, digest }, o.signal);
    }
    const manifest = parseManifest(found.json, name);
    // Blobs come from the registry that gave the manifest, a mirror or not.
    const from = { host: found.host, repository: ref.repository };
    const config = parseConfig(await this.#registry.json(from, manifest.config, o.signal), name);
    if (config.diffIds.length !== manifest.layers.length) {
      throw new AenvError(
        "INVALID_ARGUMENT",
        `${name} has ${manifest.layers.length} layers and ${config.diffIds.length} in its configuration`,
      );
    }
    const compressions = manifest.layers.map((l) => layerCompression(l, name));
    const total = manifest.layers.reduce((n, l) => n + l.size, 0);
    let done = 0;
    const onBytes = (n: number): void => o.onProgress?.((done += n), total);
    const paths = await Promise.all(
      manifest.layers.map((l) => this.#slots.run(() => this.#blob(from, l, o.signal, onBytes), o.signal)),
    );
    return {
      reference: name,
      digest: found.digest,
      config,
      layers: manifest.layers.map((l, i) => ({
        digest: l.digest,
        diffId: config.diffIds[i] as string,
        bytes: l.size,
        compression: compressions[i] as LayerCompression,
        path: paths[i] as string,
      })),
    };
  }

  #blob(
    from: Pick<ImageReference, "host" | "repository">,
    d: Descriptor,
    signal: AbortSignal,
    onBytes: (n: number) => void,
  ): Promise<string> {
    return this.#fetching.run(
      d.digest,
      async () => {
        const dir = join(this.#dir, "blobs", "sha256");
        const path = join(dir, d.digest.slice("sha256:".length));
        const there = await stat(path).catch(() => undefined);
        if (there?.size === d.size) {
          onBytes(d.size);
          return path;
        }
        await mkdir(dir, { recursive: true, mode: 0o700 });
        const temp = `${path}.${randomName(8)}`;
        try {
          const file = await open(temp, "wx", 0o600);
          try {
            await this.#registry.blob(from, d, file, signal, onBytes);
            await file.sync();
          } finally {
            await file.close();
          }
          await rename(temp, path);
        } finally {
          await rm(temp, { force: true });
        }
        return path;
      },
      signal,
    );
  }
}

/**
 * What stands for the lowest `n` layers of an image together: equal for images that share them, in whatever way they are
 * compressed.
 */
export function chainIds(diffIds: readonly string[]): string[] {
  const out: string[] = [];
  for (const id of diffIds) {
    const below = out.at(-1);
    out.push(below === undefined ? id : `sha256:${createHash("sha256").update(`${below} ${id}`).digest("hex")}`);
  }
  return out;
}
