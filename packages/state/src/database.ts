import { DatabaseSync, type SQLInputValue, type SQLOutputValue, type StatementSync } from "node:sqlite";
import { AenvError, messageOf } from "@aenv/base";
import { MIGRATIONS } from "./migrations.ts";

export type Row = Record<string, SQLOutputValue>;

/** Another process (doctor, a second connection) may hold the write lock for so long before a statement fails. */
const BUSY_TIMEOUT_MS = 5000;

/**
 * One connection. Writes survive a crash of the process at once (WAL in the page cache); those made in `durable()` also
 * survive a loss of power. Everything here is synchronous: callers keep statements small.
 */
export class Database {
  readonly #db: DatabaseSync;
  readonly #statements = new Map<string, StatementSync>();
  #depth = 0;

  constructor(path: string) {
    this.#db = new DatabaseSync(path, { timeout: BUSY_TIMEOUT_MS, enableForeignKeyConstraints: true });
    try {
      this.#db.exec("PRAGMA journal_mode = WAL; PRAGMA synchronous = NORMAL; PRAGMA temp_store = MEMORY;");
      this.#check();
      this.#migrate(path);
    } catch (e) {
      this.#db.close();
      throw isDamage(e) ? damaged(path, messageOf(e)) : e;
    }
  }

  all(sql: string, ...args: SQLInputValue[]): Row[] {
    return this.#prepare(sql).all(...args);
  }

  get(sql: string, ...args: SQLInputValue[]): Row | undefined {
    return this.#prepare(sql).get(...args);
  }

  /** The number of rows it changed. */
  run(sql: string, ...args: SQLInputValue[]): number {
    return Number(this.#prepare(sql).run(...args).changes);
  }

  /** All of `fn` or nothing; inside another transaction it is part of that one. */
  tx<T>(fn: () => T): T {
    if (this.#depth > 0) return fn();
    this.#db.exec("BEGIN IMMEDIATE");
    this.#depth++;
    try {
      const result = fn();
      this.#db.exec("COMMIT");
      return result;
    } catch (e) {
      if (this.#db.isTransaction) this.#db.exec("ROLLBACK");
      throw e;
    } finally {
      this.#depth--;
    }
  }

  /** A transaction that is on the disk when it returns. */
  durable<T>(fn: () => T): T {
    if (this.#depth > 0) throw new AenvError("INTERNAL", "a durable transaction cannot be part of another");
    this.#db.exec("PRAGMA synchronous = FULL");
    try {
      return this.tx(fn);
    } finally {
      this.#db.exec("PRAGMA synchronous = NORMAL");
    }
  }

  close(): void {
    this.#statements.clear();
    if (this.#db.isOpen) this.#db.close();
  }

  #prepare(sql: string): StatementSync {
    let statement = this.#statements.get(sql);
    if (!statement) {
      statement = this.#db.prepare(sql);
      this.#statements.set(sql, statement);
    }
    return statement;
  }

  /** Damage is found before anything acts on what it left, not when the page is needed. */
  #check(): void {
    const found = String(this.#db.prepare("PRAGMA quick_check(1)").get()?.["quick_check"]);
    if (found !== "ok") throw new Damage(found);
  }

  #migrate(path: string): void {
    const version = (): number => Number(this.#db.prepare("PRAGMA user_version").get()?.["user_version"]);
    if (version() > MIGRATIONS.length)
      throw new AenvError("UNAVAILABLE", `${path} was written by a newer version (schema ${version()})`, {
        hint: `Run the newer version; this one knows schemas up to ${MIGRATIONS.length}.`,
      });
    for (let at = version(); at < MIGRATIONS.length; at++) {
      this.tx(() => {
        // Another process may have been faster: the version is read again under the write lock.
        if (version() !== at) return;
        this.#db.exec(MIGRATIONS[at] ?? "");
        this.#db.exec(`PRAGMA user_version = ${at + 1}`);
      });
    }
  }
}

class Damage extends Error {}

const SQLITE_CORRUPT = 11;
const SQLITE_NOTADB = 26;

function isDamage(e: unknown): boolean {
  if (e instanceof Damage) return true;
  // The low byte of an extended code is the code.
  const code = e instanceof Error && "errcode" in e ? Number(e.errcode) & 0xff : 0;
  return code === SQLITE_CORRUPT || code === SQLITE_NOTADB;
}

function damaged(path: string, why: string): AenvError {
  return new AenvError("CORRUPT", `${path} is damaged: ${why}`, {
    hint: "Put a copy of it back; without one, npm run down -- --purge and npm run up make the node anew, without its sandboxes.",
  });
}

export function text(row: Row, column: string): string {
  const value = row[column];
  if (typeof value !== "string") throw corrupt(column, value);
  return value;
}

export function int(row: Row, column: string): number {
  const value = row[column];
  if (typeof value !== "number") throw corrupt(column, value);
  return value;
}

export const bool = (row: Row, column: string): boolean => int(row, column) !== 0;

/** `{ key: value }`, or nothing where the column is null. */
export function optional<K extends string, T>(
  row: Row,
  column: string,
  key: K,
  read: (row: Row, column: string) => T,
): Partial<Record<K, T>> {
  return row[column] === null ? {} : ({ [key]: read(row, column) } as Record<K, T>);
}

/** A JSON object column. Its shape is ours: nothing but this package writes it. */
export function json<T extends object>(row: Row, column: string): T {
  try {
    const value: unknown = JSON.parse(text(row, column));
    if (typeof value === "object" && value !== null) return value as T;
  } catch (e) {
    throw new AenvError("CORRUPT", `column ${column} of the state database: ${messageOf(e)}`);
  }
  throw corrupt(column, row[column]);
}

export function oneOf<T extends string>(allowed: readonly T[], value: string, what: string): T {
  const found = allowed.find((a) => a === value);
  if (found === undefined) throw new AenvError("CORRUPT", `the state database names an unknown ${what}: ${value}`);
  return found;
}

function corrupt(column: string, value: SQLOutputValue | undefined): AenvError {
  return new AenvError("CORRUPT", `column ${column} of the state database holds ${typeof value}`);
}
