import { existsSync, readdirSync, rmdirSync, rmSync } from "node:fs";
import { join } from "node:path";
import type { UpperFiles } from "@aenv/block";
import type { DiskRecord } from "./records.ts";

const UPPER_NAME = /^upper-(\d{1,9})\.(data|index)(\.new)?$/;

export function upperFiles(upperDir: string, generation: number): UpperFiles {
  const base = join(upperDir, `upper-${generation}`);
  return { data: `${base}.data`, index: `${base}.index` };
}

/** Generation of the upper that is in the folder; 0 when there is none yet. */
export function newestGeneration(upperDir: string): number {
  if (!existsSync(upperDir)) return 0;
  const found = readdirSync(upperDir).map((name) => UPPER_NAME.exec(name));
  return Math.max(0, ...found.map((m) => (m?.[2] === "data" && !m[3] ? Number(m[1]) : 0)));
}

/** Removes our files, and the folder if nothing else is in it. */
export function removeUppers(upperDir: string): void {
  if (!existsSync(upperDir)) return;
  const names = readdirSync(upperDir);
  for (const name of names) if (UPPER_NAME.test(name)) rmSync(join(upperDir, name), { force: true });
  if (names.every((name) => UPPER_NAME.test(name))) rmdirSync(upperDir);
}

/**
 * Decides a seal that a crash cut off. The data file's move to its target is the one step that counts: before it the
 * disk is as it was, after it the layer is part of the stack and the next upper exists.
 */
export function settleSeal(record: DiskRecord): DiskRecord {
  const { sealing, ...rest } = record;
  if (!sealing) return record;
  const old = upperFiles(record.spec.upperDir, record.generation);
  const next = upperFiles(record.spec.upperDir, record.generation + 1);
  if (existsSync(old.data)) {
    // A copy across file systems may be complete while the old name is still there: the disk keeps the old one.
    for (const leftover of [`${sealing.path}.tmp`, sealing.path, next.data, next.index]) {
      rmSync(leftover, { force: true });
    }
    return rest;
  }
  rmSync(old.index, { force: true });
  return { ...rest, layers: [...record.layers, sealing], generation: record.generation + 1 };
}
