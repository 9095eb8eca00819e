import { z } from "zod";
import { timestamp } from "./common.ts";

export const Team = z.object({
  teamID: z.string(),
  name: z.string(),
  apiKey: z.string().describe("The key of this very request; others are stored only as hashes."),
  isDefault: z.boolean(),
});
export type Team = z.infer<typeof Team>;

const KeyMask = z.object({
  prefix: z.string(),
  valueLength: z.int(),
  maskedValuePrefix: z.string(),
  maskedValueSuffix: z.string(),
});

export const ApiKey = z.object({
  id: z.string(),
  name: z.string(),
  mask: KeyMask,
  createdAt: timestamp(),
  lastUsed: timestamp().nullable(),
  createdBy: z.null().optional(),
});
export type ApiKey = z.infer<typeof ApiKey>;

export const CreatedApiKey = ApiKey.extend({ key: z.string().describe("Shown only this once.") });
export type CreatedApiKey = z.infer<typeof CreatedApiKey>;

export const NewApiKey = z.object({ name: z.string().trim().min(1).max(100) });
