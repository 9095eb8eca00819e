import { z } from "zod";
import { route } from "./route.ts";
import { LogLevel, SandboxLogsV2 } from "./schemas/sandboxes.ts";
import { LifecycleEvent, MaxTeamMetric, NewWebhook, TeamMetric, Webhook, WebhookChange } from "./schemas/watch.ts";

const interval = {
  start: z.int().min(0).optional().describe("Unix seconds; default: an hour before the end."),
  end: z.int().min(0).optional().describe("Unix seconds; default: now."),
};
const eventPage = z.object({
  offset: z.int().min(0).max(100_000).optional().describe("How many to leave out; default 0."),
  limit: z.int().min(1).max(100).optional().describe("1 to 100, default 10."),
  orderAsc: z.boolean().optional().describe("Oldest first; default newest first."),
});

/** What happened and what happens: logs, events, who is told of them, a team's numbers. */
export const WATCH_ROUTES = {
  sandboxLogsV2: route({
    method: "GET",
    path: "/v2/sandboxes/{sandboxID}/logs",
    auth: "key",
    tag: "Sandboxes",
    summary: "Events of one sandbox, page by page",
    query: z.object({
      cursor: z
        .int()
        .min(0)
        .optional()
        .describe("Unix milliseconds, inclusive: forward from it on, backward up to it."),
      limit: z.int().min(1).max(1000).optional().describe("1 to 1000, default 1000."),
      direction: z.enum(["forward", "backward"]).optional().describe("Default forward, oldest first."),
      level: LogLevel.optional().describe("The least level."),
      search: z.string().max(1024).optional().describe("A part of the message; case counts."),
      nextToken: z.string().optional().describe("X-Next-Token of the page before: exact where a cursor is not."),
    }),
    success: {
      200: {
        description: "In the order of the direction.",
        schema: SandboxLogsV2,
        headers: { "X-Next-Token": "Send it as nextToken for the next page; absent on the last page." },
      },
    },
    errors: ["INVALID_ARGUMENT", "NOT_FOUND"],
  }),
  teamMetrics: route({
    method: "GET",
    path: "/teams/{teamID}/metrics",
    auth: "key",
    tag: "Account",
    summary: "Sandboxes of your team over time",
    query: z.object(interval),
    success: { 200: { description: "Oldest first; of the last day.", schema: z.array(TeamMetric) } },
    errors: ["INVALID_ARGUMENT", "PERMISSION_DENIED"],
  }),
  maxTeamMetric: route({
    method: "GET",
    path: "/teams/{teamID}/metrics/max",
    auth: "key",
    tag: "Account",
    summary: "The highest number of sandboxes, or of creates, of your team",
    query: z.object({ ...interval, metric: z.enum(["concurrent_sandboxes", "sandbox_start_rate"]) }),
    success: { 200: { description: "When it was, and how high.", schema: MaxTeamMetric } },
    errors: ["INVALID_ARGUMENT", "PERMISSION_DENIED"],
  }),
  listEvents: route({
    method: "GET",
    path: "/events/sandboxes",
    auth: "key",
    tag: "Events",
    summary: "What happened to the sandboxes of your team",
    query: eventPage,
    success: { 200: { description: "One page; events are kept for a day.", schema: z.array(LifecycleEvent) } },
    errors: ["INVALID_ARGUMENT"],
  }),
  listSandboxEvents: route({
    method: "GET",
    path: "/events/sandboxes/{sandboxID}",
    auth: "key",
    tag: "Events",
    summary: "What happened to one sandbox",
    query: eventPage,
    success: { 200: { description: "One page; also of a sandbox that has ended.", schema: z.array(LifecycleEvent) } },
    errors: ["INVALID_ARGUMENT"],
  }),
  createWebhook: route({
    method: "POST",
    path: "/events/webhooks",
    auth: "key",
    tag: "Events",
    summary: "Be told of events",
    description:
      "Each event is sent at least once, in order, with the headers e2b-webhook-id, e2b-delivery-id, e2b-signature-version and e2b-signature. An answer other than 2xx, or none within 10 seconds, is tried again for an hour.",
    body: NewWebhook,
    example: {
      name: "my service",
      url: "https://service.example/sandbox-events",
      events: ["sandbox.lifecycle.killed"],
      signatureSecret: "at least 16 characters",
    },
    success: { 201: { description: "It is told of what happens from now on.", schema: Webhook } },
    errors: ["INVALID_ARGUMENT", "CONFLICT"],
  }),
  listWebhooks: route({
    method: "GET",
    path: "/events/webhooks",
    auth: "key",
    tag: "Events",
    summary: "List webhooks",
    success: { 200: { description: "Oldest first, without their secrets.", schema: z.array(Webhook) } },
    errors: [],
  }),
  getWebhook: route({
    method: "GET",
    path: "/events/webhooks/{webhookID}",
    auth: "key",
    tag: "Events",
    summary: "Read one webhook",
    success: { 200: { description: "The webhook, without its secret.", schema: Webhook } },
    errors: ["NOT_FOUND"],
  }),
  changeWebhook: route({
    method: "PATCH",
    path: "/events/webhooks/{webhookID}",
    auth: "key",
    tag: "Events",
    summary: "Change a webhook",
    description: "One that is enabled again is told of what happens from then on.",
    body: WebhookChange,
    example: { enabled: false },
    success: { 200: { description: "The webhook as it is now.", schema: Webhook } },
    errors: ["INVALID_ARGUMENT", "NOT_FOUND"],
  }),
  deleteWebhook: route({
    method: "DELETE",
    path: "/events/webhooks/{webhookID}",
    auth: "key",
    tag: "Events",
    summary: "Delete a webhook",
    success: { 200: { description: "It is told of nothing more." } },
    errors: ["NOT_FOUND"],
  }),
} as const;
