import type * as commands from "../commands/network.ts";
import type { Context } from "../context.ts";
import type { Args, Exit } from "../define.ts";

export async function set(args: Args<typeof commands.networkSet>, { out, client }: Context): Promise<Exit> {
  const rules: Record<string, { transform: { headers: Record<string, string> } }[]> = {};
  for (const { domain, name, value } of args.header)
    (rules[domain] ??= []).push({ transform: { headers: { [name]: value } } });
  await (await client()).setNetwork(args.id, {
    ...(args.internet === undefined ? {} : { allow_internet_access: args.internet === "on" }),
    ...(args.allow.length > 0 ? { allowOut: args.allow } : {}),
    ...(args.deny.length > 0 ? { denyOut: args.deny } : {}),
    ...(args.proxy === undefined ? {} : { egressProxy: args.proxy }),
    ...(args.header.length > 0 ? { rules } : {}),
  });
  if (out.json) return out.value({ sandboxID: args.id });
  out.note(`The new rules of ${args.id} hold.`);
}

export async function show(args: Args<typeof commands.networkShow>, { out, client }: Context): Promise<Exit> {
  const { allowInternetAccess = null, network = {} } = await (await client()).get(args.id);
  if (out.json) return out.value({ allowInternetAccess, ...network });
  const { allowOut = [], denyOut = [], rules = {}, egressProxy } = network;
  out.record([
    ["Internet", allowInternetAccess === false ? "off" : "on"],
    ...allowOut.map((entry) => ["Allow", entry] as const),
    ...denyOut.map((entry) => ["Deny", entry] as const),
    ...(egressProxy
      ? [["Proxy", `${egressProxy.username ? `${egressProxy.username}@` : ""}${egressProxy.address}`] as const]
      : []),
    // Values may be secrets, and are for --json.
    ...Object.entries(rules).map(([domain, list]) => ["Headers", `${domain}: ${namesIn(list).join(", ")}`] as const),
    ["Ports", network.allowPublicTraffic === false ? "need the traffic token" : "public"],
  ]);
}

const namesIn = (list: unknown): string[] =>
  (Array.isArray(list) ? list : []).flatMap((rule: { transform?: { headers?: Record<string, string> } }) =>
    Object.keys(rule.transform?.headers ?? {}),
  );
