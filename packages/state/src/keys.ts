import { createHash, randomBytes } from "node:crypto";
import { AenvError, type Clock, randomName } from "@aenv/base";
import { type Database, int, optional, type Row, text } from "./database.ts";
import type { ApiKeyRecord, TeamRecord } from "./records.ts";
import { isStoreFailure } from "./store-failure.ts";

const KEY_SHAPE = /^e2b_[0-9a-f]{40}$/;
/** The time of the last use is written at most this often per key. */
const LAST_USED_STEP_MS = 60_000;

export const DEFAULT_TEAM = "default";

export class Teams {
  readonly #db: Database;
  readonly #clock: Clock;

  constructor(db: Database, clock: Clock) {
    this.#db = db;
    this.#clock = clock;
  }

  /** The team of that name, made if there is none. */
  ensure(name: string): TeamRecord {
    const known = this.#find(name);
    if (known) return known;
    return this.#db.tx(() => {
      const row = this.#find(name);
      if (row) return row;
      const made: TeamRecord = {
        id: name === DEFAULT_TEAM ? DEFAULT_TEAM : `team-${randomName(12)}`,
        name,
        createdAt: this.#clock.now(),
      };
      this.#db.run("INSERT INTO teams (id, name, created_at) VALUES (?, ?, ?)", made.id, made.name, made.createdAt);
      return made;
    });
  }

  #find(name: string): TeamRecord | undefined {
    const row = this.#db.get("SELECT * FROM teams WHERE name = ?", name);
    return row && team(row);
  }

  get(id: string): TeamRecord | undefined {
    const row = this.#db.get("SELECT * FROM teams WHERE id = ?", id);
    return row && team(row);
  }

  list(): TeamRecord[] {
    return this.#db.all("SELECT * FROM teams ORDER BY created_at, id").map(team);
  }
}

/** API keys: `e2b_` and 40 hex digits. Only their SHA-256 is stored. */
export class ApiKeys {
  readonly #db: Database;
  readonly #clock: Clock;

  constructor(db: Database, clock: Clock) {
    this.#db = db;
    this.#clock = clock;
  }

  /** The only time at which the key itself is seen. */
  create(teamId: string, name: string): { key: string; record: ApiKeyRecord } {
    const key = `e2b_${randomBytes(20).toString("hex")}`;
    const record: ApiKeyRecord = {
      id: `key-${randomName(12)}`,
      team: teamId,
      name,
      mask: `e2b_...${key.slice(-4)}`,
      createdAt: this.#clock.now(),
    };
    this.#db.durable(() =>
      this.#db.run(
        "INSERT INTO api_keys (id, team, name, hash, mask, created_at) VALUES (?, ?, ?, ?, ?, ?)",
        record.id,
        teamId,
        name,
        hash(key),
        record.mask,
        record.createdAt,
      ),
    );
    return { key, record };
  }

  /** undefined: no such key. */
  verify(key: string): ApiKeyRecord | undefined {
    if (!KEY_SHAPE.test(key)) return undefined;
    const row = this.#db.get("SELECT * FROM api_keys WHERE hash = ?", hash(key));
    if (!row) return undefined;
    const record = apiKey(row);
    const now = this.#clock.now();
    if (now - (record.lastUsedAt ?? 0) >= LAST_USED_STEP_MS) this.#used(record.id, now);
    return record;
  }

  /** A key is good whether its use can be noted or not. */
  #used(id: string, at: number): void {
    try {
      this.#db.run("UPDATE api_keys SET last_used_at = ? WHERE id = ?", at, id);
    } catch (e) {
      if (!isStoreFailure(e)) throw e;
    }
  }

  list(teamId: string): ApiKeyRecord[] {
    return this.#db.all("SELECT * FROM api_keys WHERE team = ? ORDER BY created_at, id", teamId).map(apiKey);
  }

  rename(teamId: string, id: string, name: string): void {
    if (this.#db.run("UPDATE api_keys SET name = ? WHERE id = ? AND team = ?", name, id, teamId) === 0)
      throw new AenvError("NOT_FOUND", `there is no API key ${id}`);
  }

  /** False when there is none. */
  revoke(teamId: string, id: string): boolean {
    return this.#db.durable(() => this.#db.run("DELETE FROM api_keys WHERE id = ? AND team = ?", id, teamId)) > 0;
  }
}

const hash = (key: string): string => createHash("sha256").update(key).digest("hex");

const team = (r: Row): TeamRecord => ({ id: text(r, "id"), name: text(r, "name"), createdAt: int(r, "created_at") });

const apiKey = (r: Row): ApiKeyRecord => ({
  id: text(r, "id"),
  team: text(r, "team"),
  name: text(r, "name"),
  mask: text(r, "mask"),
  createdAt: int(r, "created_at"),
  ...optional(r, "last_used_at", "lastUsedAt", int),
});
