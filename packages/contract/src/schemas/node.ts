import { z } from "zod";

export const Health = z.object({ status: z.literal("ok"), version: z.string() });

/** A distribution over the recent past; the same row shape as `npm run bench` prints. */
const Timing = z.object({
  metric: z.string(),
  unit: z.string(),
  n: z.int(),
  p50: z.number(),
  p95: z.number(),
  p99: z.number(),
  max: z.number().optional(),
});
export type Timing = z.infer<typeof Timing>;

const milliseconds = z.record(z.string(), z.number());
const Operation = z.object({
  seq: z.int().describe("Counts operations from the start of the server."),
  op: z.enum(["create", "child", "resume", "rewind", "pause", "snapshot", "fork"]),
  sandboxId: z.string(),
  source: z.string().optional().describe("What a launch found ready: hot, prepared or cold."),
  startedAt: z.number().describe("Milliseconds on the node's own clock."),
  totalMs: z.number(),
  phases: milliseconds.describe("Milliseconds of each phase; phases may overlap."),
  marks: milliseconds.describe("Milliseconds from the start: stop and go of a guest that is captured, running."),
  counts: z.record(z.string(), z.number()).describe("Bytes of guest memory: dirty, stored, injected."),
});
export type Operation = z.infer<typeof Operation>;
export const Operations = z.object({ operations: z.array(Operation) });

export const NodeInfo = z.object({
  version: z.string(),
  instance: z.string(),
  domain: z
    .string()
    .describe("Sandboxes are reached as `<port>-<id>.<domain>`, with http and https; it may carry a port."),
  certificateAuthority: z
    .string()
    .optional()
    .describe(
      "The certificate (PEM) that signs the node's own, for clients to trust; absent with the operator's certificate.",
    ),
  uptimeSeconds: z.number(),
  vmm: z.string(),
  vmmVersion: z.string(),
  accel: z.string().describe("kvm, or tcg: software emulation."),
  accelReason: z.string().describe("Why this acceleration was chosen."),
  envdVersion: z.string(),
  cpuCount: z.int(),
  base: z
    .object({
      state: z.enum(["absent", "building", "ready", "failed"]),
      step: z.string().optional(),
      error: z.string().optional(),
    })
    .describe("The template `base`, which the node keeps built."),
  sandboxes: z.object({ running: z.int(), paused: z.int() }),
  pools: z.record(z.string(), z.number()).describe("Made-ahead resources by kind."),
  residentBytes: z.int(),
  timings: z.array(Timing),
});
export type NodeInfo = z.infer<typeof NodeInfo>;

const Check = z.object({
  name: z.string(),
  ok: z.boolean(),
  detail: z.string(),
  fix: z.string().optional().describe("What to do when it is not ok."),
});
const Resource = z.object({
  kind: z.string().describe("process, netns, tap, mount, cgroup, file, disk, ..."),
  name: z.string(),
  owner: z.string().nullable().describe("What it belongs to; null is a leak."),
  detail: z.string().optional(),
});
export type Resource = z.infer<typeof Resource>;
export type Check = z.infer<typeof Check>;

export const DoctorReport = z.object({
  ok: z.boolean().describe("Every check passed and every resource has an owner."),
  checks: z.array(Check),
  resources: z.array(Resource),
});
export type DoctorReport = z.infer<typeof DoctorReport>;
