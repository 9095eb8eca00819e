import { createHash, randomUUID } from "node:crypto";
import { type Clock, deadline, type Logger, messageOf, TaskGroup } from "@aenv/base";
import type { LifecycleEvent } from "@aenv/contract";
import type { State, WebhookRecord } from "@aenv/state";
import { eventOf, LIFECYCLE_MESSAGES } from "./event.ts";

export interface SenderOptions {
  state: Pick<State, "events" | "webhooks" | "surely">;
  clock: Clock;
  logger: Logger;
}

/** How often new events are looked for. */
const LOOK_MS = 500;
const BATCH = 50;
const ANSWER_MS = 10_000;
/** Between attempts: doubled from the first to the most. */
const RETRY_MS = { first: 1000, most: 300_000 };
/** An event that could not be delivered for so long is given up, and the next one's turn comes. */
const GIVE_UP_MS = 3_600_000;

/** How the receiver knows that it is we who sent it: as E2B's receivers compute it. */
export const signatureOf = (secret: string, body: string): string =>
  createHash("sha256")
    .update(secret + body)
    .digest("base64")
    .replace(/=+$/, "");

interface Trouble {
  /** The event that could not be delivered. */
  event: number;
  since: number;
  waitMs: number;
  /** Not before this. */
  again: number;
}

/**
 * Tells webhooks of events, at least once and in order: up to where each was told is in the database. Webhooks do not wait
 * for each other.
 */
export class WebhookSender implements AsyncDisposable {
  readonly #o: SenderOptions;
  readonly #tasks: TaskGroup;
  readonly #busy = new Set<string>();
  readonly #trouble = new Map<string, Trouble>();
  #cancel: (() => void) | undefined;
  #closed = false;

  constructor(o: SenderOptions) {
    this.#o = o;
    this.#tasks = new TaskGroup((task, e) => o.logger.error({ task, error: messageOf(e) }, "webhooks"));
    this.look();
  }

  /** Also runs by itself, every half second. */
  look(): void {
    if (this.#closed) return;
    this.#cancel?.();
    this.#cancel = this.#o.clock.after(LOOK_MS, () => this.look());
    for (const hook of this.#o.state.webhooks.enabled()) {
      const again = this.#trouble.get(hook.id)?.again ?? 0;
      if (this.#busy.has(hook.id) || again > this.#o.clock.now()) continue;
      this.#busy.add(hook.id);
      this.#tasks.spawn(`webhook ${hook.id}`, async (signal) => {
        try {
          await this.#tell(hook, signal);
        } finally {
          this.#busy.delete(hook.id);
        }
      });
    }
  }

  async #tell(hook: WebhookRecord, signal: AbortSignal): Promise<void> {
    const { events } = this.#o.state;
    for (const record of events.lifecycle(hook.team, LIFECYCLE_MESSAGES, { after: hook.told, limit: BATCH })) {
      const event = eventOf(record);
      if (hook.events.includes(event.type) && !(await this.#deliver(hook, record.id, event, signal))) return;
      if (signal.aborted) return;
      this.#o.state.surely(() => this.#o.state.webhooks.tell(hook.id, record.id));
    }
  }

  /** False: not now. True also when it is given up. */
  async #deliver(hook: WebhookRecord, id: number, event: LifecycleEvent, signal: AbortSignal): Promise<boolean> {
    const why = await this.#post(hook, JSON.stringify(event), signal);
    if (why === undefined) {
      this.#trouble.delete(hook.id);
      return true;
    }
    const { clock, logger } = this.#o;
    const before = this.#trouble.get(hook.id);
    const same = before?.event === id ? before : undefined;
    const since = same?.since ?? clock.now();
    if (clock.now() - since >= GIVE_UP_MS) {
      logger.error({ webhook: hook.id, event: id, why }, "an event could not be delivered and is given up");
      this.#trouble.delete(hook.id);
      return true;
    }
    const waitMs = Math.min(RETRY_MS.most, (same?.waitMs ?? RETRY_MS.first / 2) * 2);
    this.#trouble.set(hook.id, { event: id, since, waitMs, again: clock.now() + waitMs });
    logger.warn({ webhook: hook.id, event: id, why, waitMs }, "an event could not be delivered");
    return false;
  }

  /** undefined when it was taken, else why not. */
  async #post(hook: WebhookRecord, body: string, signal: AbortSignal): Promise<string | undefined> {
    try {
      const res = await fetch(hook.url, {
        method: "POST",
        body,
        redirect: "manual",
        signal: deadline(ANSWER_MS, signal),
        headers: {
          "content-type": "application/json",
          "user-agent": "AgentENV",
          "e2b-webhook-id": hook.id,
          "e2b-delivery-id": randomUUID(),
          "e2b-signature-version": "v1",
          "e2b-signature": signatureOf(hook.secret, body),
        },
      });
      await res.body?.cancel();
      return res.ok ? undefined : `status ${res.status}`;
    } catch (e) {
      return messageOf((e as Error).cause ?? e);
    }
  }

  async [Symbol.asyncDispose](): Promise<void> {
    this.#closed = true;
    this.#cancel?.();
    await this.#tasks.close();
  }
}
