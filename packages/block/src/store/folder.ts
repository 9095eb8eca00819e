import { randomBytes } from "node:crypto";
import { mkdir, open, readdir, rename, rm, stat } from "node:fs/promises";
import { dirname, join } from "node:path";
import { AenvError, errnoOf } from "@aenv/base";
import { syncPath } from "@aenv/host";
import { type BlobInfo, type BlobSource, type BlobStore, checkKey, missing, tooShort } from "./port.ts";

const STEP_BYTES = 4 * 1024 * 1024;
/** No key starts with a dot. */
const TEMP = ".uploads";

/** Objects as files below a folder, which may be on a file system that several nodes share. */
export class FolderStore implements BlobStore {
  readonly name: string;
  readonly #root: string;

  constructor(root: string) {
    this.#root = root;
    this.name = root;
  }

  async put(key: string, content: Buffer | BlobSource, signal?: AbortSignal): Promise<void> {
    const path = join(this.#root, checkKey(key));
    const temp = join(this.#root, TEMP, randomBytes(12).toString("hex"));
    await this.#guard(`writing ${path}`, async () => {
      await mkdir(dirname(temp), { recursive: true });
      try {
        const file = await open(temp, "wx", 0o644);
        try {
          if (Buffer.isBuffer(content)) await file.writeFile(content);
          else {
            for (let at = 0; at < content.bytes; at += STEP_BYTES) {
              signal?.throwIfAborted();
              await file.writeFile(await content.read(at, Math.min(STEP_BYTES, content.bytes - at)));
            }
          }
          await file.sync();
        } finally {
          await file.close();
        }
        signal?.throwIfAborted();
        await mkdir(dirname(path), { recursive: true });
        await rename(temp, path);
      } catch (e) {
        await rm(temp, { force: true });
        throw e;
      }
      await syncPath(dirname(path));
    });
  }

  async stat(key: string, _signal?: AbortSignal): Promise<BlobInfo | undefined> {
    const path = join(this.#root, checkKey(key));
    return await this.#guard(`reading ${path}`, async () => {
      const info = await stat(path).catch((e: unknown) => {
        if (errnoOf(e) === "ENOENT") return undefined;
        throw e;
      });
      return info?.isFile() === true ? { key, bytes: info.size, modifiedAt: info.mtimeMs } : undefined;
    });
  }

  async read(key: string, position: number, length: number, signal?: AbortSignal): Promise<Buffer> {
    const path = join(this.#root, checkKey(key));
    signal?.throwIfAborted();
    return await this.#guard(`reading ${path}`, async () => {
      const file = await open(path, "r").catch((e: unknown) => {
        throw errnoOf(e) === "ENOENT" ? missing(this.name, key, e) : e;
      });
      try {
        // Before memory is taken for it.
        if (position + length > (await file.stat()).size) throw tooShort(this.name, key);
        const into = Buffer.allocUnsafeSlow(length);
        for (let done = 0; done < length; ) {
          const { bytesRead } = await file.read(into, done, length - done, position + done);
          if (bytesRead === 0) throw tooShort(this.name, key);
          done += bytesRead;
        }
        return into;
      } finally {
        await file.close();
      }
    });
  }

  async *list(prefix: string, signal?: AbortSignal): AsyncGenerator<BlobInfo> {
    const folder = prefix.slice(0, prefix.lastIndexOf("/") + 1);
    const names = await this.#guard(`listing ${this.#root}`, () =>
      readdir(join(this.#root, folder), { recursive: true, withFileTypes: true }).catch((e: unknown) => {
        if (errnoOf(e) === "ENOENT") return [];
        throw e;
      }),
    );
    for (const entry of names) {
      signal?.throwIfAborted();
      if (!entry.isFile()) continue;
      const key = join(entry.parentPath, entry.name).slice(this.#root.length + 1);
      if (!key.startsWith(prefix) || key.startsWith(`${TEMP}/`)) continue;
      const info = await this.stat(key);
      if (info) yield info;
    }
  }

  async delete(key: string, _signal?: AbortSignal): Promise<void> {
    const path = join(this.#root, checkKey(key));
    await this.#guard(`deleting ${path}`, () => rm(path, { force: true }));
  }

  async sweep(before: number, _signal?: AbortSignal): Promise<number> {
    let swept = 0;
    const temp = join(this.#root, TEMP);
    for (const name of await readdir(temp).catch(() => [])) {
      const info = await stat(join(temp, name)).catch(() => undefined);
      if (!info || info.mtimeMs >= before) continue;
      await rm(join(temp, name), { force: true });
      swept++;
    }
    return swept;
  }

  [Symbol.dispose](): void {}

  async #guard<T>(what: string, fn: () => Promise<T>): Promise<T> {
    try {
      return await fn();
    } catch (e) {
      const code = errnoOf(e);
      if (code === "EACCES" || code === "EROFS" || code === "EPERM") {
        throw new AenvError("PERMISSION_DENIED", `${what}: ${(e as Error).message}`, {
          cause: e,
          hint: `Give the node's user the right to read and write ${this.#root}.`,
        });
      }
      if (code === "ESTALE" || code === "EIO" || code === "ETIMEDOUT") {
        throw new AenvError("UNAVAILABLE", `${what}: ${(e as Error).message}`, {
          cause: e,
          hint: `Check that ${this.#root} is mounted and healthy.`,
        });
      }
      if (e instanceof DOMException || e instanceof AenvError) throw e;
      throw AenvError.from(e, what);
    }
  }
}
