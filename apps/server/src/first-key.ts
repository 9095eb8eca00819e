import { readFile } from "node:fs/promises";
import { join } from "node:path";
import { publishFile } from "@aenv/host";
import { DEFAULT_TEAM } from "@aenv/state";
import type { KeyStore } from "./auth.ts";

/** `auth.json` of the data folder holds a key that works; only the node's owner can read it. */
export async function ensureFirstKey(home: string, { keys }: KeyStore): Promise<"kept" | "made"> {
  const path = join(home, "auth.json");
  const text = await readFile(path, "utf8").catch(() => "{}");
  if (keys.verify(apiKeyIn(text)) !== undefined) return "kept";
  const { key } = keys.create(DEFAULT_TEAM, "first");
  await publishFile(path, `${JSON.stringify({ apiKey: key })}\n`, 0o600);
  return "made";
}

function apiKeyIn(text: string): string {
  try {
    const { apiKey } = JSON.parse(text) as { apiKey?: unknown };
    return typeof apiKey === "string" ? apiKey : "";
  } catch {
    return "";
  }
}
