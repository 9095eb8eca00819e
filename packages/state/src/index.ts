export { DEFAULT_TEAM } from "./keys.ts";
export * from "./records.ts";
export type { IdempotencyRecord } from "./sandboxes.ts";
export type { EventRecord, SampleRecord } from "./series.ts";
export { State } from "./state.ts";
