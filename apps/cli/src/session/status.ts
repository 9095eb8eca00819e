import { constants } from "node:os";

/** Words with which the guest names a signal, where they are not the system's short name. */
const WORDS: Readonly<Record<string, NodeJS.Signals>> = {
  hangup: "SIGHUP",
  interrupt: "SIGINT",
  quit: "SIGQUIT",
  "illegal instruction": "SIGILL",
  "trace/breakpoint trap": "SIGTRAP",
  aborted: "SIGABRT",
  "bus error": "SIGBUS",
  "floating point exception": "SIGFPE",
  killed: "SIGKILL",
  "user defined signal 1": "SIGUSR1",
  "segmentation fault": "SIGSEGV",
  "user defined signal 2": "SIGUSR2",
  "broken pipe": "SIGPIPE",
  "alarm clock": "SIGALRM",
  terminated: "SIGTERM",
};

export interface Ended {
  exitCode: number;
  status: string;
}

/** The signal that ended a process, from the guest's "signal: killed". */
export function signalOf(end: Ended): NodeJS.Signals | undefined {
  const word = /^signal: ([a-z0-9/ ]+)/
    .exec(end.status)?.[1]
    ?.replace(/ \(core dumped\)$/, "")
    .trim();
  return word === undefined ? undefined : WORDS[word];
}

/** As a shell tells it: the exit code, or 128 and the number of the signal. */
export function exitStatus(end: Ended): number {
  if (end.exitCode >= 0) return end.exitCode & 0xff;
  const signal = signalOf(end);
  return 128 + (signal === undefined ? constants.signals.SIGKILL : constants.signals[signal]);
}
