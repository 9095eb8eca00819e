import { AenvError, parseSandboxId, type SandboxId } from "@aenv/base";
import { DEFAULT_TIMEOUT_S, type SandboxForkResult } from "@aenv/contract";
import type { ForkResult, SandboxView, SnapshotFilter } from "@aenv/engine";
import { created, type Handlers, noContent, ok } from "../call.ts";
import { wireError } from "../errors.ts";
import { checkpointOf, lineageOf, sandboxOf, seenState, snapshotOf } from "../wire.ts";
import { viewOf } from "./lookup.ts";
import type { RouteDeps } from "./sandboxes.ts";

type StateRoutes = Pick<
  Handlers,
  | "pauseSandbox"
  | "resumeSandbox"
  | "forkSandbox"
  | "createSnapshot"
  | "listSnapshots"
  | "createCheckpoint"
  | "listCheckpoints"
  | "rewindSandbox"
  | "sandboxLineage"
>;

export function stateRoutes({ engine, node }: RouteDeps): StateRoutes {
  const view = (text: string): SandboxView => viewOf(engine, text);
  const forked = (r: ForkResult): SandboxForkResult =>
    "view" in r ? { sandbox: sandboxOf(r.view, node.domain) } : { error: wireError(r.error).body };

  return {
    pauseSandbox: async ({ params, body, signal }) => {
      const { sandboxId } = view(params.sandboxID);
      let paused: boolean;
      try {
        const options = { memory: body.memory !== false, requireHealthyGuest: body.requireHealthyGuest === true };
        paused = await engine.pause(sandboxId, options, signal);
      } catch (e) {
        // To the SDKs each 409 says that it is paused already.
        if (e instanceof AenvError && e.code === "IN_TRANSITION")
          throw new AenvError("UNAVAILABLE", e.message, { cause: e, hint: "Retry in a moment." });
        throw e;
      }
      if (!paused)
        throw new AenvError("CONFLICT", `sandbox ${sandboxId} is paused already`, {
          hint: "Connect to it to resume it.",
        });
      return noContent();
    },

    resumeSandbox: async ({ params, body, signal }) => {
      const { sandboxId, state } = view(params.sandboxID);
      const runs = (): AenvError =>
        new AenvError("CONFLICT", `sandbox ${sandboxId} runs already`, { hint: "Connect to it to extend its time." });
      if (state === "running") throw runs();
      const { view: v, resumed } = await engine.connect(
        sandboxId,
        (body.timeout ?? DEFAULT_TIMEOUT_S.resume) * 1000,
        signal,
        {
          memory: body.memory !== false,
          ...(typeof body.autoPause === "boolean" ? { autoPause: body.autoPause } : {}),
        },
      );
      if (!resumed) throw runs();
      return created(sandboxOf(v, node.domain));
    },

    forkSandbox: async ({ params, body, signal }) => {
      const { sandboxId } = view(params.sandboxID);
      const count = body.count ?? 1;
      if (count > node.forkLimit)
        throw new AenvError("INVALID_ARGUMENT", `this node makes at most ${node.forkLimit} children of one fork`, {
          hint: "Fork several times, or set AENV_FORK_LIMIT (at most 100) and start the node again.",
        });
      const results = await engine.fork(
        sandboxId,
        { count, timeoutMs: (body.timeout ?? DEFAULT_TIMEOUT_S.fork) * 1000, atomic: body.atomic === true },
        signal,
      );
      return created(results.map(forked));
    },

    createSnapshot: async ({ params, body, caller, signal }) => {
      const { sandboxId } = view(params.sandboxID);
      const name = body.name ?? undefined;
      const owner = name?.includes("/") ? name.slice(0, name.indexOf("/")) : caller.team;
      if (owner !== caller.team)
        throw new AenvError("PERMISSION_DENIED", `a snapshot of team ${owner} needs a key of that team`, {
          hint: `Leave the team out, or write ${caller.team}/.`,
        });
      const options = { team: caller.team, memory: body.memory !== false, ...(name === undefined ? {} : { name }) };
      return created(snapshotOf(await engine.snapshot(sandboxId, options, signal)));
    },

    listSnapshots: ({ query, caller }) => {
      const sandboxId = query.sandboxID === undefined ? undefined : possibleId(query.sandboxID);
      if (sandboxId === null) return ok([]);
      const filter: SnapshotFilter = {
        team: caller.team,
        ...(sandboxId === undefined ? {} : { sandboxId }),
        ...(query.name === undefined ? {} : { name: query.name }),
        ...(query.limit === undefined ? {} : { limit: query.limit }),
        ...(query.nextToken === undefined ? {} : { cursor: query.nextToken }),
      };
      const { items, next } = engine.listSnapshots(filter);
      return ok(items.map(snapshotOf), next === undefined ? {} : { "x-next-token": next });
    },

    createCheckpoint: async ({ params, body, signal }) => {
      const { sandboxId } = view(params.sandboxID);
      const options = typeof body.name === "string" ? { name: body.name } : {};
      return created(checkpointOf(await engine.checkpoint(sandboxId, options, signal)));
    },

    listCheckpoints: async ({ params }) =>
      ok((await engine.listCheckpoints(view(params.sandboxID).sandboxId)).map(checkpointOf)),

    rewindSandbox: async ({ params, body, signal }) => {
      const v = view(params.sandboxID);
      const timeout = body.timeout ?? (seenState(v) === "paused" ? DEFAULT_TIMEOUT_S.connect : undefined);
      const options = timeout === undefined ? {} : { timeoutMs: timeout * 1000 };
      return ok(sandboxOf(await engine.rewind(v.sandboxId, body.checkpoint, options, signal), node.domain));
    },

    sandboxLineage: async ({ params }) => ok(lineageOf(await engine.lineage(view(params.sandboxID).sandboxId))),
  };
}

/** null: no sandbox can have it. */
function possibleId(text: string): SandboxId | null {
  try {
    return parseSandboxId(text);
  } catch {
    return null;
  }
}
