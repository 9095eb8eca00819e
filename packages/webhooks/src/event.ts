import type { LifecycleEvent, LifecycleType } from "@aenv/contract";
import { LIFECYCLE, type LifecycleRecord } from "@aenv/state";

const TYPES: Readonly<Record<string, LifecycleType>> = {
  [LIFECYCLE.created]: "sandbox.lifecycle.created",
  [LIFECYCLE.paused]: "sandbox.lifecycle.paused",
  [LIFECYCLE.resumed]: "sandbox.lifecycle.resumed",
  [LIFECYCLE.updated]: "sandbox.lifecycle.updated",
  [LIFECYCLE.checkpointed]: "sandbox.lifecycle.checkpointed",
  [LIFECYCLE.killed]: "sandbox.lifecycle.killed",
  [LIFECYCLE.died]: "sandbox.lifecycle.killed",
};

/** What the log of a sandbox calls the events that outsiders are told of. */
export const LIFECYCLE_MESSAGES: readonly string[] = Object.keys(TYPES);

/** As outsiders see it. */
export function eventOf(r: LifecycleRecord): LifecycleEvent {
  const type = TYPES[r.message];
  if (type === undefined) throw new RangeError(`${r.message} is no lifecycle event`);
  const { run: _run, ...said } = r.fields;
  return {
    version: "v1",
    id: String(r.id),
    type,
    timestamp: new Date(r.timestamp).toISOString(),
    sandboxId: r.sandbox,
    sandboxExecutionId: r.run ?? null,
    sandboxTemplateId: r.template,
    sandboxBuildId: r.snapshot,
    sandboxTeamId: r.team,
    eventData: { ...said, sandbox_metadata: r.metadata },
  };
}
