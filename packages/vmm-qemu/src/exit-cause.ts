import { statfs } from "node:fs/promises";
import type { VmExit } from "@aenv/vmm";
import type { QmpEvent } from "./qmp.ts";

/** All that is known of an end. */
export interface ExitFacts {
  /** We sent the signal. */
  killed: boolean;
  /** Of the last SHUTDOWN event. */
  shutdownReason?: string;
  code?: number | null;
  signal?: string | null;
  oomKills: number;
  /** The file system of its files is full. */
  diskFull: boolean;
  /** End of the guest's console. */
  console: string;
  /** End of the VMM's own log. */
  log: string;
}

export function shutdownReason(e: QmpEvent): string | undefined {
  if (e.name === "GUEST_PANICKED") return "guest-panic";
  return e.name === "SHUTDOWN" && typeof e.data["reason"] === "string" ? e.data["reason"] : undefined;
}

const lastLine = (text: string): string => text.trimEnd().split("\n").at(-1)?.trim().slice(0, 300) ?? "";

/** The guest prints what it likes on its console, so this only tells apart ways in which the guest itself ended. */
function panicLine(console: string): string | undefined {
  return console
    .split("\n")
    .findLast((l) => l.includes("Kernel panic - not syncing"))
    ?.trim()
    .slice(0, 300);
}

export function exitCause(f: ExitFacts): VmExit {
  if (f.killed) return { cause: "killed", detail: "the VM was killed on request" };
  const panic = panicLine(f.console);
  switch (f.shutdownReason) {
    case "guest-shutdown":
      return { cause: "guest-shutdown", detail: "the guest powered off" };
    case "guest-panic":
      return { cause: "guest-panic", detail: panic ?? "the guest kernel panicked" };
    case "guest-reset":
      // The kernel restarts at once after a panic (panic=-1).
      return panic === undefined
        ? { cause: "guest-reset", detail: "the guest restarted" }
        : { cause: "guest-panic", detail: panic };
    case "host-signal":
    case "host-qmp-quit":
      return { cause: "killed", detail: `the VMM was told to end (${f.shutdownReason})` };
    case undefined:
    default:
  }
  if (f.signal === "SIGKILL" && f.oomKills > 0)
    return { cause: "out-of-memory", detail: "the VMM was over the memory limit of its control group" };
  if (f.signal === "SIGBUS")
    return f.diskFull
      ? { cause: "disk-full", detail: "the node's disk is full: guest memory could not be written to its file" }
      : { cause: "vmm-crash", detail: "the VMM was ended by SIGBUS: a page of a memory file could not be read" };
  if (f.signal) return { cause: "vmm-crash", detail: `the VMM was ended by ${f.signal}` };
  if (typeof f.code === "number" && f.code !== 0)
    return { cause: "vmm-crash", detail: `the VMM ended with ${f.code}: ${lastLine(f.log)}` };
  // It ended while no server listened; what the guest printed last is the best there is.
  if (panic !== undefined) return { cause: "guest-panic", detail: panic };
  if (/reboot: Power down\s*$/.test(f.console)) return { cause: "guest-shutdown", detail: "the guest powered off" };
  if (/reboot: Restarting system\s*$/.test(f.console)) return { cause: "guest-reset", detail: "the guest restarted" };
  return { cause: "unknown", detail: `nobody saw how the VMM ended${f.code === 0 ? ", its exit code was 0" : ""}` };
}

/** A page is all that a VMM asks for; what is left of a full disk is less than this. */
const FULL_BYTES = 1024 * 1024;

export async function isDiskFull(folder: string): Promise<boolean> {
  try {
    const { bavail, bsize } = await statfs(folder);
    return bavail * bsize < FULL_BYTES;
  } catch {
    return false;
  }
}
