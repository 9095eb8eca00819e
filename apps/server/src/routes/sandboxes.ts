import { AenvError, messageOf, parseSandboxId } from "@aenv/base";
import { DEFAULT_TIMEOUT_S, type NewSandbox, parseInstant, parseMetadataFilter, type Sandbox } from "@aenv/contract";
import type { ListFilter, SandboxView } from "@aenv/engine";
import { type Call, created, type Handlers, noContent, ok, type Reply } from "../call.ts";
import { createOptions, egressOptions } from "../create-options.ts";
import type { EngineApi, NodeApi } from "../ports.ts";
import { detailOf, listedOf, logsOf, metricOf, sandboxOf, statesBehind } from "../wire.ts";
import { gone, idOf, viewOf } from "./lookup.ts";

export interface RouteDeps {
  engine: EngineApi;
  node: NodeApi;
}

type SandboxRoutes = Pick<
  Handlers,
  | "createSandboxV2"
  | "createSandbox"
  | "listSandboxesV2"
  | "listSandboxes"
  | "getSandbox"
  | "killSandbox"
  | "setSandboxTimeout"
  | "setSandboxNetwork"
  | "refreshSandbox"
  | "connectSandboxV2"
  | "connectSandbox"
  | "sandboxesMetrics"
  | "sandboxMetrics"
  | "sandboxLogs"
>;

export function sandboxRoutes({ engine, node }: RouteDeps): SandboxRoutes {
  const view = (text: string): SandboxView => viewOf(engine, text);

  const create = async (
    version: "v1" | "v2",
    body: NewSandbox,
    { caller, headers, signal }: Pick<Call<never>, "caller" | "headers" | "signal">,
  ): Promise<Reply<201, Sandbox>> => {
    const options = createOptions(version, body, { team: caller.team, headers, features: node.features });
    return created(sandboxOf(await engine.create(options, signal), node.domain));
  };

  const connect = async (
    text: string,
    timeout: number,
    memory: boolean | null | undefined,
    signal: () => AbortSignal,
  ): Promise<Reply<200, Sandbox> | Reply<201, Sandbox>> => {
    const { sandboxId } = view(text);
    const { view: v, resumed } = await engine.connect(sandboxId, timeout * 1000, signal(), {
      memory: memory !== false,
    });
    return resumed ? created(sandboxOf(v, node.domain)) : ok(sandboxOf(v, node.domain));
  };

  return {
    createSandboxV2: (call) => create("v2", call.body, call),
    createSandbox: (call) => create("v1", call.body, call),

    listSandboxesV2: ({ query, caller }) => {
      if (query.template?.includes(":"))
        throw new AenvError("INVALID_ARGUMENT", "the template filter takes an id or alias without a tag");
      const filter: ListFilter = {
        team: caller.team,
        states: statesBehind(query.state?.length ? query.state : ["running", "paused"]),
        ...(query.metadata === undefined ? {} : { metadata: metadataOf(query.metadata) }),
        ...(query.startedAfter === undefined ? {} : { startedAfter: parseInstant("startedAfter", query.startedAfter) }),
        ...(query.template === undefined ? {} : { template: query.template }),
        ...(query.order === undefined ? {} : { order: query.order }),
        ...(query.limit === undefined ? {} : { limit: query.limit }),
        ...(query.nextToken === undefined ? {} : { cursor: query.nextToken }),
      };
      const page = engine.list(filter);
      return ok(page.items.map(listedOf), {
        "x-total-running": String(page.totalRunning),
        ...(page.next === undefined ? {} : { "x-next-token": page.next }),
      });
    },

    listSandboxes: ({ query, caller }) => {
      const filter: ListFilter = {
        team: caller.team,
        states: statesBehind(["running"]),
        ...(query.metadata === undefined ? {} : { metadata: metadataOf(query.metadata) }),
      };
      const items: SandboxView[] = [];
      let next: string | undefined;
      do {
        const page = engine.list(next === undefined ? filter : { ...filter, cursor: next });
        items.push(...page.items);
        next = page.next;
      } while (next !== undefined);
      return ok(items.map(listedOf));
    },

    getSandbox: ({ params }) => ok(detailOf(view(params.sandboxID), node.domain)),

    killSandbox: async ({ params }) => {
      if (!(await engine.kill(idOf(params.sandboxID)))) throw gone(params.sandboxID);
      return noContent();
    },

    setSandboxTimeout: async ({ params, body }) => {
      await engine.setTimeout(view(params.sandboxID).sandboxId, Math.max(0, body.timeout) * 1000);
      return noContent();
    },

    setSandboxNetwork: async ({ params, body }) => {
      await engine.setNetwork(view(params.sandboxID).sandboxId, egressOptions(body, node.features));
      return noContent();
    },

    refreshSandbox: async ({ params, body }) => {
      await engine.extend(view(params.sandboxID).sandboxId, (body.duration ?? DEFAULT_TIMEOUT_S.refresh) * 1000);
      return noContent();
    },

    connectSandboxV2: (call) =>
      connect(
        call.params.sandboxID,
        call.body.timeout ?? DEFAULT_TIMEOUT_S.connect,
        call.body.memory,
        () => call.signal,
      ),
    connectSandbox: (call) => connect(call.params.sandboxID, call.body.timeout, call.body.memory, () => call.signal),

    sandboxesMetrics: ({ query }) => {
      const ids = query.sandbox_ids.flatMap((text) => {
        try {
          return [parseSandboxId(text)];
        } catch {
          return [];
        }
      });
      const found = [...engine.latestMetrics(ids)].map(([id, m]) => [id, metricOf(m)] as const);
      return ok({ sandboxes: Object.fromEntries(found) });
    },

    sandboxMetrics: ({ params, query }) => {
      const { sandboxId } = view(params.sandboxID);
      const samples = engine.metrics(sandboxId, {
        ...(query.start === undefined ? {} : { start: query.start * 1000 }),
        // The whole of the last second belongs to the window.
        ...(query.end === undefined ? {} : { end: query.end * 1000 + 999 }),
      });
      return ok(samples.map(metricOf));
    },

    sandboxLogs: ({ params, query }) => {
      const { sandboxId } = view(params.sandboxID);
      return ok(logsOf(engine.logs(sandboxId, { ...definedOnly(query) })));
    },
  };
}

function metadataOf(text: string): Record<string, string> {
  try {
    return Object.fromEntries(parseMetadataFilter(text));
  } catch (e) {
    throw e instanceof AenvError ? e : new AenvError("INVALID_ARGUMENT", messageOf(e));
  }
}

function definedOnly(query: { start?: number | undefined; limit?: number | undefined }): {
  start?: number;
  limit?: number;
} {
  return {
    ...(query.start === undefined ? {} : { start: query.start }),
    ...(query.limit === undefined ? {} : { limit: query.limit }),
  };
}
