import { constants } from "node:os";
import type { ReadStream } from "node:tty";
import { AenvError } from "@aenv/base";
import type { GuestClient } from "@aenv/guest";
import { EscapeFilter, InputQueue } from "./input.ts";
import { passOutput, signalGroup, writeTo } from "./remote.ts";
import { exitStatus } from "./status.ts";

const DEFAULT_SIZE = { cols: 80, rows: 24 };
const END_OF_INPUT = Buffer.from([0x04]);

export type TerminalSpec = Omit<Parameters<GuestClient["start"]>[0], "pty" | "stdin" | "tag">;

/**
 * Runs a program on a terminal in the guest and joins it with ours until it ends. Our terminal is set back on every
 * way out, also when the process is ended by a signal or fails.
 */
export async function runTerminal(guest: GuestClient, spec: TerminalSpec): Promise<number> {
  const stdin = process.stdin;
  const stdout = process.stdout;
  const stop = new AbortController();
  const size = (): { cols: number; rows: number } =>
    stdout.isTTY ? { cols: stdout.columns || 80, rows: stdout.rows || 24 } : DEFAULT_SIZE;
  const remote = await guest.start(
    { ...spec, envs: { TERM: process.env["TERM"] || "xterm-256color", ...spec.envs }, pty: size() },
    stop.signal,
  );
  const input = new InputQueue((data) => guest.sendInput(remote.pid, { pty: data }, stop.signal));
  const escapes = new EscapeFilter();
  using _raw = rawMode(stdin);

  let left: (code: number) => void = () => {};
  const leave = new Promise<number>((resolve) => (left = resolve));
  const onData = (data: Buffer): void => {
    const bytes = stdin.isTTY ? escapes.push(data) : data;
    if (bytes === undefined) left(HANGUP);
    else if (bytes.length > 0) input.push(bytes);
  };
  // A pipe that ends means what Ctrl-D means.
  const onEnd = (): void => input.push(END_OF_INPUT);
  let sized = size();
  const onResize = (): void => {
    sized = size();
    guest.resize(remote.pid, sized, stop.signal).catch(() => {});
  };
  const onHangup = (): void => left(HANGUP);
  const onTerminate = (): void => left(TERMINATED);
  stdin.on("data", onData).on("end", onEnd);
  stdout.on("resize", onResize);
  process.on("SIGHUP", onHangup).on("SIGTERM", onTerminate);
  try {
    const ended = passOutput(remote, (_, data) => writeTo(stdout, data, stop.signal)).then(exitStatus);
    const code = await Promise.race([ended, leave]);
    if (code === HANGUP || code === TERMINATED) {
      ended.catch(() => {});
      await signalGroup(guest, remote.pid, "SIGHUP", spec.user);
    }
    return code;
  } finally {
    stdin.off("data", onData).off("end", onEnd).pause();
    stdout.off("resize", onResize);
    process.off("SIGHUP", onHangup).off("SIGTERM", onTerminate);
    stop.abort(new AenvError("CANCELLED", "The session is over", { hint: "" }));
  }
}

const HANGUP = 128 + constants.signals.SIGHUP;
const TERMINATED = 128 + constants.signals.SIGTERM;

/** Keys reach the guest one by one and unechoed. Undone on dispose, and at exit whatever happens before. */
function rawMode(stdin: ReadStream): Disposable {
  if (!stdin.isTTY) return { [Symbol.dispose]: () => {} };
  const restore = (): void => {
    process.off("exit", restore);
    if (stdin.isRaw) stdin.setRawMode(false);
  };
  process.on("exit", restore);
  stdin.setRawMode(true);
  return { [Symbol.dispose]: restore };
}

/** A login shell; the agent takes sh where there is no bash. */
export async function runShell(guest: GuestClient, spec: { user?: string; cwd?: string }): Promise<number> {
  const envs = { LANG: "C.UTF-8", LC_ALL: "C.UTF-8" };
  return await runTerminal(guest, { ...spec, cmd: "/bin/bash", args: ["-i", "-l"], envs });
}
