import { constants } from "node:os";
import { AenvError, errnoOf, sleep } from "@aenv/base";
import type { GuestClient } from "@aenv/guest";
import { interruption } from "../exit.ts";
import { onSignals } from "../tty.ts";
import { InputQueue } from "./input.ts";
import { type ProcessEnd, passOutput, signalGroup } from "./remote.ts";
import { exitStatus } from "./status.ts";

/** Bytes of standard input that wait to be sent before reading stops. */
const INPUT_CHUNK = 256 * 1024;
/** So many Ctrl-C end a command that ignores them. */
const PATIENCE = 3;
/** For a command whose output nobody reads to end before it is told to. */
const GRACE_MS = 1000;
const FORWARDED = ["SIGINT", "SIGTERM", "SIGHUP", "SIGQUIT", "SIGUSR1", "SIGUSR2"] as const;

export interface PipeSession {
  spec: Omit<Parameters<GuestClient["start"]>[0], "pty" | "stdin" | "tag">;
  stdin: NodeJS.ReadStream | undefined;
  output: (kind: "stdout" | "stderr", data: Buffer) => Promise<void>;
}

/**
 * Runs a program with pipes; signals that we get go to its process group, also those that come while it is started. A
 * second one that comes before it runs gives up: CANCELLED.
 */
export async function runPipes(
  guest: GuestClient,
  session: PipeSession,
  closed: (fn: () => void) => void,
): Promise<ProcessEnd & { code: number }> {
  const { spec, stdin } = session;
  const stop = new AbortController();
  const early: NodeJS.Signals[] = [];
  let pid: number | undefined;
  let interrupts = 0;
  const forward = (name: NodeJS.Signals): void => {
    if (pid === undefined) {
      if (early.push(name) > 1) stop.abort(interruption(name));
      return;
    }
    if (name === "SIGINT") interrupts++;
    const sent = interrupts >= PATIENCE ? "SIGKILL" : name;
    void signalGroup(guest, pid, sent, spec.user);
  };
  using _signals = onSignals(forward, FORWARDED);
  const remote = await guest.start({ ...spec, stdin: stdin !== undefined }, stop.signal);
  pid = remote.pid;
  for (const name of early) forward(name);
  let unread: () => void = () => {};
  const readerGone = new Promise<"reader gone">((resolve) => (unread = () => resolve("reader gone")));
  closed(unread);
  const feeding = stdin && feed(guest, remote.pid, stdin, stop.signal);
  let discard = false;
  const ended = passOutput(remote, async (kind, data) => {
    if (discard || kind === "pty") return;
    try {
      await session.output(kind, data);
    } catch (e) {
      if (errnoOf(e) !== "EPIPE") throw e;
      discard = true;
    }
  });
  try {
    const end = await Promise.race([ended, readerGone]);
    if (end !== "reader gone") return { ...end, code: exitStatus(end) };
    // A local command is ended when it writes to nobody; one that ignores that signal fails by itself, or is told.
    discard = true;
    await signalGroup(guest, remote.pid, "SIGPIPE", spec.user);
    const left = await Promise.race([ended.catch(() => undefined), sleep(GRACE_MS, stop.signal).then(() => "alive")]);
    if (left === "alive") await signalGroup(guest, remote.pid, "SIGTERM", spec.user);
    return { exitCode: -1, status: "signal: broken pipe", code: 128 + constants.signals.SIGPIPE };
  } finally {
    stop.abort(new AenvError("CANCELLED", "The session is over", { hint: "" }));
    stdin?.destroy();
    await feeding;
  }
}

/** Ends early, without an error, when the process takes no more: its exit is what counts. */
async function feed(guest: GuestClient, pid: number, stdin: NodeJS.ReadStream, signal: AbortSignal): Promise<void> {
  const queue = new InputQueue((data) => guest.sendInput(pid, { stdin: data }, signal));
  let waiting = 0;
  try {
    for await (const chunk of stdin as AsyncIterable<Buffer>) {
      queue.push(chunk);
      waiting += chunk.length;
      if (waiting >= INPUT_CHUNK) {
        await queue.flush();
        waiting = 0;
      }
      if (queue.failed) return;
    }
    await queue.flush();
    if (!queue.failed) await guest.closeStdin(pid, signal);
  } catch {
    // The command ended first, or standard input was closed by us.
  }
}
