import { closeSync, openSync, readFileSync, readSync } from "node:fs";
import { AenvError, errnoOf } from "@aenv/base";
import { publishFile } from "@aenv/host";
import { z } from "zod";
import { corrupt } from "../format.ts";

/** What a stub starts with; no layer does. */
const MARK = Buffer.from('{"aenvLayer":1,');
const MAX_STUB_BYTES = 64 * 1024 * 1024;
const sha256 = z.string().regex(/^[0-9a-f]{64}$/);

const stubSchema = z.object({
  aenvLayer: z.literal(1),
  /** Address as `openStore` takes it. */
  store: z.string().min(1),
  key: z.string().min(1),
  sha256,
  bytes: z.number().int().positive(),
  /** Of the layer's own file, which the object is a compressed form of. */
  contentBytes: z.number().int().positive(),
  /** Of each MiB of the object. */
  pieces: z.array(sha256),
});

/** A file in the place of a layer, which says in which store the layer is. */
export type LayerStub = Omit<z.infer<typeof stubSchema>, "aenvLayer">;

export async function writeStub(path: string, stub: LayerStub): Promise<void> {
  const { store, key, sha256: sum, bytes, contentBytes, pieces } = stub;
  await publishFile(path, JSON.stringify({ aenvLayer: 1, store, key, sha256: sum, bytes, contentBytes, pieces }));
}

/** Undefined for a file that is no stub. Throws NOT_FOUND and CORRUPT naming the file. */
export function readStub(path: string): LayerStub | undefined {
  const start = Buffer.alloc(MARK.length);
  let fd: number;
  try {
    fd = openSync(path, "r");
  } catch (e) {
    if (errnoOf(e) !== "ENOENT") throw AenvError.from(e, `opening layer ${path}`);
    throw new AenvError("NOT_FOUND", `layer ${path} is missing`, {
      cause: e,
      data: { file: path },
      hint: "Build or pull again what uses it.",
    });
  }
  try {
    if (readSync(fd, start) !== start.length || !start.equals(MARK)) return undefined;
    const text = readFileSync(fd, "utf8");
    if (text.length > MAX_STUB_BYTES) throw corrupt(path, "is too long for the stub of a layer");
    const parsed = stubSchema.safeParse(parse(MARK.toString() + text, path));
    if (!parsed.success) throw corrupt(path, "is not a valid stub of a layer", parsed.error);
    const { aenvLayer: _, ...stub } = parsed.data;
    return stub;
  } finally {
    closeSync(fd);
  }
}

function parse(text: string, path: string): unknown {
  try {
    return JSON.parse(text);
  } catch (e) {
    throw corrupt(path, "is a stub of a layer that was cut short", e);
  }
}
