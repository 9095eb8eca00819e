import { z } from "zod";
import { timestamp } from "./common.ts";

const BuildStatus = z.enum(["building", "waiting", "ready", "error"]);

export const Template = z.object({
  templateID: z.string(),
  buildID: z.string(),
  cpuCount: z.int(),
  memoryMB: z.int(),
  diskSizeMB: z.int(),
  public: z.boolean(),
  aliases: z.array(z.string()),
  names: z.array(z.string()),
  createdAt: timestamp(),
  updatedAt: timestamp(),
  createdBy: z.object({ id: z.string(), email: z.string().nullable() }).nullable(),
  lastSpawnedAt: timestamp().nullable(),
  spawnCount: z.int(),
  buildCount: z.int(),
  envdVersion: z.string(),
  buildStatus: BuildStatus,
});
export type Template = z.infer<typeof Template>;

const TemplateBuild = z.object({
  buildID: z.string(),
  status: BuildStatus,
  createdAt: timestamp(),
  updatedAt: timestamp(),
  finishedAt: timestamp().optional(),
  cpuCount: z.int(),
  memoryMB: z.int(),
  diskSizeMB: z.int().optional(),
  envdVersion: z.string().optional(),
});

export const TemplateWithBuilds = z.object({
  templateID: z.string(),
  public: z.boolean(),
  aliases: z.array(z.string()),
  names: z.array(z.string()),
  createdAt: timestamp(),
  updatedAt: timestamp(),
  lastSpawnedAt: timestamp().nullable(),
  spawnCount: z.int(),
  builds: z.array(TemplateBuild),
});
export type TemplateWithBuilds = z.infer<typeof TemplateWithBuilds>;

export const TemplateAlias = z.object({ templateID: z.string(), public: z.boolean() });
