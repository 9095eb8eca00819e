import type { SandboxId } from "@aenv/base";
import { type Database, int, json, text } from "./database.ts";

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

  prune(before: number, limit: number): number {
    return this.#db.run("DELETE FROM events WHERE id IN (SELECT id FROM events WHERE at < ? LIMIT ?)", before, limit);
  }
}
