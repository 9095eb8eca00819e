import type { LayerId, MemoryId, SnapshotId } from "@aenv/base";

export type Artifact = LayerId | SnapshotId | MemoryId;

/** Artifacts in use by something that is not in the database: not collected meanwhile. */
export class Holds {
  readonly #held = new Map<Artifact, number>();

  /** Until the disposal. */
  hold(...ids: readonly Artifact[]): Disposable {
    for (const id of ids) this.#held.set(id, (this.#held.get(id) ?? 0) + 1);
    let open = true;
    return {
      [Symbol.dispose]: () => {
        if (!open) return;
        open = false;
        for (const id of ids) {
          const left = (this.#held.get(id) ?? 1) - 1;
          if (left > 0) this.#held.set(id, left);
          else this.#held.delete(id);
        }
      },
    };
  }

  has(id: Artifact): boolean {
    return this.#held.has(id);
  }
}
