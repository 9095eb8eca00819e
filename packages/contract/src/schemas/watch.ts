import { z } from "zod";
import { timestamp } from "./common.ts";

/** Types of the events that outsiders are told of. */
export const LIFECYCLE_TYPES = [
  "sandbox.lifecycle.created",
  "sandbox.lifecycle.paused",
  "sandbox.lifecycle.resumed",
  "sandbox.lifecycle.updated",
  "sandbox.lifecycle.checkpointed",
  "sandbox.lifecycle.killed",
] as const;
const LifecycleType = z.enum(LIFECYCLE_TYPES);
export type LifecycleType = z.infer<typeof LifecycleType>;

/** What a webhook is sent, and what the list of events shows. */
export const LifecycleEvent = z.object({
  version: z.literal("v1"),
  id: z.string().describe("The same for every delivery of the event."),
  type: LifecycleType,
  timestamp: timestamp(),
  sandboxId: z.string(),
  sandboxExecutionId: z.string().nullable().describe("The run of its virtual machine, where the event is of one."),
  sandboxTemplateId: z.string(),
  sandboxBuildId: z.string().describe("The state that it was launched from last."),
  sandboxTeamId: z.string(),
  eventData: z.record(z.string(), z.unknown()).describe("sandbox_metadata, and what the event says of itself."),
});
export type LifecycleEvent = z.infer<typeof LifecycleEvent>;

const url = z
  .url({ protocol: /^https?$/ })
  .max(2048)
  .describe("http or https; events are sent to it by POST.");
const name = z.string().min(1).max(128);
const events = z.array(LifecycleType).min(1).describe("The types it is told of.");
const signatureSecret = z
  .string()
  .min(16)
  .max(256)
  .describe("Signs every delivery: e2b-signature is the base64 of SHA-256 of this and the body, without padding.");

export const NewWebhook = z.object({
  name,
  url,
  enabled: z.boolean().optional().describe("Default true."),
  events: events.optional().describe("Default: all."),
  signatureSecret,
});
export const WebhookChange = z.object({
  name: name.optional(),
  url: url.optional(),
  enabled: z.boolean().optional(),
  events: events.optional(),
  signatureSecret: signatureSecret.optional(),
});

export const Webhook = z.object({
  id: z.string(),
  teamID: z.string(),
  name: z.string(),
  url: z.string(),
  enabled: z.boolean(),
  events: z.array(LifecycleType),
  createdAt: timestamp(),
});
export type Webhook = z.infer<typeof Webhook>;

export const TeamMetric = z.object({
  timestamp: timestamp(),
  timestampUnix: z.int(),
  concurrentSandboxes: z.int(),
  sandboxStartRate: z.number().describe("Sandboxes per second that were created."),
});
export type TeamMetric = z.infer<typeof TeamMetric>;

export const MaxTeamMetric = z.object({ timestamp: timestamp(), timestampUnix: z.int(), value: z.number() });
export type MaxTeamMetric = z.infer<typeof MaxTeamMetric>;
