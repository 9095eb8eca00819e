import { z } from "zod";
import { timestamp } from "./common.ts";

const size = z.int().min(0);

export const Transfer = z
  .object({
    transferID: z.string(),
    kind: z.enum(["publish", "fetch"]),
    snapshotID: z.string().describe("The state that moves."),
    name: z.string().optional().describe("The name that was asked for."),
    state: z.enum(["queued", "running", "done", "failed"]).describe("queued: it waits, or is tried again."),
    doneBytes: size.describe("Of this try."),
    totalBytes: size.describe("0 until it is known."),
    attempts: size,
    templateID: z.string().optional().describe("What a fetched snapshot became."),
    error: z.object({ code: z.string(), message: z.string() }).optional().describe("Why the last try failed."),
    startedAt: timestamp(),
    endedAt: timestamp().optional(),
  })
  .describe("A snapshot on its way to the store or from it. It goes on after a restart of the server.");
export type Transfer = z.infer<typeof Transfer>;

export const StoredSnapshot = z
  .object({
    snapshotID: z.string(),
    name: z.string().describe("Of the template or snapshot that was published."),
    publishedAt: timestamp(),
    bytes: size.describe("Everything it consists of, as it is stored."),
    aloneBytes: size.describe("What no other snapshot of the store has: what removing it frees."),
    here: z.boolean().describe("This node has it."),
  })
  .describe("A snapshot in the store.");
export type StoredSnapshot = z.infer<typeof StoredSnapshot>;

export const FetchSnapshot = z.object({
  name: z.string().min(1).max(63).nullish().describe("Of the template that it becomes. Default: its own name."),
});
export type FetchSnapshot = z.infer<typeof FetchSnapshot>;

export const CollectStore = z.object({
  dryRun: z.boolean().nullish().describe("true: only tell. Default false."),
  graceSeconds: size
    .nullish()
    .describe("An object goes with the first run so long after the one that found it unused. Default 3600."),
});
export type CollectStore = z.infer<typeof CollectStore>;

const Objects = z.object({ count: size, bytes: size });
export const CollectedStore = z
  .object({
    kept: Objects.describe("Used by a snapshot."),
    doomed: Objects.describe("Unused: a later run deletes them unless they are used again."),
    deleted: Objects.describe("Deleted now; in a dry run, what would be."),
    swept: size.describe("Uploads that were cut off."),
  })
  .describe("What a collection did.");
export type CollectedStore = z.infer<typeof CollectedStore>;
