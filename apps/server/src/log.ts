import type { Logger } from "@aenv/base";
import { pino } from "pino";

/** JSON lines on standard output; keys and tokens never appear. */
export function openLogger(level: string): Logger & { child(bindings: Record<string, unknown>): Logger } {
  return pino({
    level,
    base: null,
    timestamp: pino.stdTimeFunctions.isoTime,
    formatters: { level: (label) => ({ level: label }) },
    redact: { paths: ["*.accessToken", "*.envdAccessToken", "*.apiKey", "*.key"], censor: "[redacted]" },
  });
}
