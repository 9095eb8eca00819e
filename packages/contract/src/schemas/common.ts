import { ERROR_CODES, type ErrorCode } from "@aenv/base";
import { z } from "zod";

/** Body of every error of the API. `code` repeats the HTTP status: the SDKs tell 404 and 409 apart by it. */
export const ErrorBody = z
  .object({
    code: z.int().min(400).max(599).describe("The HTTP status."),
    message: z.string().describe("What happened and what to do about it."),
    error_code: z.string().optional().describe("Stable name of the error; see the error table."),
  })
  .describe("Every failed request answers with this.");
export type ErrorBody = z.infer<typeof ErrorBody>;

export const timestamp = (): z.ZodISODateTime => z.iso.datetime({ offset: true });
export const EnvVars = z.record(z.string(), z.string()).describe("Environment of every process in the sandbox.");
export const Metadata = z.record(z.string(), z.string()).describe("Your labels; the list can be filtered by them.");

/** The error table as rows, for documents and clients. */
export const ERROR_TABLE: readonly { code: ErrorCode; status: number; retry: boolean; hint: string }[] = (
  Object.keys(ERROR_CODES) as ErrorCode[]
).map((code) => ({ code, ...ERROR_CODES[code] }));
