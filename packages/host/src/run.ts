import { spawn } from "node:child_process";
import { AenvError } from "@aenv/base";

export interface RunOptions {
  signal?: AbortSignal;
  /** Written to the command's standard input. */
  input?: string;
  cwd?: string;
  /** The whole environment of the command; the default is PATH and LC_ALL=C. */
  env?: Record<string, string>;
}

export interface RunResult {
  stdout: string;
  stderr: string;
}

/** More output than this is an error: the tools we call print little. */
const MAX_OUTPUT_BYTES = 16 * 1024 * 1024;
const DEFAULT_ENV = { PATH: "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin", LC_ALL: "C" };

/** Runs a host tool without a shell. Throws UNAVAILABLE when it is not installed, INTERNAL with its stderr when it fails. */
export function run(cmd: string, args: readonly string[], options: RunOptions = {}): Promise<RunResult> {
  return new Promise((resolve, reject) => {
    const child = spawn(cmd, args, {
      env: options.env ?? DEFAULT_ENV,
      stdio: ["pipe", "pipe", "pipe"],
      ...(options.cwd === undefined ? {} : { cwd: options.cwd }),
      ...(options.signal === undefined ? {} : { signal: options.signal }),
    });
    let size = 0;
    const out: Buffer[] = [];
    const err: Buffer[] = [];
    const collect = (into: Buffer[]) => (chunk: Buffer) => {
      size += chunk.length;
      if (size > MAX_OUTPUT_BYTES) child.kill("SIGKILL");
      else into.push(chunk);
    };
    child.stdout.on("data", collect(out));
    child.stderr.on("data", collect(err));
    // A command that does not read its input closes the pipe: its exit code is what counts.
    child.stdin.on("error", () => {});
    child.stdin.end(options.input);
    child.on("error", (e: NodeJS.ErrnoException) => {
      if (e.code === "ENOENT")
        reject(
          new AenvError("UNAVAILABLE", `${cmd} is not installed`, {
            cause: e,
            hint: "Install the Debian package that has it: npm run up does so for a node, npm run bench and npm test for theirs.",
          }),
        );
      else reject(AenvError.from(e, cmd));
    });
    child.on("close", (code, signal) => {
      const stdout = Buffer.concat(out).toString();
      const stderr = Buffer.concat(err).toString();
      if (code === 0) return resolve({ stdout, stderr });
      const end =
        size > MAX_OUTPUT_BYTES ? "printed too much" : signal ? `was ended by ${signal}` : `ended with ${code}`;
      reject(
        new AenvError("INTERNAL", `${cmd} ${args.slice(0, 4).join(" ")} ${end}: ${stderr.trim().slice(-2000)}`, {
          data: { cmd, exitCode: code, stderr: stderr.slice(-4000) },
        }),
      );
    });
  });
}
