import { readFileSync } from "node:fs";
import { AenvError } from "@aenv/base";
import type { version as command } from "../commands/node.ts";
import type { Context } from "../context.ts";
import type { Args, Exit } from "../define.ts";

export function cliVersion(): string {
  const manifest: unknown = JSON.parse(readFileSync(new URL("../../package.json", import.meta.url), "utf8"));
  return (manifest as { version: string }).version;
}

export async function version(args: Args<typeof command>, { out, settings }: Context): Promise<Exit> {
  const aenv = cliVersion();
  const node = args.client ? undefined : await nodeVersion(settings().apiUrl.value);
  if (out.json) return out.value({ aenv, node: node ?? null, apiUrl: settings().apiUrl.value });
  out.line(`aenv ${aenv}`);
  if (!args.client) out.line(`node ${node ?? "not reachable"} (${settings().apiUrl.value})`);
}

async function nodeVersion(apiUrl: string): Promise<string | undefined> {
  const { AenvClient } = await import("@aenv/client");
  using client = new AenvClient({ apiUrl, timeoutMs: 2000 });
  try {
    return (await client.health()).version;
  } catch (e) {
    if (e instanceof AenvError) return undefined;
    throw e;
  }
}
