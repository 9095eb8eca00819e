import { AenvError, deadline, messageOf } from "@aenv/base";
import type { HooksRequest } from "@aenv/guest";
import type { Context } from "./context.ts";
import type { VmRun } from "./run.ts";
import type { Sandbox } from "./sandbox.ts";

/** An agent under emulation on a busy machine; a few ms alone. */
const ANSWER_MS = 20_000;
/** The guest gives the hooks of a phase 20 s together. */
const HOOKS_DEADLINE_MS = 45_000;

/**
 * The programs that a guest keeps for this moment. One that fails, or a guest that does not answer, is an event of the
 * sandbox and keeps nothing from happening. False: the guest's agent did not answer.
 */
export async function runHooks(
  ctx: Context,
  run: VmRun,
  { id, record }: Pick<Sandbox, "id" | "record">,
  request: HooksRequest,
  parent: AbortSignal,
): Promise<boolean> {
  const { phase } = request;
  const note = (message: string, fields: Record<string, unknown>): void => {
    ctx.logger.warn({ sandbox: id, run: run.id, ...fields }, message);
    ctx.state.tx(() =>
      ctx.state.events.add(id, { timestamp: ctx.clock.now(), level: "warn", message, fields: { phase, ...fields } }),
    );
  };
  const options = { answerMs: ANSWER_MS, ...(record.secure ? { token: ctx.tokens.access(id) } : {}) };
  try {
    for (const hook of await run.guest.hooks(request, options, deadline(HOOKS_DEADLINE_MS, parent)))
      if (hook.exitCode !== 0 || hook.error !== undefined) note(`the hook ${phase}.d/${hook.name} failed`, { ...hook });
    return true;
  } catch (e) {
    parent.throwIfAborted();
    // An agent that was captured before there were hooks.
    if (e instanceof AenvError && e.code === "NOT_FOUND") return true;
    note(`the hooks of ${phase}.d were not run`, { error: messageOf(e) });
    return false;
  }
}
