import { monitorEventLoopDelay } from "node:perf_hooks";
import type { Timing } from "@aenv/contract";
import { collectDefaultMetrics, Gauge, Histogram, Registry } from "prom-client";

/** The histogram holds the time between ticks of a timer of this period: the delay is what is above it. */
const RESOLUTION_MS = 10;
/** Delays are told for the last whole window, so that the start-up is soon forgotten. */
const WINDOW_MS = 60_000;

/** A number that is read when somebody asks. */
export interface Reading {
  name: string;
  help: string;
  /** One label: its closed set of values with their numbers. */
  label?: string;
  read: () => number | Readonly<Record<string, number>>;
}

/** The server's own measurements. One per process: event-loop delay belongs to the process. */
export class ServerMetrics implements Disposable {
  readonly #registry = new Registry();
  readonly #requests: Histogram;
  readonly #delay: ReturnType<typeof monitorEventLoopDelay>;
  readonly #window: NodeJS.Timeout;
  #last: (Timing & { max: number }) | undefined;

  constructor(readings: readonly Reading[] = []) {
    collectDefaultMetrics({ register: this.#registry, prefix: "aenv_" });
    this.#requests = new Histogram({
      name: "aenv_api_request_seconds",
      help: "Time of API requests by route; sandbox traffic is not in it",
      labelNames: ["route", "method", "status"],
      buckets: [0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 10, 60],
      registers: [this.#registry],
    });
    for (const r of readings) this.#addReading(r);
    this.#delay = monitorEventLoopDelay({ resolution: RESOLUTION_MS });
    this.#delay.enable();
    this.#addReading({
      name: "aenv_event_loop_delay_max_ms",
      help: "Longest delay of the event loop in the last whole minute",
      read: () => this.eventLoopDelay().max,
    });
    this.#window = setInterval(() => {
      this.#last = this.#delays();
      this.#delay.reset();
    }, WINDOW_MS).unref();
  }

  #addReading({ name, help, label, read }: Reading): void {
    const gauge: Gauge = new Gauge({
      name,
      help,
      labelNames: label === undefined ? [] : [label],
      registers: [this.#registry],
      collect() {
        const value = read();
        if (typeof value === "number") return gauge.set(value);
        gauge.reset();
        for (const [key, n] of Object.entries(value)) gauge.set({ [label ?? "of"]: key }, n);
      },
    });
  }

  request(route: string, method: string, status: number, ms: number): void {
    this.#requests.observe({ route, method, status: String(status) }, ms / 1000);
  }

  /** Of the last whole minute; in the first minute since the start. */
  eventLoopDelay(): Timing & { max: number } {
    return this.#last ?? this.#delays();
  }

  #delays(): Timing & { max: number } {
    const d = this.#delay;
    const ms = (ns: number): number => Math.max(0, Math.round((ns / 1e6 - RESOLUTION_MS) * 100) / 100);
    return {
      metric: "event_loop_delay",
      unit: "ms",
      n: d.count,
      p50: ms(d.percentile(50)),
      p95: ms(d.percentile(95)),
      p99: ms(d.percentile(99)),
      max: ms(d.max),
    };
  }

  text(): Promise<string> {
    return this.#registry.metrics();
  }

  get contentType(): string {
    return this.#registry.contentType;
  }

  [Symbol.dispose](): void {
    clearInterval(this.#window);
    this.#delay.disable();
    this.#registry.clear();
  }
}
