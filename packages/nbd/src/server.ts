import { createServer, type Server } from "node:net";
import type { Logger } from "@aenv/base";
import { BufferPool } from "./buffers.ts";
import { Connection, type ServedExport } from "./connection.ts";

export interface NbdServerOptions {
  exports: readonly ServedExport[];
  logger: Logger;
  /** Shared by the servers of a thread. */
  pool?: BufferPool;
  maxInflight?: number;
  maxQueuedBytes?: number;
}

/** A client that does not take its last replies for this long is cut off at shutdown. */
const CLOSE_GRACE_MS = 3000;

/** NBD over a Unix socket. Several clients may use an export at once; all see the same disk. */
export class NbdServer {
  readonly #options: NbdServerOptions;
  readonly #pool: BufferPool;
  readonly #server: Server;
  readonly #connections = new Set<Connection>();
  #closing: Promise<void> | undefined;

  constructor(options: NbdServerOptions) {
    this.#options = options;
    this.#pool = options.pool ?? new BufferPool();
    this.#server = createServer({ allowHalfOpen: true, pauseOnConnect: true }, (socket) => {
      const { exports, logger, maxInflight, maxQueuedBytes } = this.#options;
      const connection = new Connection(socket, {
        exports,
        logger,
        pool: this.#pool,
        ...(maxInflight === undefined ? {} : { maxInflight }),
        ...(maxQueuedBytes === undefined ? {} : { maxQueuedBytes }),
      });
      this.#connections.add(connection);
      void connection.done.then(() => this.#connections.delete(connection));
      if (this.#closing) connection.drain();
    });
  }

  get connections(): number {
    return this.#connections.size;
  }

  /** Binds the socket file; a file that is already there is an error (EADDRINUSE). */
  listen(path: string): Promise<void> {
    return new Promise((resolve, reject) => {
      this.#server.once("error", reject);
      this.#server.listen(path, () => {
        this.#server.off("error", reject);
        resolve();
      });
    });
  }

  /** Stops listening, answers what is in flight, closes the connections. */
  close(): Promise<void> {
    this.#closing ??= (async () => {
      const stopped = new Promise<void>((resolve) => this.#server.close(() => resolve()));
      for (const c of this.#connections) c.drain();
      const late = setTimeout(() => this.#connections.forEach((c) => c.abort()), CLOSE_GRACE_MS);
      await Promise.all([...this.#connections].map((c) => c.done));
      clearTimeout(late);
      await stopped;
    })();
    return this.#closing;
  }
}
