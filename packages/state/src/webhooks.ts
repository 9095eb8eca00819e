import { type Clock, randomName } from "@aenv/base";
import { bool, type Database, int, json, type Row, text } from "./database.ts";

export interface WebhookRecord {
  id: string;
  team: string;
  name: string;
  url: string;
  enabled: boolean;
  /** Types of events; what they are called is the sender's. */
  events: readonly string[];
  /** Signs what is sent; never shown. */
  secret: string;
  createdAt: number;
  /** The number of the last event that it was told, or that was not for it. */
  told: number;
}

export type NewWebhook = Pick<WebhookRecord, "name" | "url" | "enabled" | "events" | "secret" | "told">;
export type WebhookChange = Partial<Pick<WebhookRecord, "name" | "url" | "enabled" | "events" | "secret" | "told">>;

const webhook = (row: Row): WebhookRecord => ({
  id: text(row, "id"),
  team: text(row, "team"),
  name: text(row, "name"),
  url: text(row, "url"),
  enabled: bool(row, "enabled"),
  events: json<string[]>(row, "events"),
  secret: text(row, "secret"),
  createdAt: int(row, "created_at"),
  told: int(row, "told"),
});

/** Who is told of what happens to a team's sandboxes. */
export class Webhooks {
  readonly #db: Database;
  readonly #clock: Clock;

  constructor(db: Database, clock: Clock) {
    this.#db = db;
    this.#clock = clock;
  }

  create(team: string, w: NewWebhook): WebhookRecord {
    const id = `wh-${randomName(16)}`;
    this.#db.run(
      "INSERT INTO webhooks (id, team, name, url, enabled, events, secret, created_at, told) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)",
      id,
      team,
      w.name,
      w.url,
      w.enabled ? 1 : 0,
      JSON.stringify(w.events),
      w.secret,
      this.#clock.now(),
      w.told,
    );
    return this.get(team, id) as WebhookRecord;
  }

  /** Oldest first. */
  list(team: string): WebhookRecord[] {
    return this.#db.all("SELECT * FROM webhooks WHERE team = ? ORDER BY created_at, id", team).map(webhook);
  }

  /** Of all teams. */
  enabled(): WebhookRecord[] {
    return this.#db.all("SELECT * FROM webhooks WHERE enabled = 1 ORDER BY id").map(webhook);
  }

  get(team: string, id: string): WebhookRecord | undefined {
    const row = this.#db.get("SELECT * FROM webhooks WHERE team = ? AND id = ?", team, id);
    return row && webhook(row);
  }

  /** undefined: there is none. */
  change(team: string, id: string, change: WebhookChange): WebhookRecord | undefined {
    const before = this.get(team, id);
    if (!before) return undefined;
    const w = { ...before, ...change };
    this.#db.run(
      "UPDATE webhooks SET name = ?, url = ?, enabled = ?, events = ?, secret = ?, told = ? WHERE id = ?",
      w.name,
      w.url,
      w.enabled ? 1 : 0,
      JSON.stringify(w.events),
      w.secret,
      w.told,
      id,
    );
    return w;
  }

  /** Also of one that was changed meanwhile. */
  tell(id: string, told: number): void {
    this.#db.run("UPDATE webhooks SET told = ? WHERE id = ?", told, id);
  }

  /** False: there is none. */
  remove(team: string, id: string): boolean {
    return this.#db.run("DELETE FROM webhooks WHERE team = ? AND id = ?", team, id) > 0;
  }
}
