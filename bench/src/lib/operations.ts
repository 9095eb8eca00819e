import { AenvError } from "@aenv/base";
import type { AenvClient, Operation } from "@aenv/client";

/** What the node itself measured of the operations that ran since the last look. */
export class Operations {
  readonly #client: AenvClient;
  #seen = 0;

  private constructor(client: AenvClient) {
    this.#client = client;
  }

  /** Looks from now on. */
  static async open(client: AenvClient, signal: AbortSignal): Promise<Operations> {
    const operations = new Operations(client);
    await operations.next(signal);
    return operations;
  }

  /** Oldest first, each once. */
  async next(signal: AbortSignal): Promise<Operation[]> {
    const all = await this.#client.operations(this.#seen, signal);
    this.#seen = all.at(-1)?.seq ?? this.#seen;
    return all;
  }

  /** The only one of a kind since the last look. */
  async one(op: Operation["op"], signal: AbortSignal): Promise<Operation> {
    const found = (await this.next(signal)).filter((o) => o.op === op);
    const [first] = found;
    if (!first || found.length > 1) throw new AenvError("INTERNAL", `the node tells of ${found.length} ${op}`);
    return first;
  }
}

/** A turning point of an operation; it is there where the operation passed it. */
export function mark(o: Operation, name: "stop" | "go" | "ended" | "running"): number {
  const at = o.marks[name];
  if (at === undefined) throw new AenvError("INTERNAL", `the node tells of no ${name} in a ${o.op}`);
  return at;
}

/** How long the guest stood still. */
export const stoppedMs = (o: Operation): number => mark(o, "go") - mark(o, "stop");

export const MIB = 2 ** 20;
