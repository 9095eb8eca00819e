import { type IncomingMessage, ServerResponse } from "node:http";
import type { Socket } from "node:net";
import type { Logger } from "@aenv/base";
import { answer, type EdgeAnswer, NOT_FOUND, resetSocket } from "./answer.ts";
import { Exchange, type ExchangeHost, type ExchangeRequest } from "./exchange.ts";
import { DEFAULT_LIMITS, ENVD_IDLE_MS, type EdgeLimits } from "./limits.ts";
import { BadRequest, framingOf, requestHead } from "./request-head.ts";
import { type BadRoute, ENVD_PORT, isEnvdInternal, originOf, type Route, Router } from "./route.ts";
import type { Asleep, EdgeError, Resolve, Target } from "./target.ts";
import { signatureOf } from "./signature.ts";
import { RAW_PROTOCOL } from "./tunnel.ts";
import { sameToken } from "./token.ts";
import { RunPool } from "./upstream.ts";
import { answerPreflight, refusedWake } from "./wake.ts";
import { WriteQueue } from "./write-queue.ts";

export interface EdgeOptions {
  resolve: Resolve;
  /** Suffix of sandbox hosts; a port in it is ignored. */
  domain: string;
  /**
   * Sandboxes with the tokens of their agents. A signed URL of a file that names no sandbox (the SDK was given one base
   * URL for all) is for the one whose token made the signature.
   */
  accessTokens?: () => Iterable<readonly [sandboxId: string, token: string]>;
  logger: Logger;
  limits?: Partial<EdgeLimits>;
}

/** Counters since the start, but for `active`, `waiting` and `idle`. Labels are a closed set. */
export interface EdgeStats {
  requests: number;
  upgrades: number;
  active: number;
  /** Requests that wait for a paused sandbox to wake. */
  waiting: number;
  /** Connections to guests that wait for a request. */
  idle: number;
  retries: number;
  rateLimited: number;
  failed: number;
  /** Exchanges cut because their VM ended. */
  reset: number;
}

export interface Edge {
  /** Whether the request is for a sandbox (also when it names it wrongly); the API's otherwise. */
  handlesRequest(req: IncomingMessage): boolean;
  /**
   * Takes the request if it is for a sandbox, else leaves it alone and returns false. `expectContinue`: the client waits
   * for 100 and nobody has sent it (node's `checkContinue` event).
   */
  request(req: IncomingMessage, res: ServerResponse, expectContinue?: boolean): boolean;
  upgrade(req: IncomingMessage, socket: Socket, head: Buffer): void;
  /** The VM run is over: its streams are reset, its connections closed, and it is never connected to again. */
  endRun(run: string): void;
  /** Waits `drainMs` for what is open, then resets it. */
  close(): Promise<void>;
  stats(): EdgeStats;
}

/** Ended runs that are remembered, for requests whose resolution was under way. Runs end far more slowly than this fills. */
const REMEMBERED_RUNS = 4096;

/** From so many exchanges at a time on, small writes are gathered; below, the turn they would wait for costs more than it saves. */
const BUSY = 4;

const REFUSALS: Readonly<Record<Exclude<EdgeError["error"], "not_found">, readonly [number, string]>> = {
  forbidden: [403, "Access to this sandbox was refused"],
  conflict: [409, "The sandbox is changing its state"],
  unavailable: [503, "The sandbox cannot be reached now"],
};

export function createEdge(options: EdgeOptions): Edge {
  return new NodeEdge(options);
}

class NodeEdge implements Edge, ExchangeHost {
  readonly limits: EdgeLimits;
  readonly #o: EdgeOptions;
  readonly #router: Router;
  readonly #pools = new Map<string, RunPool>();
  readonly #ended = new Set<string>();
  readonly #exchanges = new Map<string, Set<Exchange>>();
  readonly #perSandbox = new Map<string, number>();
  readonly #writes = new WriteQueue();
  readonly #sweep: NodeJS.Timeout;
  #onIdle: (() => void) | undefined;
  readonly #closed = new AbortController();
  #closing = false;
  #stats = { requests: 0, upgrades: 0, active: 0, waiting: 0, retries: 0, rateLimited: 0, failed: 0, reset: 0 };

