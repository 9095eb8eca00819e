import { stat } from "node:fs/promises";
import { AenvError, errnoOf, messageOf } from "@aenv/base";
import type { SnapshotRecord } from "@aenv/state";
import { hasMemory } from "./memory-stack.ts";

/**
 * What is wrong with the files of a snapshot as far as their presence and size tell: CORRUPT, naming the file, or
 * undefined. Cheap enough for every snapshot of a node; not for every launch, where the VMM and blockd look themselves.
 */
export async function damageOf(snapshot: SnapshotRecord): Promise<AenvError | undefined> {
  const files: readonly (readonly [what: string, path: string, size: number | undefined])[] = [
    ...snapshot.memory.map((m) =>
      m.kind === "flat"
        ? (["the memory", m.path, snapshot.machine.memoryBytes] as const)
        : (["a memory delta", m.path, undefined] as const),
    ),
    ...(hasMemory(snapshot) ? [["the device state", snapshot.devicePath, undefined] as const] : []),
    ...snapshot.layers.map((l) => ["a disk layer", l.path, l.bytes] as const),
  ];
  for (const [what, path, wanted] of files) {
    const problem = await problemOf(path, wanted);
    if (problem !== undefined)
      return new AenvError("CORRUPT", `${path} (${what} of snapshot ${snapshot.id}) ${problem}`, {
        data: { file: path, snapshot: snapshot.id },
        hint: "Delete what is made of it and build it again; npm run up rebuilds the template base.",
      });
  }
  return undefined;
}

async function problemOf(path: string, wanted: number | undefined): Promise<string | undefined> {
  let size: number;
  try {
    const info = await stat(path);
    if (!info.isFile()) return "is not a file";
    size = info.size;
  } catch (e) {
    const code = errnoOf(e);
    if (code === "ENOENT" || code === "ENOTDIR") return "is missing";
    return `cannot be read (${messageOf(e)})`;
  }
  if (wanted === undefined) return size > 0 ? undefined : "is empty";
  return size === wanted ? undefined : `has ${size} bytes instead of ${wanted}`;
}
