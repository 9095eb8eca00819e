import { createHmac, randomBytes } from "node:crypto";
import type { SandboxId } from "@aenv/base";
import type { SnapshotRecord, State } from "@aenv/state";

/** Tokens of sandboxes: the same over the whole life of one, also on another node with the same seed. */
export class Tokens {
  readonly #seed: Buffer;

  constructor(state: State) {
    const hex = state.setting("token-seed", () => randomBytes(32).toString("hex"));
    this.#seed = Buffer.from(hex, "hex");
  }

  /** For the guest's agent. */
  access(id: SandboxId): string {
    return this.#of(`envd ${id}`);
  }

  /** What a guest launched from the snapshot still asks for; undefined: nothing. */
  captured(snapshot: SnapshotRecord): string | undefined {
    return snapshot.sandbox === undefined ? undefined : this.access(snapshot.sandbox);
  }

  /** For the edge, where public traffic is off. */
  traffic(id: SandboxId): string {
    return this.#of(`sandbox-traffic-${id}`);
  }

  #of(what: string): string {
    return createHmac("sha256", this.#seed).update(what).digest("hex");
  }
}
