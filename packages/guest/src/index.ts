export { GuestClient, type ExecResult, type ExecSpec, type GuestClientOptions } from "./client.ts";
export { type GuestProcess } from "./process.ts";
export {
  type EntryInfo,
  type GuestInit,
  type GuestMetrics,
  type HookResult,
  type HooksRequest,
  type ProcessEvent,
  type ProcessSummary,
  type WrittenFile,
} from "./messages.ts";
