import { deadline, messageOf, type SandboxId, Semaphore } from "@aenv/base";
import type { Context } from "./context.ts";
import { Deadlines } from "./expiry.ts";
import type { GuestPort } from "./ports.ts";
import type { Sandbox } from "./sandbox.ts";
import type { MetricSample } from "./types.ts";

/** One sample; a guest that is slower misses it. */
const SAMPLE_DEADLINE_MS = 2000;
const PRUNE_EVERY_MS = 60_000;
/** Rows deleted in one statement: a few milliseconds. */
const PRUNE_ROWS = 2000;
/** Events of a sandbox, its idempotency keys and its record are kept so long after its end. */
const HISTORY_MS = 24 * 60 * 60 * 1000;

interface Watched {
  sandbox: Sandbox;
  makeGuest: () => GuestPort;
  guest: GuestPort | undefined;
}

/** Asks every running guest for its metrics, each at its own time, few at once, and keeps a bounded history. */
export class Sampler {
  readonly #ctx: Context;
  readonly #due: Deadlines<SandboxId>;
  readonly #turns: Semaphore;
  readonly #watched = new Map<SandboxId, Watched>();
  readonly #latest = new Map<SandboxId, MetricSample>();
  #cancelPrune: (() => void) | undefined;
  #closed = false;

  constructor(ctx: Context) {
    this.#ctx = ctx;
    this.#turns = new Semaphore(ctx.config.metrics.concurrency);
    this.#due = new Deadlines(ctx.clock, (id) => ctx.tasks.spawn("sample", (signal) => this.#sample(id, signal)));
    this.#armPrune();
  }

  /** The client is made when the first sample is due. */
  watch(sandbox: Sandbox, makeGuest: () => GuestPort): void {
    this.#watched.set(sandbox.id, { sandbox, makeGuest, guest: undefined });
    this.#due.set(sandbox.id, this.#ctx.clock.now() + this.#ctx.config.metrics.intervalMs);
  }

  unwatch(id: SandboxId): void {
    this.#due.delete(id);
    this.#watched.get(id)?.guest?.close();
    this.#watched.delete(id);
    this.#latest.delete(id);
  }

  latest(id: SandboxId): MetricSample | undefined {
    return this.#latest.get(id);
  }

  close(): void {
    this.#closed = true;
    this.#cancelPrune?.();
    this.#due.close();
    for (const id of this.#watched.keys()) this.unwatch(id);
  }

  async #sample(id: SandboxId, signal: AbortSignal): Promise<void> {
    const entry = this.#watched.get(id);
    if (!entry || this.#closed) return;
    // The next time does not depend on how long this one takes.
    this.#due.set(id, this.#ctx.clock.now() + this.#ctx.config.metrics.intervalMs);
    using _turn = await this.#turns.acquire(signal);
    if (this.#watched.get(id) !== entry || !entry.sandbox.run) return;
    entry.guest ??= entry.makeGuest();
    try {
      const got = await entry.guest.metrics(deadline(SAMPLE_DEADLINE_MS, signal));
      if (this.#watched.get(id) !== entry) return;
      const sample: MetricSample = {
        timestamp: this.#ctx.clock.now(),
        cpuCount: got.cpu_count,
        cpuUsedPct: got.cpu_used_pct,
        memUsed: got.mem_used,
        memTotal: got.mem_total,
        memCache: got.mem_cache,
        diskUsed: got.disk_used,
        diskTotal: got.disk_total,
      };
      this.#latest.set(id, sample);
      this.#ctx.state.samples.add(id, sample);
    } catch (e) {
      if (!signal.aborted) this.#ctx.logger.debug({ sandbox: id, error: messageOf(e) }, "no metrics sample");
    }
  }

  #armPrune(): void {
    this.#cancelPrune = this.#ctx.clock.after(PRUNE_EVERY_MS, () => {
      try {
        this.#prune();
      } catch (e) {
        this.#ctx.logger.warn({ error: messageOf(e) }, "old records were not deleted");
      }
      if (!this.#closed) this.#armPrune();
    });
  }

  #prune(): void {
    const { state, clock, config } = this.#ctx;
    const old = clock.now() - HISTORY_MS;
    state.samples.prune(clock.now() - config.metrics.keepMs, config.metrics.keepRows, PRUNE_ROWS);
    state.events.prune(old, PRUNE_ROWS);
    state.idempotency.prune(old, PRUNE_ROWS);
    state.sandboxes.pruneEnded(old, PRUNE_ROWS);
    state.keepRoom();
  }
}
