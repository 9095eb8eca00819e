import type { IncomingHttpHeaders } from "node:http";
import { availableParallelism } from "node:os";
import { openApiDocument } from "@aenv/contract";
import { type Handlers, ok } from "../call.ts";
import { docsPage } from "../docs-page.ts";
import type { ServerMetrics } from "../metrics.ts";
import type { RouteDeps } from "./sandboxes.ts";

type NodeRoutes = Pick<Handlers, "health" | "node" | "operations" | "doctor" | "nodeMetrics" | "openapi" | "docs">;

/** Scripts and outside resources are off: the page holds text that came from us alone, and stays that way. */
const PAGE_HEADERS = {
  "content-type": "text/html; charset=utf-8",
  "content-security-policy": "default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'",
};

/** As the reader wrote it in the address bar, so that what the page shows can be copied and run. */
function baseUrlOf(headers: IncomingHttpHeaders, domain: string): string {
  const { host } = headers;
  const scheme = headers["x-forwarded-proto"] === "https" ? "https" : "http";
  return `${scheme}://${host !== undefined && /^[A-Za-z0-9.-]+(:\d+)?$|^\[[0-9a-fA-F:.]+\](:\d+)?$/.test(host) ? host : domain}`;
}

export function nodeRoutes({ engine, node, metrics }: RouteDeps & { metrics: ServerMetrics }): NodeRoutes {
  let document: string | undefined;
  let page: ReturnType<typeof docsPage> | undefined;

  return {
    health: () => ok({ status: "ok" as const, version: node.version }),

    node: () => {
      const count = engine.count();
      const pools: Record<string, number> = {};
      for (const p of engine.pools()) {
        const name = p.template ?? p.snapshotId;
        pools[`${name}.hot`] = p.hot;
        pools[`${name}.prepared`] = p.prepared;
        pools[`${name}.refilling`] = p.refilling;
      }
      return ok({
        version: node.version,
        instance: node.instance,
        domain: node.domain,
        uptimeSeconds: Math.round(process.uptime()),
        cpuCount: availableParallelism(),
        residentBytes: process.memoryUsage.rss(),
        // As the list tells it.
        sandboxes: { running: count.running + count.resuming + count.rewinding, paused: count.paused + count.pausing },
        pools,
        ...node.facts(),
        timings: [metrics.eventLoopDelay(), ...node.timings()],
      });
    },

    operations: ({ query }) => ok({ operations: node.operations(query.after ?? 0) }),

    doctor: async ({ signal }) => ok(await node.doctor(signal)),
    nodeMetrics: async () => ok(await metrics.text(), { "content-type": metrics.contentType }),
    openapi: () => {
      document ??= JSON.stringify(openApiDocument({ version: node.version }));
      return ok(document, { "content-type": "application/json; charset=utf-8" });
    },
    docs: ({ headers }) => {
      page ??= docsPage({ version: node.version });
      return ok(page({ baseUrl: baseUrlOf(headers, node.domain), domain: node.domain }), PAGE_HEADERS);
    },
  };
}
