/** The node under test: `npm test` starts one and names it in the environment. */
import assert from "node:assert/strict";
import { spawn } from "node:child_process";
import { existsSync, openSync, readFileSync } from "node:fs";
import { request } from "node:http";
import { join } from "node:path";
import type { TestContext } from "node:test";
import { Sandbox, type SandboxOpts } from "e2b";

function required(name: string): string {
  const value = process.env[name];
  if (!value) throw new Error(`${name} is not set: run these tests with npm test, or export it for a node of yours`);
  return value;
}

const repo = join(import.meta.dirname, "../../..");

export const url = required("AENV_TEST_URL");
export const home = required("AENV_TEST_HOME");
export const apiKey = (JSON.parse(readFileSync(join(home, "auth.json"), "utf8")) as { apiKey: string }).apiKey;

export const connection = { apiKey, apiUrl: url, sandboxUrl: url } as const;

/** What an unmodified client needs in its environment. */
export const clientEnv: Record<string, string> = {
  PATH: process.env["PATH"] ?? "",
  HOME: "/nonexistent",
  E2B_API_KEY: apiKey,
  E2B_API_URL: url,
  E2B_SANDBOX_URL: url,
};

/** A sandbox that is killed when the test ends. */
export async function sandboxFor(t: TestContext, opts: SandboxOpts = {}): Promise<Sandbox> {
  const sandbox = await Sandbox.create({ ...connection, timeoutMs: 120_000, ...opts });
  t.after(() => sandbox.kill());
  return sandbox;
}

export async function api(
  method: string,
  path: string,
  body?: unknown,
  headers: Record<string, string> = {},
): Promise<Response> {
  return fetch(`${url}${path}`, {
    method,
    headers: { "X-API-KEY": apiKey, ...(body === undefined ? {} : { "Content-Type": "application/json" }), ...headers },
    ...(body === undefined ? {} : { body: typeof body === "string" ? body : JSON.stringify(body) }),
  });
}

export interface Answer {
  status: number;
  body: string;
}

/** A plain request to the edge with any Host header, which fetch would not send. */
export function plain(path: string, headers: Record<string, string>, method = "GET", body?: string): Promise<Answer> {
  const { hostname, port } = new URL(url);
  return new Promise((resolve, reject) => {
    const req = request({ hostname, port, path, method, headers, agent: false }, (res) => {
      let text = "";
      res.setEncoding("utf8").on("data", (d: string) => (text += d));
      res.on("end", () => resolve({ status: res.statusCode ?? 0, body: text }));
      res.on("error", reject);
    });
    req.on("error", reject);
    req.end(body);
  });
}

/** A port of a sandbox, named by headers. */
export const byPort = (s: Sandbox, port: number, path = "/", headers: Record<string, string> = {}): Promise<Answer> =>
  plain(path, { "E2b-Sandbox-Id": s.sandboxId, "E2b-Sandbox-Port": String(port), ...headers });

/** Waits until `probe` gives something; the test's own timeout bounds it. */
export async function eventually<T>(probe: () => Promise<T | undefined | false>): Promise<T> {
  for (;;) {
    const value = await probe();
    if (value !== undefined && value !== false) return value;
    await new Promise((resolve) => setTimeout(resolve, 50));
  }
}

/** 0 while none has described itself. */
export function serverPid(): number {
  const file = join(home, "server.json");
  return existsSync(file) ? (JSON.parse(readFileSync(file, "utf8")) as { pid: number }).pid : 0;
}

export async function ownedPid(owner: string): Promise<number> {
  const report = (await (await api("GET", "/v1/doctor")).json()) as {
    resources: { kind: string; name: string; owner: string | null }[];
  };
  const found = report.resources.find((r) => r.kind === "process" && r.owner === owner);
  assert.ok(found, `no process of ${owner}`);
  return Number(found.name);
}

/** With more variables than this process has. Resolves when a server other than `former` has described itself and answers. */
export async function startServer(former: number, env: Record<string, string> = {}): Promise<void> {
  const log = openSync(join(home, "log/server.log"), "a");
  spawn(process.execPath, [join(repo, "apps/server/src/main.ts"), "--home", home], {
    detached: true,
    cwd: "/",
    stdio: ["ignore", log, log],
    env: { ...process.env, ...env },
  }).unref();
  await eventually(async () => {
    const ok = await fetch(`${url}/health`).then(
      (r) => r.ok,
      () => false,
    );
    return ok && ![0, former].includes(serverPid());
  });
}
