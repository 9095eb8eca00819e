import { constants } from "node:fs";
import { open } from "node:fs/promises";
import { AenvError, errnoOf } from "@aenv/base";
import { publishFile } from "@aenv/host";
import { CONSOLE_LOG_BYTES } from "@aenv/vmm";

/** Above this a console log is moved on; below the kernel's bound, so that a well-behaved guest loses nothing. */
const ROTATE_BYTES = CONSOLE_LOG_BYTES / 2;

/**
 * Keeps the newest part of a console: a log above half its bound becomes `<path>.1`, and the VMM, which appends, goes on
 * at the beginning. What the guest prints between the copy and the cut is lost. True when it was moved.
 */
export async function rotateConsole(path: string): Promise<boolean> {
  let file;
  try {
    file = await open(path, constants.O_RDWR | constants.O_NOFOLLOW | constants.O_NONBLOCK);
  } catch (e) {
    if (errnoOf(e) === "ENOENT") return false;
    throw AenvError.from(e, `open ${path}`);
  }
  try {
    const info = await file.stat();
    if (!info.isFile()) throw new AenvError("CORRUPT", `${path} is not a file`);
    const { size } = info;
    if (size < ROTATE_BYTES) return false;
    const { buffer, bytesRead } = await file.read(Buffer.alloc(size), 0, size, 0);
    await publishFile(`${path}.1`, buffer.subarray(0, bytesRead), 0o600);
    await file.truncate(0);
    return true;
  } finally {
    await file.close();
  }
}
