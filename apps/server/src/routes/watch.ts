/** Logs by page, events, webhooks and a team's numbers. */
import { AenvError } from "@aenv/base";
import { LIFECYCLE_TYPES, type MaxTeamMetric, type TeamMetric } from "@aenv/contract";
import type { State } from "@aenv/state";
import { eventOf, LIFECYCLE_MESSAGES } from "@aenv/webhooks";
import { type Call, created, type Handlers, noContent, ok } from "../call.ts";
import type { EngineApi } from "../ports.ts";
import { logEntryOf, webhookOf } from "../wire.ts";
import { idOf } from "./lookup.ts";

export type WatchState = Pick<State, "samples" | "events" | "webhooks">;

type WatchRoutes = Pick<
  Handlers,
  | "sandboxLogsV2"
  | "teamMetrics"
  | "maxTeamMetric"
  | "listEvents"
  | "listSandboxEvents"
  | "createWebhook"
  | "listWebhooks"
  | "getWebhook"
  | "changeWebhook"
  | "deleteWebhook"
>;

const LEVELS = ["debug", "info", "warn", "error"] as const;
const LOG_LIMIT = 1000;
const EVENT_LIMIT = 10;
const WEBHOOKS_PER_TEAM = 20;
const HOUR_S = 3600;
const DAY_S = 24 * HOUR_S;
/** Above the time between samples, so that every sandbox that runs has one in each step. */
const STEP_MS = 10_000;
const POINTS = 300;

interface Interval {
  start?: number | undefined;
  end?: number | undefined;
}

export function watchRoutes(engine: EngineApi, state: WatchState): WatchRoutes {
  const { samples, events, webhooks } = state;

  const activity = (call: Pick<Call<never>, "caller"> & { params: { teamID: string } }, { start, end }: Interval) => {
    const { team } = call.caller;
    if (call.params.teamID !== team)
      throw new AenvError("PERMISSION_DENIED", "the key belongs to another team", {
        hint: "GET /teams tells the team of a key.",
      });
    const to = end ?? Math.floor(Date.now() / 1000);
    const from = Math.max(start ?? to - HOUR_S, to - DAY_S);
    if (from > to) throw new AenvError("INVALID_ARGUMENT", "start is after end");
    return { from, to, steps: samples.perTeam(team, from * 1000, to * 1000 + 999, STEP_MS) };
  };

  const lifecycle: (
    call: Pick<Call<never>, "caller"> & {
      query: { offset?: number | undefined; limit?: number | undefined; orderAsc?: boolean | undefined };
    },
    sandboxID?: string,
  ) => ReturnType<typeof eventOf>[] = ({ caller, query }, sandboxID) =>
    events
      .lifecycle(caller.team, LIFECYCLE_MESSAGES, {
        ...(sandboxID === undefined ? {} : { sandbox: idOf(sandboxID) }),
        skip: query.offset ?? 0,
        limit: query.limit ?? EVENT_LIMIT,
        newestFirst: query.orderAsc !== true,
      })
      .map(eventOf);

  return {
    sandboxLogsV2: ({ params, query }) => {
      const limit = query.limit ?? LOG_LIMIT;
      const page = engine.logPage(idOf(params.sandboxID), {
        limit,
        backward: query.direction === "backward",
        ...(query.cursor === undefined ? {} : { cursor: query.cursor }),
        ...(query.nextToken === undefined ? {} : { after: eventNumber(query.nextToken) }),
        ...(query.level === undefined ? {} : { levels: LEVELS.slice(LEVELS.indexOf(query.level)) }),
        ...(query.search === undefined ? {} : { search: query.search }),
      });
      return ok(
        { logs: page.entries.map(logEntryOf) },
        page.next === undefined ? undefined : { "x-next-token": String(page.next) },
      );
    },

    teamMetrics: (call) => {
      const { from, to, steps } = activity(call, call.query);
      return ok(pointsOf(from, to, steps));
    },

    maxTeamMetric: (call) => {
      const { to, steps } = activity(call, call.query);
      const running = call.query.metric === "concurrent_sandboxes";
      let best: MaxTeamMetric = { ...instant(to * 1000), value: 0 };
      for (const s of steps) {
        const value = running ? s.running : s.started / (STEP_MS / 1000);
        if (value > best.value) best = { ...instant(s.at), value };
      }
      return ok(best);
    },

    listEvents: (call) => ok(lifecycle(call)),
    listSandboxEvents: (call) => ok(lifecycle(call, call.params.sandboxID)),

    createWebhook: ({ caller, body }) => {
      if (webhooks.list(caller.team).length >= WEBHOOKS_PER_TEAM)
        throw new AenvError("CONFLICT", `a team has at most ${WEBHOOKS_PER_TEAM} webhooks`, {
          hint: "Delete one: DELETE /events/webhooks/{webhookID}.",
        });
      const { name, url, signatureSecret: secret, enabled = true } = body;
      const told = events.latest();
      return created(
        webhookOf(
          webhooks.create(caller.team, { name, url, secret, enabled, told, events: body.events ?? LIFECYCLE_TYPES }),
        ),
      );
    },

    listWebhooks: ({ caller }) => ok(webhooks.list(caller.team).map(webhookOf)),

    getWebhook: ({ caller, params }) => {
      const found = webhooks.get(caller.team, params.webhookID);
      if (!found) throw noWebhook(params.webhookID);
      return ok(webhookOf(found));
    },

    changeWebhook: ({ caller, params, body }) => {
      const before = webhooks.get(caller.team, params.webhookID);
      const again = before?.enabled === false && body.enabled === true;
      const changed = webhooks.change(caller.team, params.webhookID, {
        ...(body.name === undefined ? {} : { name: body.name }),
        ...(body.url === undefined ? {} : { url: body.url }),
        ...(body.enabled === undefined ? {} : { enabled: body.enabled }),
        ...(body.events === undefined ? {} : { events: body.events }),
        ...(body.signatureSecret === undefined ? {} : { secret: body.signatureSecret }),
        ...(again ? { told: events.latest() } : {}),
      });
      if (!changed) throw noWebhook(params.webhookID);
      return ok(webhookOf(changed));
    },

    deleteWebhook: ({ caller, params }) => {
      if (!webhooks.remove(caller.team, params.webhookID)) throw noWebhook(params.webhookID);
      return { ...noContent(), status: 200 };
    },
  };
}

