/** A lone envd on a loopback port of this host, for tests that need no virtual machine. */
import { execFileSync, spawn } from "node:child_process";
import { mkdtempSync, rmSync } from "node:fs";
import { tmpdir } from "node:os";
import { join, resolve } from "node:path";
import { createInterface } from "node:readline";
import { GuestClient, type GuestInit } from "@aenv/guest";
import { Sandbox } from "e2b";

const root = resolve(import.meta.dirname, "../../..");

export interface Envd extends AsyncDisposable {
  url: string;
  port: number;
  /** A folder that is gone afterwards. */
  dir: string;
  client: GuestClient;
  /** The official SDK in its debug mode, which calls no control plane. */
  sandbox(): Promise<Sandbox>;
}

/** What a node tells a sandbox that has no secrets. */
export const initBody: GuestInit = {
  envVars: {},
  accessToken: "",
  timestamp: new Date(0).toISOString(),
  defaultUser: "root",
  defaultWorkdir: "",
  sandboxId: "itest",
  templateId: "ttest",
  hostname: "itest",
  machineId: "0123456789abcdef0123456789abcdef",
  entropy: Buffer.alloc(64, 7).toString("base64"),
  lifecycleID: "r0",
  cause: "create",
};

export async function startEnvd(args: readonly string[] = []): Promise<Envd> {
  execFileSync(process.execPath, [join(root, "tools/src/build-guest.ts")], { stdio: ["ignore", "ignore", "inherit"] });
  const child = spawn(join(root, ".cache/guest/aenv-guest"), ["envd", "--addr", "127.0.0.1:0", ...args], {
    // Not this host's profile and PATH: bash -l must be quick and the same everywhere.
    env: { PATH: "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin" },
    stdio: ["ignore", "ignore", "pipe"],
  });
  const exited = new Promise<void>((done) => child.on("exit", () => done()));
  const port = await new Promise<number>((found, reject) => {
    child.on("error", reject);
    child.on("exit", (code) => reject(new Error(`envd ended with ${code}`)));
    createInterface({ input: child.stderr }).on("line", (line) => {
      const match = /listening on .*:(\d+)$/.exec(line);
      if (match) found(Number(match[1]));
    });
  });
  const url = `http://127.0.0.1:${port}`;
  const dir = mkdtempSync(join(tmpdir(), "aenv-envd-"));
  const client = new GuestClient({ host: "127.0.0.1", port });
  // A login shell must not read the profile of whoever owns this host.
  await client.init({ ...initBody, envVars: { HOME: dir } }, soon());
  return {
    url,
    port,
    dir,
    client,
    sandbox: () => Sandbox.create({ debug: true, sandboxUrl: url }),
    async [Symbol.asyncDispose]() {
      client.close();
      child.kill("SIGKILL");
      await exited;
      rmSync(dir, { recursive: true, force: true });
    },
  };
}

/** Asks until `probe` gives something; the test's own time-out bounds it. */
export async function eventually<T>(probe: () => T | undefined | Promise<T | undefined>): Promise<T> {
  for (;;) {
    const value = await probe();
    if (value !== undefined) return value;
    await new Promise((done) => setTimeout(done, 10));
  }
}

/** A signal for calls that a test makes; long enough to matter only when something hangs. */
export const soon = (): AbortSignal => AbortSignal.timeout(30_000);
