import { randomUUID } from "node:crypto";
import { mkdir, open } from "node:fs/promises";
import { dirname } from "node:path";
import { AenvError, type LayerId } from "@aenv/base";
import { publishFile } from "@aenv/host";
import { BLOCK_BYTES } from "./blocks.ts";
import type { LayerInfo } from "./control.ts";
import { LayerWriter } from "./layer-writer.ts";
import { fileSink, type Sink } from "./sink.ts";

/** Read at once; holes of a sparse file come from the page cache as zeros, faster than any way to ask for them. */
const STEP_BYTES = 4 * 1024 * 1024;
const ZEROS = Buffer.alloc(STEP_BYTES);

/** Turns a raw disk image into a sealed layer that stores no zero blocks. The layer appears complete or not at all. */
export async function importRaw(
  rawPath: string,
  target: { id: LayerId; path: string },
  signal?: AbortSignal,
): Promise<LayerInfo> {
  await mkdir(dirname(target.path), { recursive: true });
  let result = { bytes: 0, extents: 0 };
  await publishFile(target.path, async (file) => {
    result = await writeRaw(rawPath, fileSink(file), randomUUID(), signal);
  });
  return { id: target.id, path: target.path, ...result };
}

/** The same to any sink. Without a UUID the same image gives the same bytes every time. */
export async function writeRaw(
  rawPath: string,
  sink: Sink,
  uuid?: string,
  signal?: AbortSignal,
): Promise<{ bytes: number; extents: number }> {
  const raw = await open(rawPath, "r").catch((e: unknown) => {
    throw new AenvError("NOT_FOUND", `image ${rawPath} cannot be read`, { cause: e });
  });
  try {
    const size = (await raw.stat()).size;
    if (size === 0) throw new AenvError("INVALID_ARGUMENT", `image ${rawPath} is empty`);
    const virtualSize = Math.ceil(size / BLOCK_BYTES) * BLOCK_BYTES;
    const writer = new LayerWriter(sink, { virtualSize, ...(uuid === undefined ? {} : { uuid }) });
    const step = Buffer.allocUnsafeSlow(STEP_BYTES);
    for (let at = 0; at < size; at += STEP_BYTES) {
      signal?.throwIfAborted();
      const length = Math.min(STEP_BYTES, size - at);
      let filled = 0;
      while (filled < length) {
        const { bytesRead } = await raw.read(step, filled, length - filled, at + filled);
        if (bytesRead === 0) throw new AenvError("INVALID_ARGUMENT", `image ${rawPath} shrank while it was read`);
        filled += bytesRead;
      }
      const padded = Math.ceil(length / BLOCK_BYTES) * BLOCK_BYTES;
      step.fill(0, length, padded);
      for (const [from, to] of dataRuns(step, padded)) await writer.data(at + from, step.subarray(from, to));
    }
    return await writer.finish();
  } finally {
    await raw.close();
  }
}

/** Ranges of whole blocks that are not all zeros. */
export function* dataRuns(b: Buffer, length: number): Generator<[from: number, to: number]> {
  if (b.compare(ZEROS, 0, length, 0, length) === 0) return;
  let from = -1;
  for (let at = 0; at < length; at += BLOCK_BYTES) {
    const zero = b.compare(ZEROS, 0, BLOCK_BYTES, at, at + BLOCK_BYTES) === 0;
    if (!zero && from < 0) from = at;
    if (zero && from >= 0) {
      yield [from, at];
      from = -1;
    }
  }
  if (from >= 0) yield [from, length];
}
