export type {
  DoctorReport,
  ListedSandbox,
  NodeInfo,
  Sandbox,
  SandboxDetail,
  SandboxLogEntry,
  SandboxMetric,
  Template,
  TemplateWithBuilds,
} from "@aenv/contract";
export * from "./client.ts";
