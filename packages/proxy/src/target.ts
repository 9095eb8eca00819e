import type { IncomingMessage } from "node:http";

/** Where the traffic of one sandbox port goes. */
export interface Target {
  /** The VM run: connections are pooled per run and die with it. */
  run: string;
  host: string;
  port: number;
  /** When set, every port but envd's wants it in the `e2b-traffic-access-token` header. */
  requiredTrafficToken?: string;
  /** Who has it may open raw connections to ports (`Upgrade: aenv-tcp`); absent where the sandbox is open to everybody. */
  accessToken?: string;
  /** The Host header that the server in the sandbox sees, instead of the client's. */
  maskHost?: string;
  /** The server in the sandbox speaks TLS, with whatever certificate. */
  tls?: boolean;
}

/** Why there is no target. `not_found` covers unknown, killed and paused sandboxes. */
export interface EdgeError {
  error: "not_found" | "forbidden" | "conflict" | "unavailable";
  /** Replaces the standard message, except that of `not_found`, which clients compare. */
  message?: string;
}

/** A paused sandbox that traffic wakes. */
export interface Asleep {
  /** What a request for envd's port needs before it wakes the sandbox; absent where envd is open to everybody. */
  accessToken?: string;
  requiredTrafficToken?: string;
  /**
   * Resolves when the sandbox can be connected to. Many requests call it at once: waking it only once is the callee's.
   * The signal ends the wait, not the waking.
   */
  wake(signal: AbortSignal): Promise<Target | EdgeError>;
}

export type Resolve = (sandboxId: string, port: number, req: IncomingMessage) => Target | EdgeError | Asleep;
