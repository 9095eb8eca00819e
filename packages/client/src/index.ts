export type {
  Checkpoint,
  CollectedStore,
  DoctorReport,
  Lineage,
  LineageNode,
  ListedSandbox,
  NodeInfo,
  Operation,
  Sandbox,
  SandboxDetail,
  SandboxLogEntry,
  SandboxMetric,
  SnapshotInfo,
  StoredSnapshot,
  Template,
  TemplateWithBuilds,
  Transfer,
} from "@aenv/contract";
export * from "./client.ts";
export { StoreClient } from "./store.ts";
