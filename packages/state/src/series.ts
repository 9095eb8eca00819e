import type { SandboxId } from "@aenv/base";
import { type Database, int, json, type Row, text } from "./database.ts";

export interface SampleRecord {
  timestamp: number;
  cpuCount: number;
  cpuUsedPct: number;
  memUsed: number;
  memTotal: number;
  memCache: number;
  diskUsed: number;
  diskTotal: number;
}

/** Metric samples; the writer prunes them by age and by number. */
export class Samples {
  readonly #db: Database;

  constructor(db: Database) {
    this.#db = db;
  }

  add(sandbox: SandboxId, sample: SampleRecord): void {
    this.#db.run(
      "INSERT OR REPLACE INTO samples (sandbox, at, sample) VALUES (?, ?, ?)",
      sandbox,
      sample.timestamp,
      JSON.stringify(sample),
    );
  }

  /** Oldest first, at most `limit`, both ends inclusive. */
  range(sandbox: SandboxId, start: number, end: number, limit: number): SampleRecord[] {
    return this.#db
      .all(
        "SELECT sample FROM samples WHERE sandbox = ? AND at >= ? AND at <= ? ORDER BY at LIMIT ?",
        sandbox,
        start,
        end,
        limit,
      )
      .map((row) => json<SampleRecord>(row, "sample"));
  }

  /**
   * How many sandboxes of a team ran in each step of time, and how many started in it; steps without any are left out.
   * A sandbox counts where it has a sample or started, so a step must be longer than the time between samples.
   */
  perTeam(
    team: string,
    start: number,
    end: number,
    stepMs: number,
  ): { at: number; running: number; started: number }[] {
    return this.#db
      .all(
        `SELECT seen.at / CAST(? AS INTEGER) * CAST(? AS INTEGER) AS step, count(DISTINCT seen.sandbox) AS running, sum(seen.started) AS started
         FROM (
           SELECT sandbox, at, 0 AS started FROM samples WHERE at >= ? AND at <= ?
           UNION ALL SELECT id, started_at, 1 FROM sandboxes WHERE started_at >= ? AND started_at <= ?
         ) AS seen JOIN sandboxes s ON s.id = seen.sandbox
         WHERE s.team = ? GROUP BY step ORDER BY step`,
        stepMs,
        stepMs,
        start,
        end,
        start,
        end,
        team,
      )
      .map((row) => ({ at: int(row, "step"), running: int(row, "running"), started: int(row, "started") }));
  }

  /** Deletes at most `limit` samples older than `before` or beyond the newest `keepRows`. */
  prune(before: number, keepRows: number, limit: number): number {
    const rows = int(this.#db.get("SELECT count(*) AS n FROM samples") ?? {}, "n");
    const old = this.#db.run(
      "DELETE FROM samples WHERE (sandbox, at) IN (SELECT sandbox, at FROM samples WHERE at < ? ORDER BY at LIMIT ?)",
      before,
      limit,
    );
    const over = Math.min(limit, rows - old - keepRows);
    if (over <= 0) return old;
    return (
      old +
      this.#db.run(
        "DELETE FROM samples WHERE (sandbox, at) IN (SELECT sandbox, at FROM samples ORDER BY at LIMIT ?)",
        over,
      )
    );
  }
}

export interface EventRecord {
  timestamp: number;
  level: "debug" | "info" | "warn" | "error";
  message: string;
  fields: Record<string, unknown>;
}

export interface EventQuery {
  /** Milliseconds, inclusive: forward from it on, backward up to it. */
  cursor?: number;
  /** An event's number, exclusive; as `cursor`, and exact where several share a millisecond. */
  after?: number;
  backward?: boolean;
  levels?: readonly EventRecord["level"][];
  /** A part of the message; case counts. */
  search?: string;
  limit: number;
}

/** An event with its number; later events have higher ones. */
export interface NumberedEvent extends EventRecord {
  id: number;
}

