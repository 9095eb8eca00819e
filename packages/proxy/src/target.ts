import type { IncomingMessage } from "node:http";

/** Where the traffic of one sandbox port goes. */
export interface Target {
  /** The VM run: connections are pooled per run and die with it. */
  run: string;
  host: string;
  port: number;
  /** When set, every port but envd's wants it in the `e2b-traffic-access-token` header. */
  requiredTrafficToken?: string;
}

/** Why there is no target. `not_found` covers unknown, killed and paused sandboxes. */
export interface EdgeError {
  error: "not_found" | "forbidden" | "conflict" | "unavailable";
  /** Replaces the standard message, except that of `not_found`, which clients compare. */
  message?: string;
}

/** A promise lets a resolver wake a paused sandbox first; the request waits unread meanwhile. */
export type Resolve = (
  sandboxId: string,
  port: number,
  req: IncomingMessage,
) => Target | EdgeError | Promise<Target | EdgeError>;
