import { once } from "node:events";
import { AenvError, deadline } from "@aenv/base";
import type { GuestClient, GuestProcess } from "@aenv/guest";

/** A process group gets a signal within this, or the user's next signal tries again. */
const SIGNAL_MS = 5000;

/**
 * The agent's own call knows only two signals and only one process; a shell in the guest reaches the whole group.
 * It runs as the user of the command, who may signal it.
 */
export async function signalGroup(
  guest: GuestClient,
  pid: number,
  name: NodeJS.Signals,
  user: string | undefined,
): Promise<void> {
  const signal = deadline(SIGNAL_MS);
  const word = name.replace(/^SIG/, "");
  try {
    const { exitCode } = await guest.exec(
      {
        cmd: "/bin/sh",
        args: ["-c", `kill -${word} -- -${pid} 2>/dev/null || kill -${word} ${pid}`],
        ...(user === undefined ? {} : { user }),
      },
      signal,
    );
    if (exitCode === 0) return;
  } catch {
    // No shell, or the guest is gone: the agent's own signal is the last resort.
  }
  if (name === "SIGKILL" || name === "SIGTERM" || name === "SIGINT" || name === "SIGHUP")
    await guest.signal(pid, name === "SIGKILL" ? "SIGKILL" : "SIGTERM", signal).catch(() => {});
}

/** Writes and waits while the reader is slow, so that the guest is slowed down instead of our memory filled. */
export async function writeTo(stream: NodeJS.WritableStream, data: Buffer, signal: AbortSignal): Promise<void> {
  if (!stream.write(data)) await once(stream, "drain", { signal });
}

export interface ProcessEnd {
  exitCode: number;
  status: string;
}

/** Passes a process's output on until it has ended. */
export async function passOutput(
  process: GuestProcess,
  to: (kind: "stdout" | "stderr" | "pty", data: Buffer) => Promise<void>,
): Promise<ProcessEnd> {
  for await (const e of process) {
    if (e.type === "end") return { exitCode: e.exitCode, status: e.status };
    if (e.type !== "start") await to(e.type, e.data);
  }
  throw new AenvError("GUEST_FAILED", "The stream ended before the command");
}
