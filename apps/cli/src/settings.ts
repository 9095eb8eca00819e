import { mkdirSync, readFileSync, renameSync, writeFileSync } from "node:fs";
import { homedir } from "node:os";
import { dirname, join } from "node:path";
import { AenvError, errnoOf } from "@aenv/base";
import { aenvHome } from "@aenv/host";

type Env = Readonly<Record<string, string | undefined>>;

export interface Flags {
  apiUrl?: string | undefined;
  sandboxUrl?: string | undefined;
  apiKey?: string | undefined;
}

type Key = "apiUrl" | "sandboxUrl" | "apiKey";

export interface Setting {
  value: string;
  /** Where it came from, for people. */
  source: string;
}

export type Settings = Record<"apiUrl" | "sandboxUrl", Setting> & { apiKey: Setting | undefined };

const DEFAULT_URL = "http://127.0.0.1:8000";
const VARIABLES: Record<Key, readonly string[]> = {
  apiUrl: ["AENV_API_URL", "E2B_API_URL"],
  sandboxUrl: ["AENV_SANDBOX_URL", "E2B_SANDBOX_URL"],
  apiKey: ["AENV_API_KEY", "E2B_API_KEY"],
};
const FLAGS: Record<Key, string> = { apiUrl: "--api-url", sandboxUrl: "--sandbox-url", apiKey: "--api-key" };

export function configPath(env: Env): string {
  const base = env["XDG_CONFIG_HOME"] || join(env["HOME"] || homedir(), ".config");
  return join(base, "aenv", "config.json");
}

/** Flag, then environment, then `aenv auth login`, then the node on this machine. */
export function resolveSettings(flags: Flags, env: Env): Settings {
  let saved: Source | undefined;
  let local: Source | undefined;
  const find = (key: Key): Setting | undefined => {
    const flag = flags[key];
    if (flag) return { value: flag, source: FLAGS[key] };
    for (const name of VARIABLES[key]) {
      const value = env[name];
      if (value) return { value, source: name };
    }
    saved ??= readSource(configPath(env));
    if (saved.values[key]) return { value: saved.values[key], source: saved.path };
    local ??= readLocal(env);
    if (local.values[key]) return { value: local.values[key], source: local.path };
    return undefined;
  };
  const apiUrl = find("apiUrl") ?? { value: DEFAULT_URL, source: "default" };
  const sandboxUrl = find("sandboxUrl") ?? { value: apiUrl.value, source: "the API URL" };
  return { apiUrl, sandboxUrl, apiKey: find("apiKey") };
}

interface Source {
  path: string;
  values: Partial<Record<Key, string>>;
}

/** The node on this machine: where it listens, and its own first key where this user may read it. */
function readLocal(env: Env): Source {
  const home = aenvHome({ ...env });
  const local = readSource(join(home, "auth.json"));
  const config = readJson(join(home, "config.json"));
  const port = readJson(join(home, "server.json"))?.["port"] ?? config?.["port"];
  const listen = config?.["listen"];
  const everywhere = typeof listen !== "string" || listen === "0.0.0.0" || listen === "::";
  const host = everywhere ? "127.0.0.1" : listen.includes(":") ? `[${listen}]` : listen;
  if (typeof port === "number" && port > 0) {
    local.values.apiUrl ??= `http://${host}:${port}`;
    local.path = home;
  }
  return local;
}

function readSource(path: string): Source {
  const json = readJson(path) ?? {};
  const values: Source["values"] = {};
  for (const key of ["apiUrl", "sandboxUrl", "apiKey"] as const)
    if (typeof json[key] === "string" && json[key] !== "") values[key] = json[key];
  return { path, values };
}

function readJson(path: string): Record<string, unknown> | undefined {
  let text: string;
  try {
    text = readFileSync(path, "utf8");
  } catch (e) {
    const code = errnoOf(e);
    if (code === "ENOENT" || code === "EACCES" || code === "ENOTDIR") return undefined;
    throw AenvError.from(e, `read ${path}`);
  }
  try {
    const json: unknown = JSON.parse(text);
    if (typeof json === "object" && json !== null) return json as Record<string, unknown>;
  } catch {
    // Reported below.
  }
  throw new AenvError("CORRUPT", `${path} is not a JSON object`, {
    hint: `Correct it, or delete it and log in again.`,
  });
}

/** Replaces the saved settings; only the user can read the file. */
export function saveSettings(values: Record<Key, string | undefined>, env: Env): string {
  const path = configPath(env);
  try {
    mkdirSync(dirname(path), { recursive: true, mode: 0o700 });
    const temporary = `${path}.${process.pid}`;
    writeFileSync(temporary, `${JSON.stringify(values, undefined, 2)}\n`, { mode: 0o600 });
    renameSync(temporary, path);
  } catch (e) {
    throw AenvError.from(e, `write ${path}`);
  }
  return path;
}
