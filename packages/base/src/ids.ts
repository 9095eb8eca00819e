import { randomBytes } from "node:crypto";
import { AenvError } from "./errors.ts";

declare const brand: unique symbol;
type Branded<T, B extends string> = T & { readonly [brand]: B };

/** `i` + 3 characters naming the node that created it + 16 random `[a-z0-9]`; never `-` or `.` (the edge parses hosts). */
export type SandboxId = Branded<string, "SandboxId">;
/** One VM incarnation of a sandbox; changes with every launch. `r` + 12 random `[a-z0-9]`. */
export type RunId = Branded<string, "RunId">;
/** An immutable captured state. `s` + 16 random `[a-z0-9]`. */
export type SnapshotId = Branded<string, "SnapshotId">;
/** `t` + 16 random `[a-z0-9]`. */
export type TemplateId = Branded<string, "TemplateId">;
/** A sealed disk layer. `l` + 16 random `[a-z0-9]`. */
export type LayerId = Branded<string, "LayerId">;
/** A file of guest memory: a flat one, or a delta. `m` + 16 random `[a-z0-9]`. */
export type MemoryId = Branded<string, "MemoryId">;
/** A state in the history of one sandbox to which it can return. `c` + 16 random `[a-z0-9]`. */
export type CheckpointId = Branded<string, "CheckpointId">;

const ALPHABET = "abcdefghijklmnopqrstuvwxyz0123456789";

/** `length` uniformly random characters of `[a-z0-9]`. */
export function randomName(length: number): string {
  let out = "";
  while (out.length < length) {
    for (const b of randomBytes(length * 2)) {
      // 252 is the largest multiple of 36 in a byte: above it the low letters would be more likely.
      if (b < 252 && out.length < length) out += ALPHABET[b % 36];
    }
  }
  return out;
}

export const newSandboxId = (node: string): SandboxId => `i${node}${randomName(16)}` as SandboxId;
export const newRunId = (): RunId => `r${randomName(12)}` as RunId;
export const newSnapshotId = (): SnapshotId => `s${randomName(16)}` as SnapshotId;
export const newTemplateId = (): TemplateId => `t${randomName(16)}` as TemplateId;
export const newLayerId = (): LayerId => `l${randomName(16)}` as LayerId;
export const newMemoryId = (): MemoryId => `m${randomName(16)}` as MemoryId;
export const newCheckpointId = (): CheckpointId => `c${randomName(16)}` as CheckpointId;

function parser<T extends string>(kind: string, shape: RegExp): (text: string) => T {
  return (text) => {
    if (!shape.test(text))
      throw new AenvError("INVALID_ARGUMENT", `${JSON.stringify(text.slice(0, 64))} is not a ${kind}`);
    return text as T;
  };
}

/** Throws INVALID_ARGUMENT unless the text has the shape of a sandbox id. A `-<clientID>` suffix of old clients is dropped. */
export function parseSandboxId(text: string): SandboxId {
  const cut = text.indexOf("-");
  return parseBareSandboxId(cut < 0 ? text : text.slice(0, cut));
}
const parseBareSandboxId = parser<SandboxId>("sandbox id", /^[a-z0-9]{8,32}$/);
export const parseRunId = parser<RunId>("run id", /^r[a-z0-9]{12}$/);
export const parseSnapshotId = parser<SnapshotId>("snapshot id", /^s[a-z0-9]{16}$/);
export const parseTemplateId = parser<TemplateId>("template id", /^t[a-z0-9]{16}$/);
export const parseLayerId = parser<LayerId>("layer id", /^l[a-z0-9]{16}$/);
export const parseMemoryId = parser<MemoryId>("memory file id", /^m[a-z0-9]{16}$/);
export const parseCheckpointId = parser<CheckpointId>("checkpoint id", /^c[a-z0-9]{16}$/);

/** A size or offset in bytes: a non-negative safe integer. */
export type Bytes = Branded<number, "Bytes">;
export function bytes(n: number): Bytes {
  if (!Number.isSafeInteger(n) || n < 0) throw new AenvError("INVALID_ARGUMENT", `${n} is not a size in bytes`);
  return n as Bytes;
}
export const mib = (n: number): Bytes => bytes(n * 1024 * 1024);
