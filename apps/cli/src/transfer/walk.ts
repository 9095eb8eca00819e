import { lstat, readdir, realpath, stat } from "node:fs/promises";
import { basename, join } from "node:path";
import { AenvError, errnoOf } from "@aenv/base";

export interface LocalFile {
  path: string;
  /** Below the root of the walk, with "/" between; empty for the root itself. */
  relative: string;
  size: number;
  /** Permission bits. */
  mode: number;
}

export interface LocalTree {
  files: LocalFile[];
  /** Every folder but the root, parents first. */
  folders: { relative: string; mode: number; empty: boolean }[];
  skipped: { path: string; why: string }[];
}

/** Everything below a folder. Symbolic links are followed; one that leads back to a folder above it is left out. */
export async function walkLocal(root: string): Promise<LocalTree> {
  const tree: LocalTree = { files: [], folders: [], skipped: [] };
  const visit = async (folder: string, relative: string, above: readonly string[]): Promise<number> => {
    const real = await realpath(folder);
    if (above.includes(real)) {
      tree.skipped.push({ path: folder, why: "the link leads back to a folder above it" });
      return 0;
    }
    const names = (await readdir(folder)).sort();
    for (const name of names) {
      const path = join(folder, name);
      const below = relative === "" ? name : `${relative}/${name}`;
      let info: Awaited<ReturnType<typeof stat>>;
      try {
        info = await stat(path);
      } catch (e) {
        tree.skipped.push({ path, why: await whyNot(path, e) });
        continue;
      }
      const mode = info.mode & 0o7777;
      if (info.isFile()) tree.files.push({ path, relative: below, size: info.size, mode });
      else if (info.isDirectory()) {
        const at = tree.folders.push({ relative: below, mode, empty: false }) - 1;
        const folderEntry = tree.folders[at];
        const count = await visit(path, below, [...above, real]);
        if (folderEntry !== undefined) folderEntry.empty = count === 0;
      } else tree.skipped.push({ path, why: "neither a file nor a folder" });
    }
    return names.length;
  };
  await visit(root, "", []);
  return tree;
}

async function whyNot(path: string, e: unknown): Promise<string> {
  if (errnoOf(e) === "ENOENT" && (await lstat(path)).isSymbolicLink()) return "the link leads nowhere";
  return e instanceof Error ? e.message : String(e);
}

/** The last name of a path that a person wrote; a folder written as "." or "x/.." has the name it really has. */
export async function lastName(path: string): Promise<string> {
  const name = basename(path);
  return name === "" || name === "." || name === ".." ? basename(await realpath(path)) : name;
}

/** A missing or unreadable local path, told with its name. */
export function localError(e: unknown, path: string): AenvError {
  if (e instanceof AenvError) return e;
  const code = errnoOf(e);
  if (code === "ENOENT" || code === "ENOTDIR")
    return new AenvError("NOT_FOUND", `${path} does not exist here`, { cause: e, hint: "Check the path." });
  if (code === "EACCES" || code === "EPERM")
    return new AenvError("PERMISSION_DENIED", `You may not use ${path}`, { cause: e, hint: "Check its permissions." });
  return AenvError.from(e, path);
}
