import { type Bytes, bytes, type LayerId, parseLayerId } from "@aenv/base";
import { z } from "zod";

/** blockd's control protocol: HTTP with JSON bodies over a Unix socket. */

/** Longest path that fits the kernel's address of a Unix socket, with its NUL. */
const MAX_SOCKET_PATH_BYTES = 107;

const absolutePath = z
  .string()
  .max(4096)
  .regex(/^\/[^\0]*$/, "must be an absolute path")
  .refine((p) => !p.split("/").includes(".."), "must not contain ..");
const layerId = z.string().transform((text, ctx): LayerId => {
  try {
    return parseLayerId(text);
  } catch (e) {
    ctx.addIssue({ code: "custom", message: (e as Error).message });
    return z.NEVER;
  }
});
const size = z
  .number()
  .int()
  .positive()
  .multipleOf(4096, "must be a multiple of 4096")
  .max(8 * 2 ** 40 - 4096)
  .transform((n): Bytes => bytes(n));

export const layerRefSchema = z.object({ id: layerId, path: absolutePath });

export const layersSchema = z.array(layerRefSchema).max(255);

export const diskSpecSchema = z.object({
  disk: z.string().regex(/^[a-z0-9][a-z0-9_-]{0,63}$/, "must be a short lower-case name"),
  layers: layersSchema,
  sizeBytes: size,
  upperDir: absolutePath,
  socketPath: absolutePath.refine((p) => Buffer.byteLength(p) <= MAX_SOCKET_PATH_BYTES, "is too long for a socket"),
  socketUid: z.number().int().min(0).max(0xfffffffe),
  socketGid: z.number().int().min(0).max(0xfffffffe),
  durability: z.enum(["process", "power"]).optional(),
});

/** `same`: the caller has made sure that both read the same, so that a disk may have been written to. */
export const restackSchema = z.object({ from: layersSchema, to: layersSchema, same: z.boolean() });
export const mergeSchema = z.object({ layers: layersSchema.min(1), target: layerRefSchema });
export const importSchema = z.object({ rawPath: absolutePath, target: layerRefSchema });
export const layerInfoSchema = z.object({
  id: layerId,
  path: z.string(),
  bytes: z.number().int().nonnegative(),
  extents: z.number().int().nonnegative(),
});
export const pingSchema = z.object({
  identity: z.object({ pid: z.number().int(), startTicks: z.number() }),
  epoch: z.string(),
  disks: z.number().int(),
});

/** A sealed LSMT file. */
export type LayerRef = z.infer<typeof layerRefSchema>;
/**
 * One disk. `layers` are bottom first. `upperDir` is made by blockd and holds the writable upper; one that is already
 * there is opened again. The Unix socket gets mode 0600 and the given owner; it must be on the file system of blockd's
 * control socket. The NBD export is called "disk".
 */
export type DiskSpec = z.infer<typeof diskSpecSchema>;
export type LayerInfo = z.infer<typeof layerInfoSchema>;
export type PingInfo = z.infer<typeof pingSchema>;

export const errorBodySchema = z.object({
  code: z.string(),
  message: z.string(),
  hint: z.string().optional(),
  data: z.record(z.string(), z.unknown()).optional(),
});