const noWebhook = (id: string): AenvError =>
  new AenvError("NOT_FOUND", `there is no webhook ${JSON.stringify(id.slice(0, 64))}`);

const instant = (ms: number): { timestamp: string; timestampUnix: number } => ({
  timestamp: new Date(ms).toISOString(),
  timestampUnix: Math.floor(ms / 1000),
});

function eventNumber(token: string): number {
  if (/^[0-9]{1,15}$/.test(token)) return Number(token);
  throw new AenvError("INVALID_ARGUMENT", "nextToken is not one that this server gave out; start again without it");
}

/** At most POINTS of equal distance over the whole interval; times without sandboxes are there, with zeros. */
function pointsOf(
  from: number,
  to: number,
  steps: readonly { at: number; running: number; started: number }[],
): TeamMetric[] {
  const stepMs = Math.max(1, Math.ceil(((to - from + 1) * 1000) / STEP_MS / POINTS)) * STEP_MS;
  const first = Math.floor((from * 1000) / stepMs) * stepMs;
  const points = new Map<number, { running: number; started: number }>();
  for (let at = first; at <= to * 1000; at += stepMs) points.set(at, { running: 0, started: 0 });
  for (const s of steps) {
    const point = points.get(Math.floor(s.at / stepMs) * stepMs);
    if (!point) continue;
    point.running = Math.max(point.running, s.running);
    point.started += s.started;
  }
  return [...points].map(([at, p]) => ({
    ...instant(at),
    concurrentSandboxes: p.running,
    sandboxStartRate: p.started / (stepMs / 1000),
  }));
}
