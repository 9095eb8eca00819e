import { randomBytes } from "node:crypto";
import { type FileHandle, open, rename, rm } from "node:fs/promises";
import { dirname } from "node:path";

/** Makes a directory entry durable. */
export async function syncDir(path: string): Promise<void> {
  const dir = await open(path, "r");
  try {
    await dir.sync();
  } finally {
    await dir.close();
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
  await syncDir(dirname(path));
}