/** An event of a kind that outsiders are told of, with what they want to know of its sandbox. */
export interface LifecycleRecord extends NumberedEvent {
  sandbox: string;
  team: string;
  template: string;
  snapshot: string;
  run?: string;
  metadata: Record<string, string>;
}

const numbered = (row: Row): NumberedEvent => ({
  id: int(row, "id"),
  timestamp: int(row, "at"),
  level: text(row, "level") as EventRecord["level"],
  message: text(row, "message"),
  fields: json<Record<string, unknown>>(row, "fields"),
});

/** What happened to a sandbox, for its owner to read. */
export class Events {
  readonly #db: Database;

  constructor(db: Database) {
    this.#db = db;
  }

  add(sandbox: SandboxId, event: EventRecord): void {
    this.#db.run(
      "INSERT INTO events (sandbox, at, level, message, fields) VALUES (?, ?, ?, ?, ?)",
      sandbox,
      event.timestamp,
      event.level,
      event.message,
      JSON.stringify(event.fields),
    );
  }

  /** Oldest first. */
  list(sandbox: SandboxId, start: number, limit: number): EventRecord[] {
    return this.#db
      .all("SELECT * FROM events WHERE sandbox = ? AND at >= ? ORDER BY id LIMIT ?", sandbox, start, limit)
      .map((row) => ({
        timestamp: int(row, "at"),
        level: text(row, "level") as EventRecord["level"],
        message: text(row, "message"),
        fields: json<Record<string, unknown>>(row, "fields"),
      }));
  }

  /** In the order of the query's direction. */
  page(sandbox: SandboxId, q: EventQuery): NumberedEvent[] {
    const [at, id, order] = q.backward ? ["<=", "<", "DESC"] : [">=", ">", "ASC"];
    const end = q.backward ? Number.MAX_SAFE_INTEGER : 0;
    const levels = q.levels?.length ? `AND level IN (${q.levels.map(() => "?").join(", ")})` : "";
    return this.#db
      .all(
        `SELECT * FROM events WHERE sandbox = ? AND at ${at} ? AND id ${id} ? AND instr(message, ?) > 0 ${levels}
         ORDER BY id ${order} LIMIT ?`,
        sandbox,
        q.cursor ?? end,
        q.after ?? end,
        q.search ?? "",
        ...(q.levels ?? []),
        q.limit,
      )
      .map(numbered);
  }

  /** The number of the latest event; 0 when there is none. */
  latest(): number {
    return int(this.#db.get("SELECT coalesce(max(id), 0) AS n FROM events") ?? {}, "n");
  }

  /** Events with one of these messages, of a team, or of one sandbox of it. */
  lifecycle(
    team: string,
    messages: readonly string[],
    q: { sandbox?: SandboxId; after?: number; skip?: number; newestFirst?: boolean; limit: number },
  ): LifecycleRecord[] {
    return this.#db
      .all(
        `SELECT e.*, s.team, s.template, s.snapshot, s.metadata FROM events e JOIN sandboxes s ON s.id = e.sandbox
         WHERE s.team = ? AND e.id > ? AND e.message IN (${messages.map(() => "?").join(", ")})
           ${q.sandbox === undefined ? "" : "AND e.sandbox = ?"}
         ORDER BY e.id ${q.newestFirst ? "DESC" : "ASC"} LIMIT ? OFFSET ?`,
        team,
        q.after ?? 0,
        ...messages,
        ...(q.sandbox === undefined ? [] : [q.sandbox]),
        q.limit,
        q.skip ?? 0,
      )
      .map((row) => {
        const event = numbered(row);
        const { run } = event.fields;
        return {
          ...event,
          sandbox: text(row, "sandbox"),
          team: text(row, "team"),
          template: text(row, "template"),
          snapshot: text(row, "snapshot"),
          ...(typeof run === "string" ? { run } : {}),
          metadata: json<Record<string, string>>(row, "metadata"),
        };
      });
  }

  prune(before: number, limit: number): number {
    return this.#db.run("DELETE FROM events WHERE id IN (SELECT id FROM events WHERE at < ? LIMIT ?)", before, limit);
  }
}
