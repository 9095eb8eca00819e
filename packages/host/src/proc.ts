import { readdirSync, readFileSync } from "node:fs";

/** A process that cannot be mistaken for a later one with the same pid. */
export interface ProcIdentity {
  pid: number;
  /** Start time in clock ticks since boot: field 22 of /proc/PID/stat. */
  startTicks: number;
}

/** Identity of a live process; undefined when it is gone or only waits to be reaped. */
export function procIdentity(pid: number): ProcIdentity | undefined {
  const fields = statFields(pid);
  return fields && { pid, startTicks: Number(fields[19]) };
}

/** Fields of /proc/PID/stat from the state on; undefined when the process is gone or only waits to be reaped. */
function statFields(pid: number): string[] | undefined {
  let stat: string;
  try {
    stat = readFileSync(`/proc/${pid}/stat`, "latin1");
  } catch {
    return undefined;
  }
  // The command name may hold spaces and brackets: fields are counted from its last bracket.
  const fields = stat.slice(stat.lastIndexOf(")") + 2).split(" ");
  return fields[0] === "Z" || fields[0] === "X" ? undefined : fields;
}

/** The pid of a live process's parent. */
export function parentOf(pid: number): number | undefined {
  const fields = statFields(pid);
  return fields && Number(fields[1]);
}

export function isAlive(id: ProcIdentity): boolean {
  return procIdentity(id.pid)?.startTicks === id.startTicks;
}

/** USER_HZ; the same on every Linux that we run on. */
const TICKS_PER_SECOND = 100;

/** Time since that process started, ended or not. */
export function ageMs(id: ProcIdentity): number {
  const uptime = Number(readFileSync("/proc/uptime", "latin1").split(" ")[0]);
  return (uptime - id.startTicks / TICKS_PER_SECOND) * 1000;
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
