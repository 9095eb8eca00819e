import { rmSync } from "node:fs";
import { AenvError } from "@aenv/base";
import type * as commands from "../commands/node.ts";
import { type Context, requireKey } from "../context.ts";
import type { Args, Exit } from "../define.ts";
import { askSecret, readAll } from "../prompt.ts";
import { configPath, saveSettings } from "../settings.ts";
import { tlsVariables } from "./trust.ts";

const masked = (key: string): string =>
  key.length <= 12 ? "*".repeat(key.length) : `${key.slice(0, 8)}…${key.slice(-4)}`;

export async function show(args: Args<typeof commands.authShow>, { out, settings }: Context): Promise<Exit> {
  const s = settings();
  const key = s.apiKey && (args.reveal ? s.apiKey.value : masked(s.apiKey.value));
  if (out.json)
    return out.value({
      apiUrl: s.apiUrl,
      sandboxUrl: s.sandboxUrl,
      apiKey: s.apiKey === undefined ? null : { value: key, source: s.apiKey.source },
    });
  out.record([
    ["API URL", `${s.apiUrl.value}  (${s.apiUrl.source})`],
    ["Sandbox URL", `${s.sandboxUrl.value}  (${s.sandboxUrl.source})`],
    ["API key", s.apiKey === undefined ? "none" : `${key}  (${s.apiKey.source})`],
  ]);
  if (s.apiKey === undefined) requireKey(s);
}

export async function login(
  args: Args<typeof commands.authLogin>,
  { out, settings, flags, env }: Context,
): Promise<Exit> {
  const { apiUrl } = settings();
  const typed = async (): Promise<string> =>
    process.stdin.isTTY ? await askSecret("API key: ") : (await readAll(process.stdin)).trim();
  const apiKey = flags.apiKey ?? (await typed());
  if (apiKey === "") throw new AenvError("INVALID_ARGUMENT", "No key was given", { hint: "Paste it, or pipe it in." });
  if (!args.unchecked) {
    const { AenvClient } = await import("@aenv/client");
    using client = new AenvClient({ apiUrl: apiUrl.value, apiKey });
    await client.node();
  }
  const path = saveSettings({ apiUrl: apiUrl.value, sandboxUrl: flags.sandboxUrl, apiKey }, env);
  if (out.json) return out.value({ path, apiUrl: apiUrl.value });
  out.note(`Saved in ${path}.`);
}

export async function logout(_args: Args<typeof commands.authLogout>, { out, env }: Context): Promise<Exit> {
  const path = configPath(env);
  rmSync(path, { force: true });
  if (out.json) return out.value({ path });
  out.note(`Deleted ${path}.`);
}

export async function env(args: Args<typeof commands.env>, context: Context): Promise<Exit> {
  const { out, settings } = context;
  const s = settings();
  const E2B_API_KEY = requireKey(s);
  const values = args.tls
    ? { E2B_API_KEY, ...(await tlsVariables(context)) }
    : { E2B_API_KEY, E2B_API_URL: s.apiUrl.value, E2B_SANDBOX_URL: s.sandboxUrl.value };
  if (out.json) return out.value(values);
  const fish = args.shell === "fish";
  for (const [name, value] of Object.entries(values))
    out.line(fish ? `set -gx ${name} ${quoteFish(value)}` : `export ${name}=${quoteSh(value)}`);
  // They would win over the domain.
  if (args.tls) out.line(fish ? "set -e E2B_API_URL E2B_SANDBOX_URL" : "unset E2B_API_URL E2B_SANDBOX_URL");
}

const PLAIN = /^[A-Za-z0-9_./:@%+=-]+$/;
const quoteSh = (text: string): string => (PLAIN.test(text) ? text : `'${text.replaceAll("'", "'\\''")}'`);
const quoteFish = (text: string): string => (PLAIN.test(text) ? text : `'${text.replace(/[\\']/g, "\\$&")}'`);
