/** A real S3 server (versitygw, a Go module) on loopback, over a folder of its own. Built once, into the cache. */
import { type ChildProcess, execFile, spawn } from "node:child_process";
import { once } from "node:events";
import { existsSync, mkdirSync, mkdtempSync, renameSync, rmSync } from "node:fs";
import { createServer } from "node:net";
import { tmpdir } from "node:os";
import { join, resolve } from "node:path";
import { promisify } from "node:util";

const VERSION = "v1.8.0";
const MODULE = "github.com/versity/versitygw/cmd/versitygw";
const CACHE = process.env["AENV_TEST_CACHE"] ?? resolve(import.meta.dirname, "../../../.cache");
const READY_TRIES = 2000;

/** Path of the server's binary; builds it where it is missing (a minute or two). */
export async function ensureS3Server(): Promise<string> {
  const path = join(CACHE, "bin", `versitygw-${VERSION}`);
  if (existsSync(path)) return path;
  const bin = join(CACHE, "bin", `build-${process.pid}`);
  mkdirSync(bin, { recursive: true });
  const env = {
    ...process.env,
    PATH: `${process.env["PATH"] ?? ""}:/usr/local/go/bin:/usr/lib/go/bin`,
    HOME: process.env["HOME"] ?? "/root",
    GOBIN: bin,
    GOFLAGS: "",
    CGO_ENABLED: "0",
  };
  await promisify(execFile)("go", ["install", "-trimpath", "-ldflags=-s -w", `${MODULE}@${VERSION}`], { env });
  renameSync(join(bin, "versitygw"), path);
  rmSync(bin, { recursive: true });
  return path;
}

function freePort(): Promise<number> {
  return new Promise((done, failed) => {
    const probe = createServer();
    probe.on("error", failed);
    probe.listen(0, "127.0.0.1", () => {
      const address = probe.address();
      probe.close(() => done(typeof address === "object" && address ? address.port : 0));
    });
  });
}

export class S3Server implements AsyncDisposable {
  readonly dir: string;
  readonly bucket = "aenv-test";
  readonly port: number;
  readonly #binary: string;
  #child: ChildProcess | undefined;

  private constructor(binary: string, port: number) {
    this.#binary = binary;
    this.port = port;
    this.dir = mkdtempSync(join(tmpdir(), "aenv-s3-"));
    // A folder of the root is a bucket.
    mkdirSync(join(this.dir, "data", this.bucket), { recursive: true });
  }

  /** Also sets the credentials of this process. */
  static async start(): Promise<S3Server> {
    const server = new S3Server(await ensureS3Server(), await freePort());
    process.env["AWS_ACCESS_KEY_ID"] = "aenvtest";
    process.env["AWS_SECRET_ACCESS_KEY"] = "aenvtestsecret";
    await server.up();
    return server;
  }

  address(prefix: string): string {
    return `s3://${this.bucket}/${prefix}?endpoint=http://127.0.0.1:${this.port}`;
  }

  /** Where the server keeps an object. */
  file(key: string): string {
    return join(this.dir, "data", this.bucket, key);
  }

  async up(): Promise<void> {
    const env = { PATH: process.env["PATH"] ?? "", ROOT_ACCESS_KEY: "aenvtest", ROOT_SECRET_KEY: "aenvtestsecret" };
    const args = ["--port", `127.0.0.1:${this.port}`, "--quiet", "posix", join(this.dir, "data")];
    const child = spawn(this.#binary, args, { env, stdio: "ignore" });
    this.#child = child;
    for (let i = 0; i < READY_TRIES; i++) {
      if (child.exitCode !== null) throw new Error(`the S3 server ended with ${child.exitCode}`);
      const answers = await fetch(`http://127.0.0.1:${this.port}/`).then(
        () => true,
        () => false,
      );
      if (answers) return;
      await new Promise((r) => setTimeout(r, 10));
    }
    throw new Error("the S3 server did not become ready");
  }

  /** Kills it in the middle of whatever it does. */
  async down(): Promise<void> {
    const child = this.#child;
    if (!child || child.exitCode !== null || child.signalCode !== null) return;
    const exited = once(child, "exit");
    child.kill("SIGKILL");
    await exited;
    this.#child = undefined;
  }

  /** It accepts connections and answers nothing, until `goOn`. */
  pause(): void {
    this.#child?.kill("SIGSTOP");
  }

  goOn(): void {
    this.#child?.kill("SIGCONT");
  }

  async [Symbol.asyncDispose](): Promise<void> {
    this.goOn();
    await this.down();
    rmSync(this.dir, { recursive: true, force: true });
  }
}
