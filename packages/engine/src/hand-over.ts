import type { Context } from "./context.ts";
import { isOpen, setEgress } from "./egress.ts";
import { runHooks } from "./hooks.ts";
import { type Identity, initRun } from "./launch.ts";
import type { Phases } from "./phases.ts";
import type { VmRun } from "./run.ts";
import type { Sandbox } from "./sandbox.ts";

/** The run becomes this sandbox's: in the journal first, then in the network, then in the guest. */
export async function handOver(
  ctx: Context,
  run: VmRun,
  sandbox: Pick<Sandbox, "id" | "record" | "snapshot">,
  why: Pick<Identity, "cause" | "fork">,
  limitMs: number,
  phases: Phases,
  signal: AbortSignal,
): Promise<void> {
  const { record, snapshot } = sandbox;
  ctx.state.tx(() => run.assign(sandbox.id));
  await ctx.step("assign:after");
  if (!isOpen(record)) await phases.time("policy", () => setEgress(ctx, run, record));
  const identity: Identity = {
    sandboxId: sandbox.id,
    templateId: record.template,
    envVars: record.envVars,
    accessToken: record.secure ? ctx.tokens.access(sandbox.id) : "",
    currentToken: ctx.tokens.captured(snapshot),
    defaults: snapshot.defaults,
    ...(record.network?.authority ? { caBundle: record.network.authority.cert } : {}),
    ...why,
  };
  // One that is hot has answered before.
  const turn = phases.source === "hot" ? undefined : await phases.time("init-queue", () => ctx.inits.acquire(signal));
  let hooks: boolean;
  try {
    ({ hooks } = await phases.time("init", () => initRun(ctx, run, identity, limitMs, signal)));
  } finally {
    turn?.[Symbol.dispose]();
  }
  if (!hooks) return;
  const { cause, fork } = why;
  const request = { cause, ...(fork ? { forkIndex: fork.index, seed: fork.seed } : {}) };
  const phase = cause === "fork" ? ("post-fork" as const) : ("post-resume" as const);
  await phases.time("hooks", () => runHooks(ctx, run, sandbox, { phase, ...request }, signal));
}
