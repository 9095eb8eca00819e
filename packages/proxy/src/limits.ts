/** Times in milliseconds. Nothing here limits how long a response or a tunnel may last once it has begun. */
export interface EdgeLimits {
  /** Requests and tunnels of one sandbox at a time; more are answered with 429. */
  connectionsPerSandbox: number;
  /** Requests that wait for paused sandboxes to wake, of all sandboxes together; more are answered with 503. */
  waiting: number;
  /** How long a request waits for its sandbox to wake. */
  wakeMs: number;
  /** A guest that neither accepts nor refuses a connection. */
  connectMs: number;
  /** From the last byte of the request (or the last one that the guest accepted) to the first one of the answer. */
  responseStartMs: number;
  /** From the first byte of the response head to its end. */
  responseHeadMs: number;
  /** Interim (1xx) and final response heads of one request together. */
  responseHeadBytes: number;
  /** An idle connection to a guest is closed after this. */
  idleMs: number;
  idlePerRun: number;
  /** What the guest did not answer to `Expect: 100-continue` within this, the edge answers itself. */
  continueMs: number;
  /** How long a client may go on sending a body that nobody wants, so that it sees the answer and not a reset. */
  lingerMs: number;
  /** How long `close()` waits for open requests before it resets them. */
  drainMs: number;
}

export const DEFAULT_LIMITS: EdgeLimits = {
  connectionsPerSandbox: 1024,
  waiting: 4096,
  // Above what the engine gives a launch and its guest, whose answer says more.
  wakeMs: 120_000,
  connectMs: 5_000,
  responseStartMs: 600_000,
  responseHeadMs: 30_000,
  responseHeadBytes: 64 * 1024,
  // Below envd's 640 s, so that it is always the edge which closes first.
  idleMs: 60_000,
  idlePerRun: 1024,
  continueMs: 1_000,
  lingerMs: 5_000,
  drainMs: 2_000,
};

/** envd's own limit for idle connections (protocol, section 3); `idleMs` must stay below. */
export const ENVD_IDLE_MS = 640_000;
