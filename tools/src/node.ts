/** Starts, finds and asks the node of a data folder; shared by up, down and the test set-up. */
import { spawn } from "node:child_process";
import { open, readFile } from "node:fs/promises";
import { join } from "node:path";
import { AenvError, messageOf, sleep } from "@aenv/base";
import { isAlive, type ProcIdentity, readServerFile, signalExact } from "@aenv/host";

export const root = join(import.meta.dirname, "../..");
/** Where `npm run up` makes `aenv` a command. */
export const LINK = "/usr/local/bin/aenv";

export interface RunningServer extends ProcIdentity {
  port: number;
  stopMs: number;
}

/** The server of this data folder if it is alive. */
export function runningServer(home: string): RunningServer | undefined {
  const file = readServerFile(home);
  return file && isAlive(file) ? file : undefined;
}

/** The last lines of the server's log, for error messages. */
async function logTail(home: string): Promise<string> {
  const text = await readFile(join(home, "log/server.log"), "utf8").catch(() => "");
  return text.trim().split("\n").slice(-8).join("\n");
}

/** How long a server may take until it has adopted what runs and listens. */
const START_TIMEOUT_MS = 60_000;

/** Starts the server in the background and waits until it answers. It outlives this process. */
export async function startServer(home: string, signal: AbortSignal): Promise<RunningServer> {
  const log = await open(join(home, "log/server.log"), "a");
  try {
    const child = spawn(process.execPath, [join(root, "apps/server/src/main.ts"), "--home", home], {
      cwd: "/",
      detached: true,
      stdio: ["ignore", log.fd, log.fd],
    });
    child.unref();
    let ended: string | undefined;
    const end = Promise.withResolvers<void>();
    const onEnd = (why: string): void => {
      ended = why;
      end.resolve();
    };
    child.on("exit", (code, sig) => onEnd(sig ?? `exit code ${code}`));
    child.on("error", (e) => onEnd(e.message));
    await using undo = new AsyncDisposableStack();
    undo.defer(async () => {
      // Given up: it may not have written down yet who it is, so that nobody else could find it.
      child.kill("SIGUSR2");
      await end.promise;
    });
    const until = performance.now() + START_TIMEOUT_MS;
    while (performance.now() < until) {
      if (ended !== undefined) {
        throw new AenvError("UNAVAILABLE", `the server ended while it started (${ended}):\n${await logTail(home)}`, {
          hint: `Read ${join(home, "log/server.log")}. If the port is taken, set another "port" in ${join(home, "config.json")}.`,
        });
      }
      const server = runningServer(home);
      if (server?.pid === child.pid && server && (await healthy(server.port))) {
        undo.move();
        return server;
      }
      await sleep(50, signal);
    }
    throw new AenvError(
      "DEADLINE",
      `the server did not answer within ${START_TIMEOUT_MS / 1000} s:\n${await logTail(home)}`,
    );
  } finally {
    await log.close();
  }
}

export async function healthy(port: number): Promise<boolean> {
  try {
    const answer = await fetch(`http://127.0.0.1:${port}/health`, { signal: AbortSignal.timeout(2000) });
    return answer.ok;
  } catch {
    return false;
  }
}

/**
 * Ends the server only; blockd and vmd stay. `pause`: after it has paused its sandboxes, as far as its deadline allows.
 * `keep`: their virtual machines go on.
 */
export async function stopServer(server: RunningServer, sandboxes: "pause" | "keep"): Promise<void> {
  signalExact(server, sandboxes === "pause" ? "SIGTERM" : "SIGUSR2");
  const until = performance.now() + 15_000 + (sandboxes === "pause" ? server.stopMs : 0);
  while (isAlive(server)) {
    if (performance.now() > until) signalExact(server, "SIGKILL");
    await sleep(20);
  }
}

export async function readKey(home: string): Promise<string> {
  const path = join(home, "auth.json");
  try {
    const { apiKey } = JSON.parse(await readFile(path, "utf8")) as { apiKey?: unknown };
    if (typeof apiKey === "string") return apiKey;
  } catch (e) {
    throw new AenvError("UNAVAILABLE", `${path}: ${messageOf(e)}`, {
      cause: e,
      hint: "Start the node once (npm run up): it writes the first key there.",
    });
  }
  throw new AenvError("CORRUPT", `${path} holds no "apiKey"`, {
    hint: "Make another key with aenv auth, or run npm run down -- --purge.",
  });
}
