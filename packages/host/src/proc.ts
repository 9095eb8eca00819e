import { readdirSync, readFileSync } from "node:fs";

/** A process that cannot be mistaken for a later one with the same pid. */
export interface ProcIdentity {
  pid: number;
  /** Start time in clock ticks since boot: field 22 of /proc/PID/stat. */
  startTicks: number;
}

/** Identity of a live process; undefined when it is gone or only waits to be reaped. */
export function procIdentity(pid: number): ProcIdentity | undefined {
  let stat: string;
  try {
    stat = readFileSync(`/proc/${pid}/stat`, "latin1");
  } catch {
    return undefined;
  }
  // The command name may hold spaces and brackets: fields are counted from its last bracket.
  const fields = stat.slice(stat.lastIndexOf(")") + 2).split(" ");
  const state = fields[0];
  if (state === "Z" || state === "X") return undefined;
  return { pid, startTicks: Number(fields[19]) };
}

export function isAlive(id: ProcIdentity): boolean {
  return procIdentity(id.pid)?.startTicks === id.startTicks;
}

/** Sends the signal only to that very process. False when it is gone. */
export function signalExact(id: ProcIdentity, signal: NodeJS.Signals): boolean {
  if (!isAlive(id)) return false;
  try {
    process.kill(id.pid, signal);
    return true;
  } catch {
    return false;
  }
}

/** argv of every live process. */
export function* processes(): Generator<ProcIdentity & { argv: string[] }> {
  for (const name of readdirSync("/proc")) {
    if (!/^\d+$/.test(name)) continue;
    const id = procIdentity(Number(name));
    if (!id) continue;
    try {
      yield { ...id, argv: readFileSync(`/proc/${name}/cmdline`, "utf8").split("\0").slice(0, -1) };
    } catch {
      // It ended between the two reads.
    }
  }
}
