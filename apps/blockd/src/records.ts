import {
  closeSync,
  existsSync,
  fdatasyncSync,
  mkdirSync,
  openSync,
  readdirSync,
  readFileSync,
  renameSync,
  rmSync,
  writeSync,
} from "node:fs";
import { join } from "node:path";
import { AenvError, type Logger, messageOf } from "@aenv/base";
import { diskSpecSchema, layerRefSchema } from "@aenv/block";
import { z } from "zod";

const recordSchema = z.object({
  version: z.literal(1),
  spec: diskSpecSchema,
  /** Layers now, bottom first: those of the spec and what was sealed since. */
  layers: z.array(layerRefSchema),
  /** Number in the names of the upper's files; grows with every seal. */
  generation: z.number().int().nonnegative(),
  /** Written before a seal starts: tells after a crash which side of it we are on. */
  sealing: layerRefSchema.optional(),
  /** The upper may be missing: the record was written before it was made. */
  creating: z.boolean(),
});
export type DiskRecord = z.infer<typeof recordSchema>;

/** What blockd remembers of its disks: one JSON file each. */
export class Records {
  readonly #dir: string;

  constructor(dir: string) {
    this.#dir = dir;
    mkdirSync(dir, { recursive: true, mode: 0o700 });
  }

  put(record: DiskRecord): void {
    const path = this.#path(record.spec.disk);
    const temp = `${path}.tmp`;
    const fd = openSync(temp, "w", 0o600);
    try {
      writeSync(fd, JSON.stringify(record));
      if (record.spec.durability === "power") fdatasyncSync(fd);
    } finally {
      closeSync(fd);
    }
    renameSync(temp, path);
  }

  has(disk: string): boolean {
    return existsSync(this.#path(disk));
  }

  delete(disk: string): void {
    rmSync(this.#path(disk), { force: true });
  }

  /** Every record that can be read; the others are logged and kept. */
  load(logger: Logger): DiskRecord[] {
    const out: DiskRecord[] = [];
    for (const name of readdirSync(this.#dir)) {
      const path = join(this.#dir, name);
      if (name.endsWith(".tmp")) rmSync(path, { force: true });
      if (!name.endsWith(".json")) continue;
      try {
        out.push(recordSchema.parse(JSON.parse(readFileSync(path, "utf8"))));
      } catch (e) {
        const error = new AenvError("CORRUPT", `${path} is not a disk record: ${messageOf(e)}`, { cause: e });
        logger.error({ file: path, error: error.message, hint: error.hint }, "disk record refused");
      }
    }
    return out;
  }

  #path(disk: string): string {
    return join(this.#dir, `${disk}.json`);
  }
}
