import { AenvError, deadline, messageOf, Semaphore, type SnapshotId } from "@aenv/base";
import type { SnapshotRecord } from "@aenv/state";
import type { Watermarks } from "./config.ts";
import type { Context } from "./context.ts";
import { damageOf } from "./damage.ts";
import { isDiskLow } from "./disk-reserve.ts";
import { bootRun, moveRun, prepareRun, primeRun, startRun } from "./launch.ts";
import { canBecome, current, fits, hasMemory, holdFiles } from "./memory-stack.ts";
import { Phases } from "./phases.ts";
import { SnapshotPool, type SpareKind } from "./pool.ts";
import { settleAll, type VmRun, WARMING_CPU_WEIGHT } from "./run.ts";
import type { PoolStatus } from "./types.ts";

/** blockd is asked for its epoch so often: a waiting VMM does not survive its restart. */
const EPOCH_CHECK_MS = 1000;
/** Idle hot spares are asked for their health so often. */
const HEALTH_CHECK_MS = 30_000;
const HEALTH_DEADLINE_MS = 3000;
const PING_DEADLINE_MS = 2000;

/** Spares of all hot snapshots under one memory budget; refilled in the background, never in the way of a caller. */
export class Pools {
  readonly #ctx: Context;
  readonly #pools = new Map<SnapshotId, SnapshotPool>();
  readonly #launches: Semaphore;
  #refilling = 0;
  #epoch: string | undefined;
  #lastHealth = 0;
  #cancelTick: (() => void) | undefined;
  #closed = false;

  constructor(ctx: Context) {
    this.#ctx = ctx;
    this.#launches = new Semaphore(ctx.config.launchConcurrency);
    this.#lastHealth = ctx.clock.mono();
    this.#arm();
  }

