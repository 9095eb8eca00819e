import { z } from "zod";
import { limit, nextToken, PAGE_HEADERS } from "./page.ts";
import { type RouteDef, route } from "./route.ts";
import { Sandbox } from "./schemas/sandboxes.ts";
import {
  Checkpoint,
  ForkSandbox,
  Lineage,
  NewCheckpoint,
  NewSnapshot,
  PauseSandbox,
  ResumedSandbox,
  RewindSandbox,
  SandboxForkResult,
  SnapshotInfo,
} from "./schemas/state.ts";

const CAPTURE_ERRORS = ["NOT_FOUND", "GUEST_FAILED", "VMM_FAILED", "NO_SPACE", "DEADLINE"] as const;
export const RESUME_ERRORS = [
  "INVALID_ARGUMENT",
  "NOT_FOUND",
  "IN_TRANSITION",
  "RATE_LIMITED",
  "CORRUPT",
  "GUEST_FAILED",
  "VMM_FAILED",
  "SLOT_EXHAUSTED",
  "NO_SPACE",
  "DEADLINE",
] as const;

/** Capturing the state of a sandbox and going on from it. */
export const STATE_ROUTES = {
  pauseSandbox: route({
    method: "POST",
    path: "/sandboxes/{sandboxID}/pause",
    auth: "key",
    tag: "State",
    summary: "Pause a sandbox",
    description:
      "Keeps its memory, processes and disk, and ends its machine: it uses no CPU and no memory until it is resumed. CONFLICT: it is paused already. UNAVAILABLE: it is changing its state; try again.",
    body: PauseSandbox,
    bodyOptional: true,
    example: {},
    success: { 204: { description: "It is paused." } },
    errors: ["INVALID_ARGUMENT", "CONFLICT", ...CAPTURE_ERRORS],
  }),
  resumeSandbox: route({
    method: "POST",
    path: "/sandboxes/{sandboxID}/resume",
    auth: "key",
    tag: "State",
    summary: "Resume a paused sandbox",
    description: "Connecting does the same, and also takes a running one. CONFLICT: it runs.",
    deprecated: true,
    body: ResumedSandbox,
    bodyOptional: true,
    example: { timeout: 300 },
    success: { 201: { description: "It runs.", schema: Sandbox } },
    errors: ["CONFLICT", ...RESUME_ERRORS],
  }),
  forkSandbox: route({
    method: "POST",
    path: "/sandboxes/{sandboxID}/fork",
    auth: "key",
    tag: "State",
    summary: "Fork a sandbox",
    description:
      "Captures the running or paused sandbox once and starts children from that state, each with an id, tokens, host name and random numbers of its own. The source goes on as it was. An error other than of one child means that there are no children.",
    body: ForkSandbox,
    bodyOptional: true,
    example: { count: 4, timeout: 300 },
    success: { 201: { description: "One result per child, in order.", schema: z.array(SandboxForkResult) } },
    errors: ["INVALID_ARGUMENT", "IN_TRANSITION", "RATE_LIMITED", "SLOT_EXHAUSTED", "CORRUPT", ...CAPTURE_ERRORS],
  }),
  createSnapshot: route({
    method: "POST",
    path: "/sandboxes/{sandboxID}/snapshots",
    auth: "key",
    tag: "State",
    summary: "Keep the state of a sandbox as a snapshot",
    description:
      "The running or paused sandbox goes on as it was. Sandboxes can be created from the snapshot as from a template, also when its source is gone. CONFLICT: the name is that of a template.",
    body: NewSnapshot,
    bodyOptional: true,
    example: { name: "prepared:v1" },
    success: { 201: { description: "It is kept.", schema: SnapshotInfo } },
    errors: ["INVALID_ARGUMENT", "PERMISSION_DENIED", "CONFLICT", "IN_TRANSITION", "CORRUPT", ...CAPTURE_ERRORS],
  }),
  listSnapshots: route({
    method: "GET",
    path: "/snapshots",
    auth: "key",
    tag: "State",
    summary: "List snapshots, page by page",
    query: z.object({
      sandboxID: z.string().optional().describe("Only those of this sandbox, which may be gone."),
      name: z.string().optional().describe("A name or id, with or without a tag. Unknown: an empty list."),
      limit,
      nextToken,
    }),
    success: {
      200: { description: "One page, newest first.", schema: z.array(SnapshotInfo), headers: PAGE_HEADERS },
    },
    errors: ["INVALID_ARGUMENT"],
  }),
  createCheckpoint: route({
    method: "POST",
    path: "/sandboxes/{sandboxID}/checkpoints",
    auth: "key",
    tag: "State",
    own: true,
    summary: "Keep the state of a sandbox to rewind to",
    description:
      "The running or paused sandbox goes on as it was. Unlike a snapshot, a checkpoint belongs to its sandbox and ends with it.",
    body: NewCheckpoint,
    bodyOptional: true,
    example: { name: "before-tests" },
    success: { 201: { description: "It is kept.", schema: Checkpoint } },
    errors: ["INVALID_ARGUMENT", "IN_TRANSITION", "CORRUPT", ...CAPTURE_ERRORS],
  }),
  listCheckpoints: route({
    method: "GET",
    path: "/sandboxes/{sandboxID}/checkpoints",
    auth: "key",
    tag: "State",
    own: true,
    summary: "List the checkpoints of a sandbox",
    success: { 200: { description: "Oldest first.", schema: z.array(Checkpoint) } },
    errors: ["NOT_FOUND"],
  }),
  rewindSandbox: route({
    method: "POST",
    path: "/sandboxes/{sandboxID}/rewind",
    auth: "key",
    tag: "State",
    own: true,
    summary: "Take a sandbox back to a checkpoint",
    description:
      "In place: its id and tokens stay, its connections end, and what it did since the checkpoint is lost. A paused sandbox runs afterwards. NOT_FOUND: there is no such sandbox or no such checkpoint.",
    body: RewindSandbox,
    example: { checkpoint: "before-tests" },
    success: { 200: { description: "It runs from the checkpoint.", schema: Sandbox } },
    errors: RESUME_ERRORS,
  }),
  sandboxLineage: route({
    method: "GET",
    path: "/sandboxes/{sandboxID}/lineage",
    auth: "key",
    tag: "State",
    own: true,
    summary: "The tree of states that a sandbox belongs to",
    description:
      "From the template's state down: the states the sandbox stands on, those captured from it, and those of its forks.",
    success: { 200: { description: "The tree as a list.", schema: Lineage } },
    errors: ["NOT_FOUND"],
  }),
} as const satisfies Record<string, RouteDef>;
