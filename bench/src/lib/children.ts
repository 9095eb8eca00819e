import { type ChildProcess, spawn } from "node:child_process";
import { once } from "node:events";
import { readFileSync } from "node:fs";
import { createConnection, createServer, type AddressInfo } from "node:net";
import { AenvError, sleep } from "@aenv/base";

/** A port that was free a moment ago; for tools that cannot be told to choose one. */
export async function freePort(): Promise<number> {
  const server = createServer().listen(0, "127.0.0.1");
  await once(server, "listening");
  const { port } = server.address() as AddressInfo;
  server.close();
  await once(server, "close");
  return port;
}

/** Processes of one benchmark; all are gone when it is disposed. */
export class Children implements AsyncDisposable {
  readonly #all: ChildProcess[] = [];

  start(cmd: string, args: readonly string[], stdout: "ignore" | "pipe" = "ignore"): ChildProcess & { pid: number } {
    const child = spawn(cmd, args, { stdio: ["ignore", stdout, "inherit"] });
    child.on("error", () => {});
    if (child.pid === undefined)
      throw new AenvError("UNAVAILABLE", `${cmd} is not installed`, {
        hint: "npm run bench installs it as root; this benchmark compares with it.",
      });
    this.#all.push(child);
    return child as ChildProcess & { pid: number };
  }

  /** Starts one of our own servers, which prints the port it listens on as its first line. */
  async startServer(script: string, args: readonly string[]): Promise<{ port: number; pid: number }> {
    const child = this.start(process.execPath, [script, ...args], "pipe");
    const [line] = (await once(child.stdout as NonNullable<typeof child.stdout>, "data")) as [Buffer];
    return { port: Number(line.toString()), pid: child.pid };
  }

  async [Symbol.asyncDispose](): Promise<void> {
    for (const child of this.#all) {
      if (child.exitCode !== null || child.signalCode !== null) continue;
      const gone = once(child, "exit");
      child.kill("SIGTERM");
      await gone;
    }
  }
}

export async function waitForPort(port: number, signal: AbortSignal): Promise<void> {
  for (let tries = 0; tries < 200; tries++) {
    const open = await new Promise<boolean>((resolve) => {
      const s = createConnection(port, "127.0.0.1", () => {
        s.destroy();
        resolve(true);
      });
      s.on("error", () => resolve(false));
    });
    if (open) return;
    await sleep(25, signal);
  }
  throw new AenvError("UNAVAILABLE", `nothing listens on port ${port}`);
}

/** Resident memory in MiB: now and at most so far. */
export function residentMiB(pid: number): { now: number; peak: number } {
  const status = readFileSync(`/proc/${pid}/status`, "utf8");
  const field = (name: string): number => Number(new RegExp(`^${name}:\\s+(\\d+)`, "m").exec(status)?.[1] ?? 0) / 1024;
  return { now: field("VmRSS"), peak: field("VmHWM") };
}
