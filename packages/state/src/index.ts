export { DEFAULT_TEAM } from "./keys.ts";
export * from "./records.ts";
export type { IdempotencyRecord } from "./sandboxes.ts";
export { LIFECYCLE } from "./lifecycle.ts";
export type { EventQuery, EventRecord, LifecycleRecord, NumberedEvent, SampleRecord } from "./series.ts";
export type { WebhookRecord } from "./webhooks.ts";
export { State } from "./state.ts";
