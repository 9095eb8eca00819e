import { AenvError } from "@aenv/base";
import { z } from "zod";
import { DIGEST } from "./reference.ts";

/** Bounds on what a registry may say. */
export const MAX_MANIFEST_BYTES = 4 * 1024 * 1024;
const MAX_LAYERS = 255;
const MAX_LAYER_BYTES = 256 * 2 ** 30;
const MAX_CONFIG_BYTES = 8 * 1024 * 1024;

export const INDEX_TYPES: readonly string[] = [
  "application/vnd.oci.image.index.v1+json",
  "application/vnd.docker.distribution.manifest.list.v2+json",
];
export const MANIFEST_TYPES: readonly string[] = [
  "application/vnd.oci.image.manifest.v1+json",
  "application/vnd.docker.distribution.manifest.v2+json",
];

const descriptor = z.object({
  mediaType: z.string().max(255),
  digest: z.string().regex(DIGEST),
  size: z.number().int().nonnegative().max(MAX_LAYER_BYTES),
  annotations: z.record(z.string(), z.string()).optional(),
});
export type Descriptor = z.infer<typeof descriptor>;

const indexSchema = z.object({
  manifests: z
    .array(
      descriptor.extend({
        platform: z.object({ os: z.string(), architecture: z.string(), variant: z.string().optional() }).optional(),
      }),
    )
    .max(1024),
});

const manifestSchema = z.object({ config: descriptor, layers: z.array(descriptor).max(MAX_LAYERS) });
export type ImageManifest = z.infer<typeof manifestSchema>;

const texts = z.array(z.string()).nullish();
const configSchema = z.object({
  os: z.string().optional(),
  architecture: z.string().optional(),
  config: z
    .object({
      User: z.string().nullish(),
      Env: texts,
      WorkingDir: z.string().nullish(),
      Entrypoint: texts,
      Cmd: texts,
      Labels: z.record(z.string(), z.string()).nullish(),
      ExposedPorts: z.record(z.string(), z.unknown()).nullish(),
    })
    .nullish(),
  rootfs: z.object({ type: z.literal("layers"), diff_ids: z.array(z.string().regex(DIGEST)).max(MAX_LAYERS) }),
});

/** What of an image's configuration matters to a sandbox. */
export interface ImageConfig {
  user: string;
  env: Record<string, string>;
  workdir: string;
  entrypoint: string[];
  cmd: string[];
  labels: Record<string, string>;
  exposedPorts: string[];
  /** Digest of each layer's tar, bottom first: what an image is, however its layers are compressed. */
  diffIds: string[];
}

export function parseManifest(json: unknown, name: string): ImageManifest {
  const manifest = parse(manifestSchema, json, name, "a manifest");
  if (manifest.config.size > MAX_CONFIG_BYTES) throw refused(name, `a configuration of ${manifest.config.size} bytes`);
  return manifest;
}

/** The entry of an index for this machine. */
export function choosePlatform(json: unknown, name: string, architecture: string): Descriptor {
  const { manifests } = parse(indexSchema, json, name, "an index");
  const fits = manifests.filter((m) => m.platform?.os === "linux" && m.platform.architecture === architecture);
  const found = fits.find((m) => m.platform?.variant === undefined) ?? fits[0];
  if (found) return found;
  const has = manifests.flatMap((m) => (m.platform ? [`${m.platform.os}/${m.platform.architecture}`] : []));
  throw new AenvError("NOT_FOUND", `${name} has no image for linux/${architecture}`, {
    hint: has.length === 0 ? "Choose another image." : `It has ${[...new Set(has)].slice(0, 20).join(", ")}.`,
  });
}

export function parseConfig(json: unknown, name: string): ImageConfig {
  const { config, rootfs } = parse(configSchema, json, name, "a configuration");
  return {
    user: config?.User ?? "",
    env: Object.fromEntries(
      (config?.Env ?? []).flatMap((e) => {
        const equals = e.indexOf("=");
        return equals > 0 ? [[e.slice(0, equals), e.slice(equals + 1)]] : [];
      }),
    ),
    workdir: config?.WorkingDir ?? "",
    entrypoint: config?.Entrypoint ?? [],
    cmd: config?.Cmd ?? [],
    labels: config?.Labels ?? {},
    exposedPorts: Object.keys(config?.ExposedPorts ?? {}),
    diffIds: rootfs.diff_ids,
  };
}

export type LayerCompression = "none" | "gzip" | "zstd";

/** How a layer's tar is stored. INVALID_ARGUMENT for what is no layer of files. */
export function layerCompression({ mediaType }: Descriptor, name: string): LayerCompression {
  if (
    /^application\/vnd\.(oci\.image\.layer(\.nondistributable)?\.v1|docker\.image\.rootfs\.(diff|foreign\.diff))\.tar/.test(
      mediaType,
    )
  ) {
    if (mediaType.endsWith(".tar")) return "none";
    if (/[.+]gzip$/.test(mediaType)) return "gzip";
    if (/[.+]zstd$/.test(mediaType)) return "zstd";
  }
  throw refused(name, `a layer of type ${mediaType.slice(0, 100)}`);
}

function parse<T>(schema: z.ZodType<T>, json: unknown, name: string, what: string): T {
  const parsed = schema.safeParse(json);
  if (parsed.success) return parsed.data;
  const issue = parsed.error.issues[0];
  throw refused(name, `${what} that is not valid (${issue?.path.join(".") ?? ""}: ${issue?.message ?? ""})`);
}

function refused(name: string, what: string): AenvError {
  return new AenvError("INVALID_ARGUMENT", `${name} has ${what}`, {
    hint: "The image cannot be used here; build it again or choose another one.",
  });
}
