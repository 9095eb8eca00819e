import { AenvError } from "@aenv/base";
import type { GuestClient } from "@aenv/guest";
import { exitCodeOf, interruption } from "../exit.ts";
import { rawMode } from "../tty.ts";
import { EscapeFilter, InputQueue } from "./input.ts";
import { passOutput, signalGroup, writeTo } from "./remote.ts";
import { exitStatus } from "./status.ts";

const DEFAULT_SIZE = { cols: 80, rows: 24 };
const END_OF_INPUT = Buffer.from([0x04]);
const CTRL_C = 0x03;

export type TerminalSpec = Omit<Parameters<GuestClient["start"]>[0], "pty" | "stdin" | "tag">;

/**
 * Runs a program on a terminal in the guest and joins it with ours until it ends or `interrupted` aborts. Keys are ours
 * before the program starts: what is typed meanwhile reaches it, and Ctrl-C gives up. Our terminal is set back on every
 * way out, also when the process is ended by a signal or fails.
 */
export async function runTerminal(guest: GuestClient, spec: TerminalSpec, interrupted: AbortSignal): Promise<number> {
  const stdin = process.stdin;
  const stdout = process.stdout;
  const stop = new AbortController();
  const size = (): { cols: number; rows: number } =>
    stdout.isTTY ? { cols: stdout.columns || 80, rows: stdout.rows || 24 } : DEFAULT_SIZE;
  const escapes = new EscapeFilter();
  const left = Promise.withResolvers<AenvError>();
  const leave = (why: AenvError): void => left.resolve(why);
  const onInterrupt = (): void => leave(AenvError.from(interrupted.reason, "terminal"));
  const early: Buffer[] = [];
  let input: InputQueue | undefined;
  const push = (bytes: Buffer): void => {
    if (input !== undefined) input.push(bytes);
    else if (stdin.isTTY && bytes.includes(CTRL_C)) leave(interruption("SIGINT"));
    else early.push(bytes);
  };
  const onData = (data: Buffer): void => {
    const bytes = stdin.isTTY ? escapes.push(data) : data;
    if (bytes === undefined) leave(interruption("SIGHUP"));
    else if (bytes.length > 0) push(bytes);
  };
  // A pipe that ends means what Ctrl-D means.
  const onEnd = (): void => push(END_OF_INPUT);
  let onResize = (): void => {};

  using _raw = rawMode(stdin);
  interrupted.addEventListener("abort", onInterrupt, { once: true });
  if (interrupted.aborted) onInterrupt();
  stdin.on("data", onData).on("end", onEnd);
  try {
    const envs = { TERM: process.env["TERM"] || "xterm-256color", ...spec.envs };
    const starting = guest.start({ ...spec, envs, pty: size() }, stop.signal);
    const remote = await Promise.race([starting, left.promise]);
    if (remote instanceof AenvError) {
      starting.catch(() => {});
      return exitCodeOf(remote);
    }
    input = new InputQueue((data) => guest.sendInput(remote.pid, { pty: data }, stop.signal));
    for (const bytes of early) input.push(bytes);
    onResize = (): void => void guest.resize(remote.pid, size(), stop.signal).catch(() => {});
    stdout.on("resize", onResize);
    const ended = passOutput(remote, (_, data) => writeTo(stdout, data, stop.signal)).then(exitStatus);
    const end = await Promise.race([ended, left.promise]);
    if (!(end instanceof AenvError)) return end;
    ended.catch(() => {});
    await signalGroup(guest, remote.pid, "SIGHUP", spec.user);
    return exitCodeOf(end);
  } finally {
    stdin.off("data", onData).off("end", onEnd).pause();
    stdout.off("resize", onResize);
    interrupted.removeEventListener("abort", onInterrupt);
    stop.abort(new AenvError("CANCELLED", "The session is over", { hint: "" }));
  }
}

/** A login shell; the agent takes sh where there is no bash. */
export async function runShell(
  guest: GuestClient,
  spec: { user?: string; cwd?: string },
  interrupted: AbortSignal,
): Promise<number> {
  const envs = { LANG: "C.UTF-8", LC_ALL: "C.UTF-8" };
  return await runTerminal(guest, { ...spec, cmd: "/bin/bash", args: ["-i", "-l"], envs }, interrupted);
}
