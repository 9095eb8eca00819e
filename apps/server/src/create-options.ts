import type { IncomingHttpHeaders } from "node:http";
import { AenvError } from "@aenv/base";
import { DEFAULT_TIMEOUT_S, type NetworkConfig, type NewSandbox, type SandboxNetworkUpdate } from "@aenv/contract";
import type { CreateOptions, EgressOptions, NetworkRules } from "@aenv/engine";
import { ENVD_PORT } from "@aenv/proxy";
import type { Features } from "./ports.ts";

const lacking = (what: string, hint: string): AenvError =>
  new AenvError("INVALID_ARGUMENT", `this node cannot give what ${what} asks for`, { hint });

/**
 * Refuses every option that the node would have to ignore and that changes what the sandbox is or may do. Options that
 * ask for nothing (false, null, empty) pass: SDKs send them by default.
 */
function refuseLacking(body: NewSandbox, features: Features): void {
  if (body.autoPause && !features.pause)
    throw lacking("autoPause", "Leave autoPause out: the sandbox is then killed at the end of its time.");
  if (body.autoResume?.enabled && !features.pause) throw lacking("autoResume", "Leave autoResume out.");
  if (body.allow_internet_access === false && !features.internetOff)
    throw lacking("allow_internet_access: false", "Leave it out: sandboxes of this version reach the internet.");
  if (Object.keys(body.mcp ?? {}).length > 0) throw lacking("mcp", "Start the MCP server in the sandbox by a command.");
  if (Object.keys(body.iam?.tokens ?? {}).length > 0) throw lacking("iam.tokens", "Hand tokens over as envVars.");
  if ((body.volumeMounts ?? []).length > 0) throw lacking("volumeMounts", "Write files into the sandbox instead.");
  if (body.network) refuseNetwork(body.network, features);
}

function refuseNetwork(network: NetworkConfig, features: Features): void {
  refuseEgress("network.", network, features);
  if (network.allowPublicTraffic === false && !features.privateTraffic)
    throw lacking("network.allowPublicTraffic: false", "Leave it out: every port of the sandbox is then public.");
}

type Egress = Pick<NetworkConfig, "allowOut" | "denyOut" | "rules" | "egressProxy">;

function refuseEgress(prefix: string, egress: Egress, features: Features): void {
  for (const name of ["allowOut", "denyOut"] as const) {
    if (!features.egressRules && (egress[name] ?? []).length > 0)
      throw lacking(`${prefix}${name}`, "Leave it out: this version has no network rules.");
  }
  if (egress.egressProxy && !features.egressRules) throw lacking(`${prefix}egressProxy`, "Set a proxy by envVars.");
  if (Object.keys(egress.rules ?? {}).length > 0 && !features.egressRules)
    throw lacking(`${prefix}rules`, "Leave it out.");
}

const rulesOf = ({ allowOut, denyOut, rules, egressProxy }: Egress): NetworkRules => ({
  ...(allowOut?.length ? { allowOut } : {}),
  ...(denyOut?.length ? { denyOut } : {}),
  ...(rules && Object.keys(rules).length > 0 ? { rules: transformsOf(rules) } : {}),
  ...(egressProxy
    ? {
        egressProxy: {
          address: egressProxy.address,
          username: egressProxy.username ?? null,
          password: egressProxy.password ?? null,
        },
      }
    : {}),
});

/** What this version knows of each rule. */
const transformsOf = (rules: NonNullable<Egress["rules"]>): NonNullable<NetworkRules["rules"]> =>
  Object.fromEntries(
    Object.entries(rules).map(([domain, list]) => [
      domain,
      list.map(({ transform }) => (transform?.headers ? { transform: { headers: transform.headers } } : {})),
    ]),
  );
function ingressOf({ maskRequestHost, httpsPorts }: NetworkConfig): Pick<CreateOptions, "ingress"> {
  if (maskRequestHost) checkMask(maskRequestHost);
  if (httpsPorts?.includes(ENVD_PORT))
    throw new AenvError(
      "INVALID_ARGUMENT",
      `network.httpsPorts must not have ${ENVD_PORT}, the port of the sandbox's agent`,
      {
        hint: "Leave it out of the list.",
      },
    );
  const ingress = {
    ...(maskRequestHost ? { maskRequestHost } : {}),
    ...(httpsPorts?.length ? { httpsPorts: [...new Set(httpsPorts)] } : {}),
  };
  return Object.keys(ingress).length > 0 ? { ingress } : {};
}

function checkMask(mask: string): void {
  if (/^[A-Za-z0-9._-]{1,253}(:[0-9]{1,5})?$/.test(mask.replaceAll("${PORT}", "1"))) return;
  throw new AenvError("INVALID_ARGUMENT", "network.maskRequestHost is not a host name, or one with a port", {
    hint: "Write it like example.com or localhost:${PORT}; ${PORT} stands for the port in the sandbox.",
  });
}

/** From a checked body of PUT /sandboxes/{id}/network. */
export function egressOptions(body: SandboxNetworkUpdate, features: Features): EgressOptions {
  if (body.allow_internet_access === false && !features.internetOff)
    throw lacking("allow_internet_access: false", "Leave it out: sandboxes of this version reach the internet.");
  refuseEgress("", body, features);
  return { allowInternetAccess: body.allow_internet_access ?? null, ...rulesOf(body) };
}

/** From a checked body of either version to what the engine takes. */
export function createOptions(
  version: "v1" | "v2",
  body: NewSandbox,
  context: { team: string; headers: IncomingHttpHeaders; features: Features },
): CreateOptions {
  refuseLacking(body, context.features);
  if (body.autoPause && body.autoPauseMemory === false && body.autoResume?.enabled)
    throw new AenvError("INVALID_ARGUMENT", "autoResume needs the memory that autoPauseMemory: false throws away", {
      hint: "Leave one of the two out.",
    });
  const key = idempotencyKey(context.headers["idempotency-key"]);
  return {
    template: body.templateID,
    team: context.team,
    timeoutMs: (body.timeout ?? DEFAULT_TIMEOUT_S[version]) * 1000,
    metadata: body.metadata ?? {},
    envVars: body.envVars ?? {},
    secure: version === "v2" || body.secure !== false,
    autoPause: body.autoPause === true,
    autoPauseMemory: body.autoPauseMemory !== false,
    autoResume: body.autoResume?.enabled === true,
    allowInternetAccess: body.allow_internet_access ?? null,
    ...(body.network ? { network: rulesOf(body.network) } : {}),
    allowPublicTraffic: body.network?.allowPublicTraffic !== false,
    ...ingressOf(body.network ?? {}),
    ...(key === undefined ? {} : { idempotencyKey: key }),
  };
}

function idempotencyKey(header: string | string[] | undefined): string | undefined {
  if (header === undefined) return undefined;
  if (typeof header !== "string" || !/^[\x21-\x7e]{1,255}$/.test(header))
    throw new AenvError("INVALID_ARGUMENT", "Idempotency-Key is not 1 to 255 visible ASCII characters");
  return header;
}
