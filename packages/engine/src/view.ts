import type { NetworkRecord } from "@aenv/state";
import type { Sandbox } from "./sandbox.ts";
import { sizes } from "./templates.ts";
import type { NetworkRules, SandboxView, VisibleState } from "./types.ts";

/** What callers see of a sandbox. `state` stands in for the one it is about to have. */
export function viewOf(
  sandbox: Sandbox,
  state: VisibleState | undefined,
  tokens: { access: string; traffic: string },
): SandboxView {
  const { record, template, snapshot } = sandbox;
  return {
    sandboxId: record.id,
    templateId: record.template,
    ...(record.alias === undefined ? {} : { alias: record.alias }),
    name: template.name,
    state: state ?? (record.state === "gone" ? "killing" : record.state),
    startedAt: record.startedAt,
    endAt: record.endAt,
    ...sizes(snapshot),
    metadata: record.metadata,
    envdVersion: snapshot.envdVersion,
    ...(record.secure ? { envdAccessToken: tokens.access } : {}),
    ...(record.allowPublicTraffic ? {} : { trafficAccessToken: tokens.traffic }),
    lifecycle: { onTimeout: record.onTimeout, autoResume: record.autoResume },
    allowInternetAccess: record.allowInternetAccess,
    network: rulesOf(record.network ?? {}),
    ...(record.ingress === undefined ? {} : { ingress: record.ingress }),
  };
}

/** As they were given: the authority's key is nobody's business. */
function rulesOf(record: NetworkRecord): NetworkRules {
  const rules = { ...record };
  delete rules.authority;
  return rules;
}
