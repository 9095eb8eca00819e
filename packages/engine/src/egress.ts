/** What a sandbox may reach: from its record to the slot of the run that it lives in. */
import { type EgressPolicy, egressPolicy, needsGateway } from "@aenv/network";
import type { SandboxRecord } from "@aenv/state";
import type { Context } from "./context.ts";
import type { VmRun } from "./run.ts";
import type { EgressOptions } from "./types.ts";

type Rules = Pick<SandboxRecord, "allowInternetAccess" | "network">;

const policyOf = ({ allowInternetAccess, network }: Rules): EgressPolicy =>
  egressPolicy({ allowInternet: allowInternetAccess, ...network });

/** The fields of a record for these options. INVALID_ARGUMENT when they mean nothing. */
export function egressRules({ allowInternetAccess, allowOut, denyOut, egressProxy }: EgressOptions): Required<Rules> {
  const rules: Required<Rules> = {
    allowInternetAccess: allowInternetAccess ?? null,
    network: {
      ...(allowOut?.length ? { allowOut: [...allowOut] } : {}),
      ...(denyOut?.length ? { denyOut: [...denyOut] } : {}),
      ...(egressProxy ? { egressProxy: { ...egressProxy } } : {}),
    },
  };
  policyOf(rules);
  return rules;
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
