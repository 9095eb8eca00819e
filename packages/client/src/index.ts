export type {
  Checkpoint,
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
  Template,
  TemplateWithBuilds,
} from "@aenv/contract";
export * from "./client.ts";
