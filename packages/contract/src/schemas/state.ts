import { z } from "zod";
import { ErrorBody, timestamp } from "./common.ts";
import { DEFAULT_TIMEOUT_S, Sandbox, SandboxState } from "./sandboxes.ts";

/** No node makes more children of one request, whatever its limit. */
export const MAX_FORKS = 100;

const lifetime = z.int().min(1, "must be at least 1 second");
const memoryOnResume = z
  .boolean()
  .nullish()
  .describe("false: boot from disk; the memory that was kept is ignored. Default true.");

export const PauseSandbox = z.object({
  memory: z
    .boolean()
    .nullish()
    .describe(
      "false: only the disk is kept; the next resume boots the machine anew, and traffic does not wake it. Default true.",
    ),
  requireHealthyGuest: z
    .boolean()
    .nullish()
    .describe("true: where the agent in the sandbox does not answer, it is not paused (503). Default false."),
});
export type PauseSandbox = z.infer<typeof PauseSandbox>;

export const ResumedSandbox = z.object({
  timeout: lifetime.nullish().describe(`Seconds to live from now. Default ${DEFAULT_TIMEOUT_S.resume}.`),
  autoPause: z
    .boolean()
    .nullish()
    .describe("Changes what happens at the end of its time; left out, it stays as it was."),
  memory: memoryOnResume,
});
export type ResumedSandbox = z.infer<typeof ResumedSandbox>;

export const ForkSandbox = z.object({
  count: z
    .int()
    .min(1)
    .max(MAX_FORKS)
    .nullish()
    .describe(`Children, at most as many as the node allows (16 unless it was told otherwise). Default 1.`),
  timeout: lifetime.nullish().describe(`Seconds that each child lives. Default ${DEFAULT_TIMEOUT_S.fork}.`),
  atomic: z
    .boolean()
    .nullish()
    .describe("true: all children or none; where one fails the others are killed, and each result is an error."),
});
export type ForkSandbox = z.infer<typeof ForkSandbox>;

export const SandboxForkResult = z
  .object({ sandbox: Sandbox.optional(), error: ErrorBody.optional() })
  .describe("One child, or why there is none: exactly one of the two is set.");
export type SandboxForkResult = z.infer<typeof SandboxForkResult>;

/** Lower case, as template names; a tag after a colon, a team before a slash. */
const SNAPSHOT_NAME = /^(?:[a-z0-9_-]+\/)?[a-z0-9_-]+(?::[a-z0-9_.-]+)?$/;

export const NewSnapshot = z.object({
  name: z
    .string()
    .max(128)
    .regex(SNAPSHOT_NAME, "must look like name, name:tag or team/name:tag, of a-z, 0-9, - and _ (a tag also .)")
    .nullish()
    .describe("`name`, `name:tag` or `team/name:tag`; the tag is `default` unless given. The same again replaces it."),
  memory: z
    .boolean()
    .nullish()
    .describe("false: only the disk is kept; sandboxes made from it boot anew. Default true."),
});
export type NewSnapshot = z.infer<typeof NewSnapshot>;

export const SnapshotInfo = z.object({
  snapshotID: z.string().describe("`team/name:tag`, or `<templateID>:default` without a name; a create takes it."),
  names: z.array(z.string()).describe("As `team/name:tag`; empty where it has none."),
  sandboxID: z.string().describe("Whose state it is; that sandbox may be gone."),
  templateID: z.string(),
  createdAt: timestamp(),
  cpuCount: z.int(),
  memoryMB: z.int(),
  diskSizeMB: z.int(),
});
export type SnapshotInfo = z.infer<typeof SnapshotInfo>;

const checkpointName = z
  .string()
  .regex(/^[A-Za-z0-9][A-Za-z0-9_.-]{0,63}$/, "must be 1 to 64 letters, digits, -, _ and ., and not begin with - _ .");

export const NewCheckpoint = z.object({
  name: checkpointName.nullish().describe("Unique in this sandbox; the same again stands for the new one."),
});
export type NewCheckpoint = z.infer<typeof NewCheckpoint>;

export const Checkpoint = z.object({
  checkpointID: z.string(),
  sandboxID: z.string(),
  name: z.string().optional(),
  createdAt: timestamp(),
  ownBytes: z.int().describe("Memory and disk that only this checkpoint holds."),
});
export type Checkpoint = z.infer<typeof Checkpoint>;

export const RewindSandbox = z.object({
  checkpoint: z.string().min(1).max(128).describe("A checkpoint's id or name."),
  timeout: lifetime
    .nullish()
    .describe(
      `Its end is then no earlier than so many seconds from now. Default: unchanged; ${DEFAULT_TIMEOUT_S.connect} for a paused sandbox.`,
    ),
});
export type RewindSandbox = z.infer<typeof RewindSandbox>;

const Size = z.object({
  ownBytes: z.int().describe("What this state alone holds."),
  sharedBytes: z.int().describe("What it needs and other states hold too."),
});
export const LineageNode = z.object({
  nodeID: z.string(),
  parentID: z.string().optional().describe("Absent at the root."),
  cause: z.enum(["build", "pause", "snapshot", "checkpoint", "fork"]).describe("What the state was captured for."),
  sandboxID: z.string().optional().describe("Whose state it is; absent for a template's build."),
  names: z.array(z.string()).describe("Of the template, snapshots and checkpoints that keep it."),
  createdAt: timestamp(),
  memory: Size,
  disk: Size,
});
export type LineageNode = z.infer<typeof LineageNode>;

export const Lineage = z.object({
  sandboxID: z.string(),
  nodeID: z.string().describe("The state that this sandbox went on from last."),
  nodes: z.array(LineageNode).describe("Each after its parent."),
  sandboxes: z
    .array(z.object({ sandboxID: z.string(), nodeID: z.string(), state: SandboxState }))
    .describe("Which sandboxes that are alive went on from which state."),
});
export type Lineage = z.infer<typeof Lineage>;
