import { closeSync } from "node:fs";
import { mkdir } from "node:fs/promises";
import { dirname } from "node:path";
import { AenvError } from "@aenv/base";
import { publishFile } from "@aenv/host";
import type { LayerInfo, LayerRef } from "./control.ts";
import { mergeStack, ZEROED } from "./extents.ts";
import { SECTOR } from "./format.ts";
import { LayerWriter } from "./layer-writer.ts";
import { openLayer, type SealedLayer } from "./layer.ts";
import { fileSink, type Sink } from "./sink.ts";
import { FileSource, openSource, type Source } from "./source.ts";
import { ZFileWriter } from "./zfile.ts";
import type { Compression } from "./zfile-codec.ts";

const STEP_BYTES = 1024 * 1024;

export interface MergeOptions {
  /** Nothing will lie beneath the result, so that what reads as zeros needs no entry. */
  base?: boolean;
  uuid?: string;
  /** The result becomes a ZFile; plain without. */
  compression?: Compression;
  signal?: AbortSignal;
}

/**
 * Writes one sealed layer that reads as these layers (paths, bottom first) do in their order. Wrapped and compressed
 * ones are taken as they are. The result appears complete and durable under `target.path`, or not at all; the layers
 * are left alone. Throws NOT_FOUND or CORRUPT naming a layer, NO_SPACE, or the signal's reason.
 */
export async function mergeLayers(
  paths: readonly string[],
  target: LayerRef,
  options: MergeOptions = {},
): Promise<LayerInfo> {
  if (paths.length === 0) throw new AenvError("INVALID_ARGUMENT", "no layers to merge");
  await mkdir(dirname(target.path), { recursive: true });
  const layers: SealedLayer[] = [];
  try {
    for (const path of paths) layers.push(openLayer(path));
    let info = { bytes: 0, extents: 0 };
    await publishFile(target.path, async (file) => {
      const sink = fileSink(file);
      if (options.compression === undefined) info = await writeMerged(layers, sink, options);
      else {
        const zfile = new ZFileWriter(sink, { compression: options.compression });
        const { extents } = await writeMerged(layers, zfile, options);
        info = { bytes: await zfile.finish(), extents };
      }
    });
    return { id: target.id, path: target.path, ...info };
  } finally {
    for (const { fd } of layers) closeSync(fd);
  }
}

/** The same to any sink, plain. Returns what the layer has, before what the sink makes of it. */
async function writeMerged(
  layers: readonly SealedLayer[],
  sink: Sink,
  { base = false, uuid, signal }: MergeOptions,
): Promise<{ bytes: number; extents: number }> {
  const map = mergeStack(layers.map((l) => l.extents));
  const sources = layers.map((l) => openSource({ ...l, warm: FileSource.warmMap(l.bytes) }));
  const writer = new LayerWriter(sink, {
    virtualSize: layers.findLast((l) => l.header.virtualSize > 0)?.header.virtualSize ?? 0,
    ...(uuid === undefined ? {} : { uuid }),
    ...(layers[0]?.header.parentUuid === undefined ? {} : { parentUuid: layers[0].header.parentUuid }),
  });
  const step = Buffer.allocUnsafeSlow(STEP_BYTES);
  for (let i = 0; i < map.count; i++) {
    const start = (map.start[i] as number) * SECTOR;
    const end = (map.end[i] as number) * SECTOR;
    const file = map.file[i] as number;
    if (file === ZEROED) {
      if (!base) await writer.zero(start, end - start);
      continue;
    }
    const source = sources[file] as Source;
    for (let at = start; at < end; at += STEP_BYTES) {
      signal?.throwIfAborted();
      const length = Math.min(STEP_BYTES, end - at);
      const place = (map.place[i] as number) * SECTOR + at - start;
      await source.fetch(step, 0, length, place);
      await writer.data(at, step.subarray(0, length));
    }
  }
  return await writer.finish();
}
