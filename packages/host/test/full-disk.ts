/** For tests of other packages. */
import {
  chmodSync,
  closeSync,
  mkdtempSync,
  openSync,
  readdirSync,
  rmSync,
  statfsSync,
  truncateSync,
  writeSync,
} from "node:fs";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { run } from "../src/run.ts";

const MIB = 1024 * 1024;

/** A small ext4 of its own, which can be filled to the last block. Needs root. */
export class FullableDisk implements AsyncDisposable {
  readonly path: string;
  readonly #image: string;
  readonly #dir: string;
  #fillers = 0;

  private constructor(dir: string) {
    this.#dir = dir;
    this.#image = join(dir, "image");
    this.path = join(dir, "disk");
  }

  static async make(mib: number): Promise<FullableDisk> {
    const disk = new FullableDisk(mkdtempSync(join(tmpdir(), "aenv-disk-")));
    // Whoever VMMs run as passes through.
    chmodSync(disk.#dir, 0o711);
    await run("mkdir", [disk.path]);
    closeSync(openSync(disk.#image, "w"));
    truncateSync(disk.#image, mib * MIB);
    // Without blocks that only root may take: full is full.
    await run("mkfs.ext4", ["-q", "-m", "0", "-O", "^has_journal", disk.#image]);
    await run("mount", ["-o", "loop", disk.#image, disk.path]);
    return disk;
  }

  /** Bytes that are left. */
  get free(): number {
    const { bavail, bsize } = statfsSync(this.path);
    return bavail * bsize;
  }

  /** Until nothing more goes in, or so many bytes are left. */
  fill(leave = 0): void {
    const fd = openSync(join(this.path, `filler-${++this.#fillers}`), "w");
    try {
      for (let size = MIB; size >= 512 && !this.#hasAtMost(leave); )
        try {
          if (writeSync(fd, Buffer.alloc(size, 1)) < size) size = Math.floor(size / 2);
        } catch (e) {
          if ((e as NodeJS.ErrnoException).code !== "ENOSPC") throw e;
          size = Math.floor(size / 2);
        }
    } finally {
      closeSync(fd);
    }
  }

  /** 0 bytes are left only when no write says otherwise. */
  #hasAtMost(bytes: number): boolean {
    return bytes > 0 && this.free <= bytes;
  }

  /** Gives back what fill() took. */
  empty(): void {
    for (const name of readdirSync(this.path)) if (name.startsWith("filler-")) rmSync(join(this.path, name));
  }

  async [Symbol.asyncDispose](): Promise<void> {
    await run("umount", [this.path]);
    rmSync(this.#dir, { recursive: true });
  }
}
