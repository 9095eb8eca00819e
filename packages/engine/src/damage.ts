import { readFile, stat } from "node:fs/promises";
import { crc32 } from "node:zlib";
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
    if (problem !== undefined) return damaged(snapshot, what, path, problem);
  }
  return undefined;
}

/** CORRUPT where the device state is not the one that was captured: it must not reach a VMM. */
export async function checkDevice(snapshot: SnapshotRecord): Promise<void> {
  const { deviceCrc, devicePath } = snapshot;
  if (deviceCrc === undefined) return;
  const what = "the device state";
  const crc = await deviceCrcOf(devicePath).catch((e: unknown) => {
    const problem = errnoOf(e) === "ENOENT" ? "is missing" : `cannot be read (${messageOf(e)})`;
    throw damaged(snapshot, what, devicePath, problem);
  });
  if (crc !== deviceCrc) throw damaged(snapshot, what, devicePath, "is damaged: its sum is not that of its capture");
}

export async function deviceCrcOf(path: string): Promise<number> {
  return crc32(await readFile(path));
}

function damaged(snapshot: SnapshotRecord, what: string, path: string, problem: string): AenvError {
  return new AenvError("CORRUPT", `${path} (${what} of snapshot ${snapshot.id}) ${problem}`, {
    data: { file: path, snapshot: snapshot.id },
    hint:
      snapshot.cause === "build"
        ? "Delete what is made of it and build it again; npm run up rebuilds the template base."
        : "This state is lost: kill the sandbox or rewind it to a checkpoint that is whole; delete the snapshot.",
  });
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
