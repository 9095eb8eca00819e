import { createHmac, randomBytes } from "node:crypto";
import type { SandboxId, SnapshotId } from "@aenv/base";
import type { SnapshotRecord, State } from "@aenv/state";

/** Tokens of sandboxes: the same over the whole life of one, also on another node with the same seed. */
export class Tokens {
  readonly #state: State;
  readonly #seed: Buffer;

  constructor(state: State) {
    this.#state = state;
    const hex = state.setting("token-seed", () => randomBytes(32).toString("hex"));
    this.#seed = Buffer.from(hex, "hex");
  }

  /** For the guest's agent. */
  access(id: SandboxId): string {
    return this.#of(`envd ${id}`);
  }

  /** What a guest launched from the snapshot still asks for; undefined: nothing. */
  captured(snapshot: SnapshotRecord): string | undefined {
    if (snapshot.sandbox !== undefined) return this.access(snapshot.sandbox);
    return this.#state.getSetting(capturedKey(snapshot.id));
  }

  /** Of a snapshot from another node, whose tokens are made from another seed. Part of a transaction. */
  keepCaptured(id: SnapshotId, token: string): void {
    this.#state.putSetting(capturedKey(id), token);
  }

  forgetCaptured(id: SnapshotId): void {
    this.#state.removeSetting(capturedKey(id));
  }

  /** For the edge, where public traffic is off. */
  traffic(id: SandboxId): string {
    return this.#of(`sandbox-traffic-${id}`);
  }

  #of(what: string): string {
    return createHmac("sha256", this.#seed).update(what).digest("hex");
  }
}

const capturedKey = (id: SnapshotId): string => `captured-token ${id}`;
