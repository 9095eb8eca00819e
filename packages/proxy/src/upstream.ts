import { connect, type Socket } from "node:net";
import { connect as connectTls } from "node:tls";
import { resetSocket } from "./answer.ts";
import type { EdgeLimits } from "./limits.ts";
import { ENVD_PORT } from "./route.ts";
import type { Target } from "./target.ts";

/** Who uses a connection at the moment. */
export interface ConnectionUser {
  connected(): void;
  data(chunk: Buffer): void;
  /** The guest will send no more. */
  ended(): void;
  drained(): void;
  /** The connection is gone; `error` when it did not end in order. Last call. */
  closed(error: NodeJS.ErrnoException | undefined): void;
}

/** Until the guest's server can be expected to close an idle connection, when it says nothing: many do after 5 s. */
const UNSAID_PATIENCE_MS = 4_000;

function dial({ host, port, tls }: Target): Socket {
  const options = {
    host,
    port,
    noDelay: true,
    keepAlive: true,
    keepAliveInitialDelay: 60_000,
    allowHalfOpen: true,
    autoSelectFamily: false,
  };
  if (!tls) return connect(options);
  // The way to the guest is ours; its certificate is for somebody else's clients, if for anybody.
  return connectTls({ ...options, rejectUnauthorized: false, ALPNProtocols: ["http/1.1"] });
}

/** One TCP connection to one port of one VM run. */
export class GuestConnection {
  readonly socket: Socket;
  readonly port: number;
  /** It has served a request before: the guest may have closed it while ours was on the way. */
  reused = false;
  /** Monotonic time since when it is idle. */
  idleSince = 0;
  patienceMs: number;
  #user: ConnectionUser | undefined;
  #error: NodeJS.ErrnoException | undefined;

  constructor(target: Target, user: ConnectionUser, onClose: (c: GuestConnection) => void) {
    this.port = target.port;
    this.patienceMs = target.port === ENVD_PORT ? Number.POSITIVE_INFINITY : UNSAID_PATIENCE_MS;
    this.#user = user;
    this.socket = dial(target);
    this.socket
      .on(target.tls ? "secureConnect" : "connect", () => this.#user?.connected())
      // Bytes on an idle connection answer nothing we asked: they must not become the next client's response.
      .on("data", (chunk: Buffer) => (this.#user ? this.#user.data(chunk) : this.reset()))
      .on("end", () => (this.#user ? this.#user.ended() : this.socket.destroy()))
      .on("drain", () => this.#user?.drained())
      .on("error", (e) => (this.#error = e))
      .on("close", () => {
        onClose(this);
        const user = this.#user;
        this.#user = undefined;
        user?.closed(this.#error);
      });
  }

  get idle(): boolean {
    return this.#user === undefined;
  }

  use(user: ConnectionUser): void {
    this.#user = user;
    this.reused = true;
  }

  /** No user hears of it any more. */
  unuse(): void {
    this.#user = undefined;
  }

  reset(): void {
    this.unuse();
    // A connect in progress has nothing to reset.
    if (this.socket.connecting) this.socket.destroy();
    else resetSocket(this.socket);
  }
}

/** The connections of one VM run; never shared with another run, and all gone when it ends. */
export class RunPool {
  readonly run: string;
  readonly #limits: EdgeLimits;
  readonly #idle = new Map<number, GuestConnection[]>();
  readonly #all = new Set<GuestConnection>();
  ended = false;
  idleCount = 0;

  constructor(run: string, limits: EdgeLimits) {
    this.run = run;
    this.#limits = limits;
  }

  get empty(): boolean {
    return this.#all.size === 0;
  }

  /**
   * An idle connection, newest first. One that the guest may be about to close is only for requests that can be sent
   * again: the close would meet the request on the way.
   */
  take(port: number, user: ConnectionUser, replayable: boolean, now: number): GuestConnection | undefined {
    const list = this.#idle.get(port);
    const found = list?.at(-1);
    if (!list || !found) return undefined;
    if (!replayable && now - found.idleSince > found.patienceMs / 2) return undefined;
    list.pop();
    this.idleCount--;
    found.use(user);
    return found;
  }

  connect(target: Target, user: ConnectionUser): GuestConnection {
    const made = new GuestConnection(target, user, (c) => {
      this.#all.delete(c);
      this.#forget(c);
    });
    this.#all.add(made);
    return made;
  }

  /** Takes a connection back after a whole exchange. */
  release(c: GuestConnection, keepAliveMs: number | undefined, now: number): void {
    c.unuse();
    if (this.ended || this.idleCount >= this.#limits.idlePerRun || c.socket.destroyed || c.socket.readableEnded) {
      c.socket.destroy();
      return;
    }
    if (keepAliveMs !== undefined) c.patienceMs = keepAliveMs;
    c.idleSince = now;
    const list = this.#idle.get(c.port);
    if (list) list.push(c);
    else this.#idle.set(c.port, [c]);
    this.idleCount++;
  }

  #forget(c: GuestConnection): void {
    const list = this.#idle.get(c.port);
    const at = list?.indexOf(c) ?? -1;
    if (!list || at < 0) return;
    list.splice(at, 1);
    this.idleCount--;
    if (list.length === 0) this.#idle.delete(c.port);
  }

  closeIdle(now: number): void {
    for (const list of this.#idle.values()) {
      for (const c of list) {
        if (now - c.idleSince >= Math.min(this.#limits.idleMs, c.patienceMs)) c.socket.destroy();
      }
    }
  }

  /** The VM is gone: nothing of it may be reused or go on. */
  end(): void {
    this.ended = true;
    for (const c of this.#all) {
      if (c.idle) c.socket.destroy();
    }
  }
}
