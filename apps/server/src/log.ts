import type { Logger } from "@aenv/base";
import { pino } from "pino";

/** Lines that wait while they cannot be written; beyond it new ones are lost. */
const MAX_WAITING_BYTES = 1024 * 1024;

/** JSON lines on standard output, or to the file or descriptor `dest`; keys and tokens never appear. */
export function openLogger(
  level: string,
  dest: string | number = 1,
): Logger & { child(bindings: Record<string, unknown>): Logger } {
  // Written at once: an asynchronous destination that cannot write keeps the process from ending.
  const destination = pino.destination({ dest, sync: true, maxLength: MAX_WAITING_BYTES });
  // Guests can fill the host's disk: that may cost lines of the log, never the node.
  destination.on("error", () => {});
  return pino(
    {
      level,
      base: null,
      timestamp: pino.stdTimeFunctions.isoTime,
      formatters: { level: (label) => ({ level: label }) },
      redact: { paths: ["*.accessToken", "*.envdAccessToken", "*.apiKey", "*.key"], censor: "[redacted]" },
    },
    destination,
  );
}
