import type { IncomingMessage } from "node:http";
import { finished } from "node:stream";

export interface DrainLimits {
  bytes: number;
  ms: number;
}

/** What a client of ours sends by mistake fits; what sends more has to live with a connection that is cut. */
const LIMITS: DrainLimits = { bytes: 64 * 1024 * 1024, ms: 10_000 };

/**
 * Throws away what is left of a body. A server that answers and closes while the client still sends makes the client's
 * kernel drop the answer: the client then sees a broken connection and not what was wrong. True: all of it was read.
 */
export function drain(request: IncomingMessage, limits: DrainLimits = LIMITS): Promise<boolean> {
  if (request.complete || request.destroyed) return Promise.resolve(request.complete);
  return new Promise((resolve) => {
    let bytes = 0;
    const settle = (): void => {
      clearTimeout(timer);
      stopWatching();
      request.off("data", onData);
      request.pause();
      resolve(request.complete);
    };
    const onData = (chunk: Buffer): void => {
      bytes += chunk.length;
      if (bytes > limits.bytes) settle();
    };
    const timer = setTimeout(settle, limits.ms);
    const stopWatching = finished(request, { writable: false }, settle);
    request.on("data", onData).resume();
  });
}