  status(): PoolStatus[] {
    return [...this.#pools.values()].map((p) => ({
      snapshotId: p.snapshot.id,
      ...(p.name === undefined ? {} : { template: p.name }),
      hot: p.spares.hot.length,
      prepared: p.spares.prepared.length,
      refilling: p.making.hot + p.making.prepared,
      wantHot: p.want.hot,
      wantPrepared: p.want.prepared,
      ...(p.lastError === undefined ? {} : { lastError: p.lastError }),
    }));
  }

  /** From now on this snapshot is kept warm. */
  warm(snapshot: SnapshotRecord, name: string | undefined): void {
    this.#pool(snapshot, name);
    this.refill();
  }

  /** An idle spare that runs, or undefined. */
  takeHot(snapshot: SnapshotRecord, name: string | undefined): VmRun | undefined {
    if (!hasMemory(snapshot)) return undefined;
    const pool = this.#pool(snapshot, name);
    pool.lastUsed = this.#ctx.clock.mono();
    const run = pool.pop("hot");
    if (!run) pool.grow("hot");
    return run;
  }

  /** A VM that was just started for the caller, from a waiting VMM where there is one. */
  async launch(
    snapshot: SnapshotRecord,
    name: string | undefined,
    phases: Phases,
    signal: AbortSignal,
  ): Promise<VmRun> {
    if (!hasMemory(snapshot)) return await this.launchAlone(snapshot, phases, signal);
    const pool = this.#pool(snapshot, name);
    try {
      return await this.#launch(snapshot, pool, phases, signal);
    } catch (e) {
      // Damaged files stay damaged: the doctor shall know, too.
      if (e instanceof AenvError && e.code === "CORRUPT") pool.lastError = e;
      throw e;
    }
  }

  /**
   * The same without spares of its own, for a state that is launched once or all at once: those of another snapshot on
   * the same memory file serve it. A snapshot without memory is booted.
   */
  async launchAlone(snapshot: SnapshotRecord, phases: Phases, signal: AbortSignal): Promise<VmRun> {
    if (hasMemory(snapshot)) return await this.#launch(snapshot, this.#pools.get(snapshot.id), phases, signal);
    using _turn = await phases.time("queue", () => this.#launches.acquire(signal));
    phases.source = "cold";
    return await this.#evicting(() => bootRun(this.#ctx, snapshot, phases, signal));
  }

  async #launch(
    asked: SnapshotRecord,
    own: SnapshotPool | undefined,
    phases: Phases,
    signal: AbortSignal,
  ): Promise<VmRun> {
    using _turn = await phases.time("queue", () => this.#launches.acquire(signal));
    const snapshot = current(this.#ctx, asked);
    using _files = holdFiles(this.#ctx, snapshot);
    try {
      const ready = await this.#startPrepared(snapshot, own, phases, signal);
      if (ready) return ready;
      phases.source = "cold";
      const run = await this.#prepare(snapshot, phases, signal);
      return await this.#start(run, snapshot, phases, signal);
    } catch (e) {
      if (signal.aborted) throw e;
      throw (await damageOf(snapshot)) ?? AenvError.from(e, "launch");
    } finally {
      this.#ctx.launched(snapshot, phases.counts["injected"] ?? 0);
      this.refill();
    }
  }

  /** Undefined where no VMM waits that fits, or the one that did failed. */
  async #startPrepared(
    snapshot: SnapshotRecord,
    own: SnapshotPool | undefined,
    phases: Phases,
    signal: AbortSignal,
  ): Promise<VmRun | undefined> {
    const pools = [...(own ? [own] : []), ...[...this.#pools.values()].filter((p) => p !== own)];
    const serves = (run: VmRun): boolean => run.snapshot === snapshot.id || canBecome(run, snapshot);
    if (pools.some((p) => p.spares.prepared.some(serves))) await this.#checkEpoch(signal);
    let run: VmRun | undefined;
    for (const pool of pools) run ??= pool.takePrepared(serves);
    if (!run) {
      (own ?? pools.find((p) => fits(p.snapshot, snapshot)))?.grow("prepared");
      return undefined;
    }
    try {
      phases.source = "prepared";
      return await this.#orRelease(run, async () => {
        await settleAll([
          phases.time("weight", () => run.fullSpeed()),
          run.snapshot === snapshot.id ? Promise.resolve() : moveRun(this.#ctx, run, snapshot, phases, signal),
        ]);
        return await this.#start(run, snapshot, phases, signal);
      });
    } catch (e) {
      signal.throwIfAborted();
      this.#ctx.logger.warn({ run: run.id, error: messageOf(e) }, "a waiting VMM failed; starting another");
      return undefined;
    }
  }

  /** Ends all spares of a snapshot for good. */
  async drop(id: SnapshotId): Promise<void> {
    const pool = this.#pools.get(id);
    if (!pool) return;
    pool.closed = true;
    this.#pools.delete(id);
    await Promise.all(pool.takeAll().map((run) => run.release()));
  }

  /** Starts what is missing as far as concurrency and memory allow. Cheap; called after every change. */
  refill(): void {
    while (!this.#closed && this.#refilling < this.#ctx.config.pool.refillConcurrency) {
      const next = this.#next();
      if (!next) return;
      const { pool, kind } = next;
      this.#refilling++;
      pool.making[kind]++;
      this.#ctx.tasks.spawn("refill", async (signal) => {
        try {
          await this.#make(pool, kind, signal);
        } finally {
          pool.making[kind]--;
          this.#refilling--;
          if (!signal.aborted) this.refill();
        }
      });
    }
  }

  /** No refills any more; all spares end. */
  async close(): Promise<void> {
    this.#closed = true;
    this.#cancelTick?.();
    await Promise.all([...this.#pools.keys()].map((id) => this.drop(id)));
  }

  #pool(snapshot: SnapshotRecord, name: string | undefined): SnapshotPool {
    let pool = this.#pools.get(snapshot.id);
    if (!pool) {
      const { pinned, perTemplate, watermarks } = this.#ctx.config.pool;
      const wanted: Watermarks = (name === undefined ? undefined : perTemplate[name]) ?? watermarks;
      // A spare that runs would go on with what a sandbox was doing: with nobody's name, and before anybody asked for it.
      const marks = snapshot.cause === "build" ? wanted : { ...wanted, hot: { low: 0, high: 0 } };
      pool = new SnapshotPool(
        snapshot,
        { name, pinned: name !== undefined && pinned.includes(name), marks },
        this.#ctx.clock.mono(),
      );
      this.#pools.set(snapshot.id, pool);
    }
    return pool;
  }

  #next(): { pool: SnapshotPool; kind: SpareKind } | undefined {
    if (isDiskLow(this.#ctx)) return undefined;
    const now = this.#ctx.clock.mono();
    const pools = [...this.#pools.values()].filter((p) => p.mayTry(now)).sort((a, b) => b.lastUsed - a.lastUsed);
    for (const kind of ["hot", "prepared"] as const)
      for (const pool of pools)
        if (pool.missing(kind) > 0 && this.#usedBytes() + this.#cost(kind) <= this.#ctx.config.pool.memoryBudgetBytes)
          return { pool, kind };
    return undefined;
  }

  #cost(kind: SpareKind): number {
    const { hotCostBytes, preparedCostBytes } = this.#ctx.config.pool;
    return kind === "hot" ? hotCostBytes : preparedCostBytes;
  }

  #usedBytes(): number {
    let used = 0;
    for (const pool of this.#pools.values())
      for (const kind of ["hot", "prepared"] as const)
        used += this.#cost(kind) * (pool.spares[kind].length + pool.making[kind]);
    return used;
  }

  async #make(pool: SnapshotPool, kind: SpareKind, signal: AbortSignal): Promise<void> {
    await this.#ctx.foreground.idle(signal);
    if (pool.closed || this.#closed) return;
    try {
      const phases = new Phases(this.#ctx.clock);
      const snapshot = current(this.#ctx, pool.snapshot);
      using _files = holdFiles(this.#ctx, snapshot);
      const run = await this.#prepare(snapshot, phases, signal, WARMING_CPU_WEIGHT);
      if (kind === "hot") {
        await this.#start(run, snapshot, phases, signal);
        await this.#orRelease(run, () => primeRun(this.#ctx, run, this.#ctx.tokens.captured(snapshot), signal));
      }
      pool.succeeded();
      if (pool.closed || this.#closed || signal.aborted) return await run.release();
      pool.spares[kind].push(run);
      void run.vm.exited.then((exit) => this.#lost(pool, run, `its VM ended: ${exit.cause}`));
      this.#ctx.logger.debug({ run: run.id, kind, template: pool.name, ms: phases.totalMs }, "spare made");
    } catch (e) {
      if (signal.aborted) return;
      const why = (await damageOf(pool.snapshot)) ?? AenvError.from(e, `a ${kind} spare`);
      const wait = pool.failed(this.#ctx.clock.mono(), why);
      this.#ctx.logger.warn({ template: pool.name, kind, error: why.message, retryMs: wait }, "refill failed");
      this.#ctx.clock.after(wait, () => this.refill());
    }
  }

  async #prepare(snapshot: SnapshotRecord, phases: Phases, signal: AbortSignal, cpuWeight?: number): Promise<VmRun> {
    return await this.#evicting(() => prepareRun(this.#ctx, snapshot, phases, signal, cpuWeight));
  }

  /** Spares hold slots too: a caller goes before them. */
  async #evicting(make: () => Promise<VmRun>): Promise<VmRun> {
    try {
      return await make();
    } catch (e) {
      const spare = e instanceof AenvError && e.code === "SLOT_EXHAUSTED" ? this.#evict() : undefined;
      if (!spare) throw e;
      await spare.release();
      return await make();
    }
  }

  /** The spare of the least used pool. */
  #evict(): VmRun | undefined {
    const pools = [...this.#pools.values()].sort((a, b) => a.lastUsed - b.lastUsed);
    for (const kind of ["prepared", "hot"] as const)
      for (const pool of pools) {
        const run = pool.pop(kind);
        if (run) {
          pool.want[kind] = Math.max(0, pool.want[kind] - 1);
          return run;
        }
      }
    return undefined;
  }

  async #start(run: VmRun, snapshot: SnapshotRecord, phases: Phases, signal: AbortSignal): Promise<VmRun> {
    return await this.#orRelease(run, async () => {
      await startRun(this.#ctx, run, snapshot, phases, signal);
      return run;
    });
  }

  async #orRelease<T>(run: VmRun, fn: () => Promise<T>): Promise<T> {
    try {
      return await fn();
    } catch (e) {
      await run.release();
      throw e;
    }
  }

  #lost(pool: SnapshotPool, run: VmRun, why: string): void {
    if (!pool.remove(run.id)) return;
    this.#ctx.logger.warn({ run: run.id, template: pool.name, why }, "spare dropped");
    this.#ctx.tasks.spawn("release", () => run.release());
    this.refill();
  }

  /** blockd was restarted: a waiting VMM has lost its disk; a running one has reconnected. */
  async #checkEpoch(signal: AbortSignal): Promise<void> {
    const { epoch } = await this.#ctx.blockd.ping(deadline(PING_DEADLINE_MS, signal));
    if (epoch === this.#epoch) return;
    this.#epoch = epoch;
    for (const pool of this.#pools.values())
      for (const run of pool.spares.prepared.filter((r) => r.epoch !== epoch))
        this.#lost(pool, run, "blockd was restarted");
  }

  async #checkHealth(signal: AbortSignal): Promise<void> {
    for (const pool of this.#pools.values())
      for (const run of pool.spares.hot.slice()) {
        const ok = await run.guest.health(deadline(HEALTH_DEADLINE_MS, signal)).catch(() => false);
        if (!ok) this.#lost(pool, run, "its agent does not answer");
      }
  }

  #shrinkIdle(now: number): void {
    for (const [id, pool] of this.#pools) {
      if (now - pool.lastUsed < this.#ctx.config.pool.idleMs) continue;
      for (const run of pool.shrink()) this.#ctx.tasks.spawn("release", () => run.release());
      if (!pool.pinned && pool.making.hot + pool.making.prepared === 0) this.#pools.delete(id);
    }
  }

  #arm(): void {
    this.#cancelTick = this.#ctx.clock.after(EPOCH_CHECK_MS, () => {
      this.#ctx.tasks.spawn("pool check", (signal) => this.#tick(signal));
    });
  }

  async #tick(signal: AbortSignal): Promise<void> {
    try {
      const now = this.#ctx.clock.mono();
      this.#shrinkIdle(now);
      this.refill();
      await this.#checkEpoch(signal).catch((e: unknown) => {
        this.#ctx.logger.warn({ error: messageOf(e) }, "blockd does not answer");
      });
      if (now - this.#lastHealth >= HEALTH_CHECK_MS) {
        this.#lastHealth = now;
        await this.#checkHealth(signal);
      }
    } finally {
      if (!this.#closed) this.#arm();
    }
  }
}
