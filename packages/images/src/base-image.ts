import { createHash } from "node:crypto";
import { copyFile, mkdir, readFile, rename, stat } from "node:fs/promises";
import { join } from "node:path";
import { AenvError, type Bytes, errnoOf, mib } from "@aenv/base";
import { publishFile } from "@aenv/host";
import { z } from "zod";
import { buildInitramfs, type GuestConfig } from "./initramfs.ts";
import { fetchKernel, type Kernel } from "./kernel.ts";
import { buildRootfs, packExt4, rootfsRecipe } from "./rootfs.ts";

/** Size of the base disk as the guest sees it; the image is sparse. */
const DISK_SIZE: Bytes = mib(8 * 1024);

/** Commands run before the template is captured, so that their pages are in the guest's cache in every sandbox. */
const PRIME: string[][] = [
  ["/bin/bash", "-l", "-c", "ls -la / >/dev/null; id; uname -a; cat /etc/os-release"],
  ["/usr/bin/python3", "-c", "import json, os, subprocess, sys, urllib.request; print(sys.version)"],
  ["/usr/bin/git", "--version"],
  ["/usr/bin/curl", "--version"],
];

/** The template that every node has. */
export const BASE_NAME = "base";

/** Says from which fingerprint the template `base` was built; without the file the next start builds it again. */
export const baseMarker = (home: string): string => join(home, "images/base-built.json");

/** `images/manifest.json` of a data folder: from what the server builds the template `base`. */
export const BaseManifest = z.object({
  kernel: z.string(),
  initrd: z.string(),
  disk: z.string(),
  sizeBytes: z.number().int().positive(),
  vcpus: z.number().int().positive(),
  memoryMB: z.number().int().positive(),
  /** Equal inputs, equal fingerprint: the template is built anew when it changes. */
  fingerprint: z.string(),
  prime: z.array(z.array(z.string()).nonempty()),
});
export type BaseManifest = z.infer<typeof BaseManifest>;

const sha256 = (data: string | Buffer): string => createHash("sha256").update(data).digest("hex");

async function exists(path: string): Promise<boolean> {
  try {
    await stat(path);
    return true;
  } catch (e) {
    if (errnoOf(e) === "ENOENT") return false;
    throw e;
  }
}

/** Fetches and unpacks the guest kernel below `cache`, once. */
export async function ensureKernel(cache: string, signal: AbortSignal): Promise<Kernel> {
  return fetchKernel(join(cache, "images"), signal);
}

/** Builds the base root filesystem and its ext4 image below `cache`, once per recipe. Returns the image's path. */
export async function ensureBaseDisk(cache: string, say: (note: string) => void, signal: AbortSignal): Promise<string> {
  const dir = join(cache, "images");
  const image = join(dir, `base-${sha256(`${await rootfsRecipe()} ${DISK_SIZE}`).slice(0, 12)}.ext4`);
  if (await exists(image)) return image;
  await mkdir(dir, { recursive: true });
  const rootfs = join(dir, "rootfs");
  say("mmdebstrap");
  await buildRootfs(rootfs, signal);
  say("mke2fs");
  await packExt4(rootfs, image, DISK_SIZE, signal);
  return image;
}

/** Copies `from` to `to` unless a file of that name is there: names carry the content's hash. */
async function install(from: string, to: string): Promise<void> {
  if (await exists(to)) return;
  await copyFile(from, `${to}.tmp`);
  await rename(`${to}.tmp`, to);
}

/** Puts kernel, initramfs and the manifest into `home`/images. Running templates keep the files they were made with. */
export async function writeBaseManifest(o: {
  home: string;
  kernel: Kernel;
  guestBinary: string;
  disk: string;
  guest: GuestConfig;
}): Promise<BaseManifest> {
  const dir = join(o.home, "images");
  await mkdir(dir, { recursive: true, mode: 0o755 });
  const kernel = join(dir, `vmlinuz-${o.kernel.release}`);
  await install(o.kernel.bzImage, kernel);
  const archive = await buildInitramfs(o.kernel, o.guestBinary, o.guest);
  const digest = sha256(archive).slice(0, 16);
  const initrd = join(dir, `initramfs-${digest}`);
  if (!(await exists(initrd))) await publishFile(initrd, archive);
  const facts = { kernel, initrd, disk: o.disk, sizeBytes: DISK_SIZE, vcpus: 1, memoryMB: 512, prime: PRIME };
  const manifest: BaseManifest = { ...facts, fingerprint: sha256(JSON.stringify(facts)).slice(0, 16) };
  await publishFile(join(dir, "manifest.json"), `${JSON.stringify(manifest, null, 2)}\n`);
  return manifest;
}

/** Undefined where set-up has not made one. */
export async function readBaseManifest(home: string): Promise<BaseManifest | undefined> {
  const path = join(home, "images/manifest.json");
  let text: string;
  try {
    text = await readFile(path, "utf8");
  } catch (e) {
    if (errnoOf(e) === "ENOENT") return undefined;
    throw e;
  }
  try {
    return BaseManifest.parse(JSON.parse(text));
  } catch (e) {
    throw new AenvError("CORRUPT", `${path} is not a valid manifest`, {
      cause: e,
      hint: "Delete the file and run npm run up.",
    });
  }
}