  constructor(options: EdgeOptions) {
    this.#o = options;
    this.#router = new Router(options.domain.toLowerCase().replace(/:[0-9]+$/, ""));
    this.limits = { ...DEFAULT_LIMITS, ...options.limits };
    const l = this.limits;
    if (l.idleMs >= ENVD_IDLE_MS) throw new RangeError(`idleMs must stay below envd's ${ENVD_IDLE_MS}`);
    const tick = Math.min(1000, l.connectMs, l.responseStartMs, l.responseHeadMs, l.idleMs);
    this.#sweep = setInterval(() => this.#check(), tick);
    this.#sweep.unref();
  }

  now(): number {
    return performance.now();
  }

  later(write: () => void): void {
    if (this.#stats.active < BUSY && this.#writes.empty) write();
    else this.#writes.push(write);
  }

  handlesRequest(req: IncomingMessage): boolean {
    return this.#router.route(req) !== undefined;
  }

  request(req: IncomingMessage, res: ServerResponse, expectContinue = false): boolean {
    const route = this.#router.route(req) ?? this.#signedFor(req);
    if (route === undefined) return false;
    this.#stats.requests++;
    this.#accept(req, res, route, expectContinue, undefined);
    return true;
  }

  #signedFor(req: IncomingMessage): Route | undefined {
    const url = req.url ?? "";
    if (!this.#o.accessTokens || !url.startsWith("/files?") || !url.includes("signature=")) return undefined;
    const signature = signatureOf(req.method ?? "", url);
    if (!signature) return undefined;
    for (const [sandboxId, token] of this.#o.accessTokens()) {
      if (signature.fits(token)) return { sandboxId, port: ENVD_PORT };
    }
    return undefined;
  }

  upgrade(req: IncomingMessage, socket: Socket, head: Buffer): void {
    this.#stats.upgrades++;
    // node leaves an upgraded socket without a listener; an error must not end the process.
    socket.on("error", () => {});
    const res = new ServerResponse(req);
    res.shouldKeepAlive = false;
    res.assignSocket(socket);
    res.once("finish", () => {
      res.detachSocket(socket);
      socket.destroySoon();
    });
    const route = this.#router.route(req) ?? { bad: "The request names no sandbox" };
    this.#accept(req, res, route, false, { socket, head });
  }

  #accept(
    req: IncomingMessage,
    res: ServerResponse,
    route: Route | BadRoute,
    expectContinue: boolean,
    upgrade: ExchangeRequest["upgrade"],
  ): void {
    const origin = originOf(req);
    if ("bad" in route || "bad" in origin) {
      return this.#badRequest(req, res, (route as BadRoute).bad ?? (origin as BadRoute).bad);
    }
    if (route.port === ENVD_PORT && isEnvdInternal(origin.path)) {
      return this.#answer(req, res, { status: 404, message: "Not found", sandboxId: route.sandboxId });
    }
    const resolved = this.#o.resolve(route.sandboxId, route.port, req);
    const go = (target: Target | EdgeError): void =>
      this.#forward(req, res, route, origin.path, origin.authority ?? "", target, expectContinue, upgrade);
    if ("wake" in resolved) this.#wake(req, res, route, origin.path, resolved, go);
    else go(resolved);
  }

