/** The spares of one snapshot; what Pools (pools.ts) decides about. */
import type { AenvError, RunId } from "@aenv/base";
import type { SnapshotRecord } from "@aenv/state";
import type { Watermarks } from "./config.ts";
import type { VmRun } from "./run.ts";

export type SpareKind = "hot" | "prepared";

/** Failed refills wait 1, 2, 4 .. 60 s. */
const MAX_BACKOFF_MS = 60_000;

export class SnapshotPool {
  readonly snapshot: SnapshotRecord;
  /** Its template, for people. */
  readonly name: string | undefined;
  readonly pinned: boolean;
  readonly marks: Watermarks;
  readonly spares: Readonly<Record<SpareKind, VmRun[]>> = { hot: [], prepared: [] };
  readonly want: Record<SpareKind, number>;
  readonly making: Record<SpareKind, number> = { hot: 0, prepared: 0 };
  lastUsed: number;
  closed = false;
  /** Why there was no VM the last time, until one is made. */
  lastError: AenvError | undefined;
  #failures = 0;
  #retryAt = 0;

  constructor(
    snapshot: SnapshotRecord,
    template: { name: string | undefined; pinned: boolean; marks: Watermarks },
    now: number,
  ) {
    this.snapshot = snapshot;
    this.name = template.name;
    this.pinned = template.pinned;
    this.marks = template.marks;
    this.want = { hot: template.marks.hot.low, prepared: template.marks.prepared.low };
    this.lastUsed = now;
  }

  missing(kind: SpareKind): number {
    return this.closed ? 0 : this.want[kind] - this.spares[kind].length - this.making[kind];
  }

  /** The most recently made first: its pages are the warmest. */
  pop(kind: SpareKind): VmRun | undefined {
    return this.spares[kind].pop();
  }

  /** The most recently made that serves. */
  takePrepared(serves: (run: VmRun) => boolean): VmRun | undefined {
    const at = this.spares.prepared.findLastIndex(serves);
    return at < 0 ? undefined : this.spares.prepared.splice(at, 1)[0];
  }

  remove(run: RunId): VmRun | undefined {
    for (const list of [this.spares.hot, this.spares.prepared]) {
      const at = list.findIndex((r) => r.id === run);
      if (at >= 0) return list.splice(at, 1)[0];
    }
    return undefined;
  }

  /** Somebody had to wait for what was not there: keep more. */
  grow(kind: SpareKind): void {
    this.want[kind] = Math.min(this.marks[kind].high, this.want[kind] + Math.max(1, this.want[kind]));
  }

  /** Nobody came for long. Returns the spares that are too many now. */
  shrink(): VmRun[] {
    for (const kind of ["hot", "prepared"] as const) this.want[kind] = this.pinned ? this.marks[kind].low : 0;
    return this.excess();
  }

  excess(): VmRun[] {
    return (["hot", "prepared"] as const).flatMap((kind) => {
      const over = this.spares[kind].length - this.want[kind];
      return over > 0 ? this.spares[kind].splice(0, over) : [];
    });
  }

  takeAll(): VmRun[] {
    return [...this.spares.hot.splice(0), ...this.spares.prepared.splice(0)];
  }

  failed(now: number, e: AenvError): number {
    this.lastError = e;
    const wait = Math.min(MAX_BACKOFF_MS, 1000 * 2 ** this.#failures++);
    this.#retryAt = now + wait;
    return wait;
  }
  succeeded(): void {
    this.lastError = undefined;
    this.#failures = 0;
    this.#retryAt = 0;
  }
  mayTry(now: number): boolean {
    return now >= this.#retryAt;
  }
}
