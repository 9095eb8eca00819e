import { readFile } from "node:fs/promises";
import { join } from "node:path";
import { AenvError, errnoOf } from "@aenv/base";
import { z } from "zod";

export type Credentials = { username: string; password: string } | { identityToken: string };

const MAX_FILE_BYTES = 4 * 1024 * 1024;
/** Docker's own registry goes by these names in such files. */
const DOCKER_KEYS = ["docker.io", "index.docker.io", "registry-1.docker.io"];
const DOCKER_HOSTS = new Set(DOCKER_KEYS);

const fileSchema = z.object({
  auths: z
    .record(
      z.string(),
      z.object({
        auth: z.string().optional(),
        username: z.string().optional(),
        password: z.string().optional(),
        identitytoken: z.string().optional(),
      }),
    )
    .optional(),
});

/** Where the usual tools keep credentials, in the order in which they are looked through. */
export function credentialFiles(env: NodeJS.ProcessEnv): string[] {
  const home = env["HOME"];
  return [
    env["REGISTRY_AUTH_FILE"],
    env["DOCKER_CONFIG"] === undefined ? undefined : join(env["DOCKER_CONFIG"], "config.json"),
    env["XDG_RUNTIME_DIR"] === undefined ? undefined : join(env["XDG_RUNTIME_DIR"], "containers/auth.json"),
    home === undefined ? undefined : join(home, ".docker/config.json"),
  ].filter((p) => p !== undefined && p !== "") as string[];
}

/** Credentials for a repository, of the most exact entry of the first file that has one. */
export async function findCredentials(
  host: string,
  repository: string,
  files: readonly string[],
): Promise<Credentials | undefined> {
  for (const path of files) {
    const found = await inFile(host, repository, path);
    if (found) return found;
  }
  return undefined;
}

async function inFile(host: string, repository: string, path: string): Promise<Credentials | undefined> {
  let text: string;
  try {
    text = await readFile(path, "utf8");
  } catch (e) {
    if (errnoOf(e) === "ENOENT" || errnoOf(e) === "ENOTDIR") return undefined;
    throw AenvError.from(e, `reading ${path}`);
  }
  const wrong = (e?: unknown): AenvError =>
    new AenvError("INVALID_ARGUMENT", `${path} is not a file of registry credentials`, {
      cause: e,
      hint: "Correct or remove it; docker login and podman login write such files.",
    });
  if (text.length > MAX_FILE_BYTES) throw wrong();
  let json: unknown;
  try {
    json = JSON.parse(text);
  } catch (e) {
    throw wrong(e);
  }
  const parsed = fileSchema.safeParse(json);
  if (!parsed.success) throw wrong(parsed.error);
  const entries = new Map(Object.entries(parsed.data.auths ?? {}).map(([k, v]) => [bare(k), v]));
  const hosts = DOCKER_HOSTS.has(host) ? DOCKER_KEYS : [host];
  const parts = repository.split("/");
  for (let n = parts.length; n >= 0; n--) {
    for (const h of hosts) {
      const entry = entries.get([h, ...parts.slice(0, n)].join("/"));
      if (!entry) continue;
      if (entry.identitytoken) return { identityToken: entry.identitytoken };
      if (entry.username !== undefined && entry.password !== undefined) {
        return { username: entry.username, password: entry.password };
      }
      const [username, ...password] = Buffer.from(entry.auth ?? "", "base64")
        .toString("utf8")
        .split(":");
      if (username && password.length > 0) return { username, password: password.join(":").replace(/\0+$/, "") };
    }
  }
  return undefined;
}

/** `https://index.docker.io/v1/` and the like. */
function bare(key: string): string {
  return key
    .replace(/^https?:\/\//, "")
    .replace(/\/v[12]\/?$/, "")
    .replace(/\/+$/, "");
}