  /** The request waits unread: what its client sends meanwhile stays in the buffers of the connection. */
  #wake(
    req: IncomingMessage,
    res: ServerResponse,
    route: Route,
    path: string,
    asleep: Asleep,
    go: (target: Target | EdgeError) => void,
  ): void {
    const { sandboxId } = route;
    if (answerPreflight(req, res, route)) return;
    const refusal =
      this.#refusal(req, route, { ...asleep, run: "" }) ??
      refusedWake(req, route, path, asleep) ??
      (this.#stats.waiting >= this.limits.waiting
        ? { status: 503, message: "Too many requests wait for paused sandboxes", sandboxId, retryAfterSeconds: 1 }
        : undefined);
    if (refusal) return this.#answer(req, res, refusal);
    const gone = new AbortController();
    const left = (): void => gone.abort();
    res.once("close", left);
    this.#count(sandboxId, 1);
    this.#stats.waiting++;
    const signal = AbortSignal.any([gone.signal, this.#closed.signal, AbortSignal.timeout(this.limits.wakeMs)]);
    void asleep
      .wake(signal)
      .catch((e: unknown): EdgeError => {
        if (!signal.aborted)
          this.#o.logger.error({ sandbox: sandboxId, err: String(e) }, "edge could not wake a sandbox");
        return { error: "unavailable", message: "The sandbox is paused and did not wake" };
      })
      .then((target) => {
        res.off("close", left);
        this.#count(sandboxId, -1);
        this.#stats.waiting--;
        if (!res.destroyed && !req.socket.destroyed) go(target);
      });
  }

  #count(sandboxId: string, by: 1 | -1): void {
    const now = (this.#perSandbox.get(sandboxId) ?? 0) + by;
    if (now > 0) this.#perSandbox.set(sandboxId, now);
    else this.#perSandbox.delete(sandboxId);
  }

  #forward(
    req: IncomingMessage,
    res: ServerResponse,
    route: Route,
    path: string,
    authority: string,
    target: Target | EdgeError,
    expectContinue: boolean,
    upgrade: ExchangeRequest["upgrade"],
  ): void {
    const refusal = this.#refusal(req, route, target);
    if (refusal) return this.#answer(req, res, refusal);
    const to = target as Target;
    const { run } = to;
    const raw = upgrade !== undefined && req.headers.upgrade?.toLowerCase() === RAW_PROTOCOL;
    const rawRefusal = raw ? refusedRaw(req, route, to) : undefined;
    if (rawRefusal) return this.#answer(req, res, rawRefusal);
    let head: string;
    let framing: ExchangeRequest["framing"];
    try {
      framing = upgrade ? { kind: "none" } : framingOf(req);
      head = requestHead(req, {
        path,
        authority,
        ...(to.maskHost === undefined ? {} : { host: to.maskHost }),
        framing,
        expectContinue,
        upgrade: upgrade && req.headers.upgrade,
      });
    } catch (e) {
      if (!(e instanceof BadRequest)) throw e;
      return this.#badRequest(req, res, e.message);
    }
    let pool = this.#pools.get(run);
    if (!pool) {
      pool = new RunPool(run, this.limits);
      this.#pools.set(run, pool);
    }
    const x = new Exchange(this, {
      req,
      res,
      route,
      target: raw ? { ...to, tls: false } : to,
      pool,
      head,
      framing,
      expectContinue,
      upgrade,
      raw,
    });
    this.#stats.active++;
    this.#count(route.sandboxId, 1);
    const set = this.#exchanges.get(run);
    if (set) set.add(x);
    else this.#exchanges.set(run, new Set([x]));
    x.start();
  }

  #refusal(
    req: IncomingMessage,
    route: Route,
    target: Pick<Target, "run" | "requiredTrafficToken"> | EdgeError,
  ): EdgeAnswer | undefined {
    const { sandboxId, port } = route;
    if (this.#closing) return { status: 503, message: "The node is shutting down", sandboxId, retryAfterSeconds: 5 };
    if ("error" in target) return refusalOf(target, sandboxId);
    if (this.#ended.has(target.run)) return { status: 502, message: NOT_FOUND, sandboxId };
    const wanted = target.requiredTrafficToken;
    if (wanted !== undefined && port !== ENVD_PORT && !sameToken(wanted, req.headers["e2b-traffic-access-token"])) {
      return {
        status: 403,
        message: "This sandbox needs its traffic access token in the e2b-traffic-access-token header",
        sandboxId,
      };
    }
    if ((this.#perSandbox.get(sandboxId) ?? 0) >= this.limits.connectionsPerSandbox) {
      this.#stats.rateLimited++;
      return { status: 429, message: "Too many connections to this sandbox", sandboxId, retryAfterSeconds: 1 };
    }
    return undefined;
  }

  /** Where such a request ends is not certain: nothing that follows it on the connection is read as a request. */
  #badRequest(req: IncomingMessage, res: ServerResponse, message: string): void {
    res.shouldKeepAlive = false;
    answer(req, res, { status: 400, message }, 0);
  }

  #answer(req: IncomingMessage, res: ServerResponse, a: EdgeAnswer): void {
    answer(req, res, a, this.limits.lingerMs);
  }

  finished(x: Exchange): void {
    const { run } = x.r.target;
    const { sandboxId } = x.r.route;
    const set = this.#exchanges.get(run);
    if (!set?.delete(x)) return;
    if (set.size === 0) this.#exchanges.delete(run);
    this.#count(sandboxId, -1);
    if (--this.#stats.active === 0) this.#onIdle?.();
  }

  retried(): void {
    this.#stats.retries++;
  }

  failed(x: Exchange, a: EdgeAnswer, why: string): void {
    this.#stats.failed++;
    const { sandboxId, port } = x.r.route;
    this.#o.logger.debug(
      { sandbox: sandboxId, run: x.r.target.run, port, status: a.status, why },
      "edge request failed",
    );
  }

  endRun(run: string): void {
    this.#ended.add(run);
    if (this.#ended.size > REMEMBERED_RUNS) {
      const [oldest] = this.#ended;
      if (oldest !== undefined) this.#ended.delete(oldest);
    }
    this.#pools.get(run)?.end();
    this.#pools.delete(run);
    for (const x of this.#exchanges.get(run) ?? []) {
      this.#stats.reset++;
      x.runEnded();
    }
  }

  #check(): void {
    const now = this.now();
    for (const set of this.#exchanges.values()) {
      for (const x of set) x.check(now);
    }
    for (const [run, pool] of this.#pools) {
      pool.closeIdle(now);
      if (pool.empty && !this.#exchanges.has(run)) this.#pools.delete(run);
    }
  }

  async close(): Promise<void> {
    this.#closing = true;
    this.#closed.abort();
    if (this.#stats.active > 0) {
      await new Promise<void>((resolve) => {
        this.#onIdle = resolve;
        setTimeout(resolve, this.limits.drainMs);
      });
    }
    clearInterval(this.#sweep);
    for (const set of this.#exchanges.values()) {
      for (const x of set) {
        resetSocket(x.r.req.socket);
        x.runEnded();
      }
    }
    for (const pool of this.#pools.values()) pool.end();
    this.#pools.clear();
  }

  stats(): EdgeStats {
    let idle = 0;
    for (const pool of this.#pools.values()) idle += pool.idleCount;
    return { ...this.#stats, idle };
  }
}

/** Raw bytes reach what HTTP does not: only who may do everything in the sandbox gets them, and nobody those of its agent. */
function refusedRaw(req: IncomingMessage, { sandboxId, port }: Route, { accessToken }: Target): EdgeAnswer | undefined {
  if (port === ENVD_PORT)
    return { status: 403, message: "The port of the sandbox's agent speaks HTTP only", sandboxId };
  if (accessToken === undefined || sameToken(accessToken, req.headers["x-access-token"])) return undefined;
  const message = "A raw connection needs the access token of the sandbox in the x-access-token header";
  return { status: 403, message, sandboxId };
}

function refusalOf({ error, message }: EdgeError, sandboxId: string): EdgeAnswer {
  // Clients compare this message.
  if (error === "not_found") return { status: 502, message: NOT_FOUND, sandboxId };
  const [status, standard] = REFUSALS[error];
  return { status, message: message ?? standard, sandboxId, ...(status === 503 ? { retryAfterSeconds: 1 } : {}) };
}
