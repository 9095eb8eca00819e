import { DatabaseSync, type SQLInputValue, type SQLOutputValue, type StatementSync } from "node:sqlite";
import { AenvError, messageOf } from "@aenv/base";
import { MIGRATIONS } from "./migrations.ts";
import { inStore, isStoreFailure, sqliteCode } from "./store-failure.ts";

export type Row = Record<string, SQLOutputValue>;

/** Another process (doctor, a second connection) may hold the write lock for so long before a statement fails. */
const BUSY_TIMEOUT_MS = 5000;

/** Free pages that the database keeps: it can go on writing when its disk is full. 4 KiB each. */
const ROOM_PAGES = 1024;

/**
 * One connection. Writes survive a crash of the process at once (WAL in the page cache); those made in `durable()` also
 * survive a loss of power. Everything here is synchronous: callers keep statements small.
 */
export class Database {
  readonly #db: DatabaseSync;
  readonly #statements = new Map<string, StatementSync>();
  readonly #beforeWrite: () => void;
  /** Changes that must not be lost and could not be written yet, oldest first. */
  readonly #late: (() => void)[] = [];
  #depth = 0;

  /** `beforeWrite`: for tests; may throw what sqlite would. */
  constructor(path: string, beforeWrite: () => void = () => {}) {
    this.#beforeWrite = beforeWrite;
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

  /** Changes that wait for the disk to take them. */
  get late(): number {
    return this.#late.length;
  }

  all(sql: string, ...args: SQLInputValue[]): Row[] {
    return this.#prepare(sql).all(...args);
  }

  get(sql: string, ...args: SQLInputValue[]): Row | undefined {
    return this.#prepare(sql).get(...args);
  }

  /** The number of rows it changed. */
  run(sql: string, ...args: SQLInputValue[]): number {
    return this.#write(() => {
      if (this.#depth === 0) this.#beforeWrite();
      return Number(this.#prepare(sql).run(...args).changes);
    });
  }

  /** All of `fn` or nothing; inside another transaction it is part of that one. */
  tx<T>(fn: () => T): T {
    if (this.#depth > 0) return fn();
    return this.#write(() => this.#transaction(fn));
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

  /**
   * A change that holds whether it can be written now or not: where the disk does not take it, it waits, and every later
   * write waits behind it. `fn` may be called again; until it is written, reads do not see it and a crash forgets it.
   * False: it waits.
   */
  surely(fn: () => void): boolean {
    if (this.#depth > 0) {
      fn();
      return true;
    }
    try {
      this.tx(fn);
      return true;
    } catch (e) {
      if (!isStoreFailure(e)) throw e;
      this.#late.push(fn);
      return false;
    }
  }

  /** Writes what waits, in its order. Throws where the disk still does not take it. */
  settle(): void {
    for (let fn = this.#late[0]; fn; fn = this.#late[0]) {
      const change = fn;
      try {
        inStore(() => this.#transaction(change));
      } catch (e) {
        if (isStoreFailure(e)) throw e;
        // It would stand in the way of every later write.
        process.emitWarning(`a late change of the state was dropped: ${messageOf(e)}`);
      }
      this.#late.shift();
    }
  }

  /** Makes sure that the database has free pages of its own and, where `log` is said, a log that could hold as many. */
  keepRoom({ log = false }: { log?: boolean } = {}): void {
    const free = Number(this.#db.prepare("PRAGMA freelist_count").get()?.["freelist_count"]);
    if (!log && free >= ROOM_PAGES / 2) return;
    const pageBytes = Number(this.#db.prepare("PRAGMA page_size").get()?.["page_size"]);
    const pages = free < ROOM_PAGES ? free + ROOM_PAGES : ROOM_PAGES;
    // What is used and freed again stays in file and log.
    this.#write(() => {
      this.#db.exec("CREATE TABLE IF NOT EXISTS room (bytes BLOB)");
      this.#db.prepare("INSERT INTO room (bytes) VALUES (zeroblob(?))").run(pages * pageBytes);
      this.#db.exec("DROP TABLE room");
    });
  }

  close(): void {
    this.#late.length = 0;
    this.#statements.clear();
    if (this.#db.isOpen) this.#db.close();
  }

  #write<T>(fn: () => T): T {
    if (this.#depth > 0) return fn();
    this.settle();
    return inStore(fn);
  }

  #transaction<T>(fn: () => T): T {
    this.#beforeWrite();
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
  const code = sqliteCode(e);
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
