import { mkdtempSync, rmSync } from "node:fs";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { AenvError, type Clock, silentLogger, systemClock } from "@aenv/base";
import { State } from "@aenv/state";
import type { FastifyInstance } from "fastify";
import { type AppDeps, buildApp } from "../src/app.ts";
import { allHandlers } from "../src/handlers.ts";
import { ServerMetrics } from "../src/metrics.ts";
import type { NodeApi } from "../src/ports.ts";
import { FakeEngine } from "./fake-engine.ts";

export interface FakeServer extends AsyncDisposable {
  app: FastifyInstance;
  engine: FakeEngine;
  state: State;
  node: NodeApi;
  /** `METHOD /path/:param` of everything that answers. */
  mounted: readonly string[];
  /** A key that opens the API. */
  key: string;
}

/** Stands still until `ms` is changed. */
export class ManualClock implements Clock {
  ms = Date.parse("2026-01-31T12:00:00.000Z");
  now(): number {
    return this.ms;
  }
  mono(): number {
    return this.ms;
  }
  after(): () => void {
    return () => {};
  }
}

/** The whole API over an engine without machines. */
export function fakeServer(
  options: {
    clock?: Clock;
    features?: Partial<NodeApi["features"]>;
    forkLimit?: number;
    server?: AppDeps["server"];
  } = {},
): FakeServer {
  const clock = options.clock ?? systemClock;
  const folder = mkdtempSync(join(tmpdir(), "aenv-fake-"));
  const engine = new FakeEngine(clock);
  const state = State.open(join(folder, "state.db"), clock);
  const { key } = state.keys.create("default", "first");
  const metrics = new ServerMetrics();
  const node: NodeApi = {
    version: "0.0.0-fake",
    instance: "fa4e",
    domain: "localhost:8000",
    forkLimit: options.forkLimit ?? 16,
    features: { pause: true, internetOff: false, egressRules: false, privateTraffic: true, ...options.features },
    facts: () => ({
      vmm: "fake",
      vmmVersion: "0",
      accel: "none",
      accelReason: "there are no machines",
      envdVersion: "0.6.13",
      base: { state: "ready" },
    }),
    timings: () => [],
    operations: () => [],
    doctor: () =>
      Promise.resolve({
        ok: true,
        checks: [{ name: "fake", ok: true, detail: "nothing to check" }],
        resources: [{ kind: "process", name: "1", owner: "sandbox ifakx" }],
      }),
  };
  const handlers = allHandlers({ engine, node, keys: state, metrics });
  const mounted: string[] = [];
  const app = buildApp({
    handlers,
    keys: state,
    logger: silentLogger,
    metrics,
    onRoute: (r) => mounted.push(r),
    ...(options.server ? { server: options.server } : {}),
  });
  return {
    app,
    engine,
    state,
    node,
    mounted,
    key,
    async [Symbol.asyncDispose]() {
      await app.close();
      metrics[Symbol.dispose]();
      state.close();
      rmSync(folder, { recursive: true, force: true });
    },
  };
}

/** `node apps/server/test/fake-server.ts PORT`: for clients under development. Prints its URL and key as JSON. FAKE_FAIL_CHILDREN=0,2 are no children of any fork. */
if (import.meta.main) {
  const server = fakeServer({ features: { internetOff: true, egressRules: true } });
  for (const n of (process.env["FAKE_FAIL_CHILDREN"] ?? "").split(",").filter((text) => text !== ""))
    server.engine.failChild.set(Number(n), new AenvError("SLOT_EXHAUSTED", "no network slot is free"));
  const apiUrl = await server.app.listen({ port: Number(process.argv[2] ?? 0), host: "127.0.0.1" });
  process.once("SIGTERM", () => void server[Symbol.asyncDispose]().then(() => process.exit(0)));
  console.log(JSON.stringify({ apiUrl, apiKey: server.key }));
}
