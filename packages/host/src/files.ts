import { randomBytes } from "node:crypto";
import { constants } from "node:fs";
import { type FileHandle, open, rename, rm } from "node:fs/promises";
import { dirname } from "node:path";
import { AenvError, errnoOf } from "@aenv/base";

/** The content of a file, or the entries of a folder, survive a loss of power. */
export async function syncPath(path: string): Promise<void> {
  const file = await open(path, "r");
  try {
    await file.sync();
  } finally {
    await file.close();
  }
}

/** The file appears complete and durable under its name, or not at all. `fill` writes it; mode as for open(2). */
export async function publishFile(
  path: string,
  fill: string | Buffer | ((file: FileHandle) => Promise<void>),
  mode = 0o644,
): Promise<void> {
  const temp = `${path}.tmp-${randomBytes(6).toString("hex")}`;
  try {
    const file = await open(temp, "wx", mode);
    try {
      if (typeof fill === "function") await fill(file);
      else await file.writeFile(fill);
      await file.sync();
    } finally {
      await file.close();
    }
    await rename(temp, path);
  } catch (e) {
    await rm(temp, { force: true });
    throw e;
  }
  await syncPath(dirname(path));
}

/**
 * The end of a log; empty when there is none. For folders in which an untrusted user writes: follows no link, and waits
 * for nobody, whatever lies there.
 */
export async function readTail(path: string, maxBytes: number): Promise<string> {
  try {
    const file = await open(path, constants.O_RDONLY | constants.O_NOFOLLOW | constants.O_NONBLOCK);
    try {
      const info = await file.stat();
      if (!info.isFile()) throw new AenvError("CORRUPT", `${path} is not a file`);
      const from = Math.max(0, info.size - maxBytes);
      const { buffer, bytesRead } = await file.read(Buffer.alloc(info.size - from), 0, info.size - from, from);
      return buffer.toString("utf8", 0, bytesRead);
    } finally {
      await file.close();
    }
  } catch (e) {
    if (errnoOf(e) === "ENOENT") return "";
    throw AenvError.from(e, `read ${path}`);
  }
}
