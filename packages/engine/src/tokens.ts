import { createHmac, randomBytes } from "node:crypto";
import type { SandboxId } from "@aenv/base";
import type { State } from "@aenv/state";

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

  /** For the edge, where public traffic is off. */
  traffic(id: SandboxId): string {
    return this.#of(`sandbox-traffic-${id}`);
  }

  #of(what: string): string {
    return createHmac("sha256", this.#seed).update(what).digest("hex");
  }
}
