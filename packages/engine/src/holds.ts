import type { LayerId, MemoryId, SnapshotId } from "@aenv/base";

export type Artifact = LayerId | SnapshotId | MemoryId;

/** Artifacts in use by something that is not in the database: not collected meanwhile. */
export class Holds {
  readonly #held = new Map<Artifact, number>();
  /** Held when they would have been collected. */
  readonly #spared = new Set<Artifact>();
  readonly #freed: () => void;

  /** `freed`: what was spared is not held any more. */
  constructor(freed: () => void = () => {}) {
    this.#freed = freed;
  }

  /** Until the disposal. */
  hold(...ids: readonly Artifact[]): Disposable {
    for (const id of ids) this.#held.set(id, (this.#held.get(id) ?? 0) + 1);
    let open = true;
    return {
      [Symbol.dispose]: () => {
        if (!open) return;
        open = false;
        let spared = false;
        for (const id of ids) {
          const left = (this.#held.get(id) ?? 1) - 1;
          if (left > 0) this.#held.set(id, left);
          else {
            this.#held.delete(id);
            spared = this.#spared.delete(id) || spared;
          }
        }
        if (spared) this.#freed();
      },
    };
  }

  /** True where it is held: it is then collected when it is not any more. */
  spares(id: Artifact): boolean {
    if (!this.#held.has(id)) return false;
    this.#spared.add(id);
    return true;
  }
}
