/** What a sandbox may reach: from its record to the slot of the run that it lives in. */
import { AenvError } from "@aenv/base";
import { type EgressPolicy, egressPolicy, needsGateway } from "@aenv/network";
import type { NetworkRecord, SandboxRecord } from "@aenv/state";
import type { Context } from "./context.ts";
import type { VmRun } from "./run.ts";
import type { EgressOptions } from "./types.ts";

type Rules = Pick<SandboxRecord, "allowInternetAccess" | "network">;

function policyOf({ allowInternetAccess, network }: Rules): EgressPolicy {
  const policy = egressPolicy({ allowInternet: allowInternetAccess, ...network });
  return policy.transforms && network?.authority ? { ...policy, authority: network.authority } : policy;
}

/**
 * The fields of a record for these options. INVALID_ARGUMENT when they mean nothing. A sandbox keeps its authority from
 * the first transform to its end: its guest trusts it.
 */
export function egressRules(
  { makeAuthority }: Pick<Context, "makeAuthority">,
  { allowInternetAccess, allowOut, denyOut, rules, egressProxy }: EgressOptions,
  before?: NetworkRecord,
): Required<Rules> {
  const found: Required<Rules> = {
    allowInternetAccess: allowInternetAccess ?? null,
    network: {
      ...(allowOut?.length ? { allowOut: [...allowOut] } : {}),
      ...(denyOut?.length ? { denyOut: [...denyOut] } : {}),
      ...(rules && Object.keys(rules).length > 0
        ? { rules: structuredClone(rules) as NetworkRecord["rules"] & {} }
        : {}),
      ...(egressProxy ? { egressProxy: { ...egressProxy } } : {}),
      ...(before?.authority ? { authority: before.authority } : {}),
    },
  };
  const policy = policyOf(found);
  if (policy.transforms && !found.network.authority) {
    if (!makeAuthority)
      throw new AenvError("INVALID_ARGUMENT", "this node has no network.rules", { hint: "Leave them out." });
    found.network.authority = makeAuthority("AgentENV sandbox egress");
  }
  return found;
}

/** A new slot is open already. */
export function isOpen(rules: Rules): boolean {
  const policy = policyOf(rules);
  return policy.allowInternet && !policy.deny?.length && !needsGateway(policy);
}

/** Replaces whatever rules the run's slot has. */
export async function setEgress(ctx: Context, run: VmRun, rules: Rules): Promise<void> {
  await ctx.network.setPolicy(run.slot, policyOf(rules));
}
