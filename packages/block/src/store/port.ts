import { AenvError } from "@aenv/base";

export interface BlobInfo {
  key: string;
  bytes: number;
  /** Milliseconds since 1970, by the store's clock. */
  modifiedAt: number;
}

/** Content that is read as it is sent; a read may be repeated. */
export interface BlobSource {
  readonly bytes: number;
  read(position: number, length: number): Promise<Buffer>;
}

/**
 * Named, immutable objects in a folder or an object store, shared by several nodes. Errors: NOT_FOUND, UNAVAILABLE when
 * the store is away, PERMISSION_DENIED when it refuses us, NO_SPACE, the signal's reason.
 */
export interface BlobStore extends Disposable {
  /** Where it is, for messages. */
  readonly name: string;
  /** Appears whole or not at all, replacing what was there. */
  put(key: string, content: Buffer | BlobSource, signal?: AbortSignal): Promise<void>;
  stat(key: string, signal?: AbortSignal): Promise<BlobInfo | undefined>;
  /** Exactly these bytes; CORRUPT when the object is shorter. */
  read(key: string, position: number, length: number, signal?: AbortSignal): Promise<Buffer>;
  /** Everything whose key starts with the prefix, in no order. */
  list(prefix: string, signal?: AbortSignal): AsyncIterable<BlobInfo>;
  /** Unknown is fine. */
  delete(key: string, signal?: AbortSignal): Promise<void>;
  /** Removes what uploads left that were cut off before this time. Returns how many. */
  sweep(before: number, signal?: AbortSignal): Promise<number>;
}

const KEY = /^[a-zA-Z0-9_][a-zA-Z0-9._-]*(\/[a-zA-Z0-9_][a-zA-Z0-9._-]*)*$/;
const MAX_KEY = 512;

export function checkKey(key: string): string {
  if (key.length <= MAX_KEY && KEY.test(key)) return key;
  throw new AenvError("INVALID_ARGUMENT", `${JSON.stringify(key.slice(0, 100))} is not a name for an object`);
}

export function missing(store: string, key: string, cause?: unknown): AenvError {
  return new AenvError("NOT_FOUND", `${store} has no ${key}`, {
    ...(cause === undefined ? {} : { cause }),
    data: { store, key },
    hint: "It was deleted, or never published completely: publish it again.",
  });
}

export function tooShort(store: string, key: string): AenvError {
  return new AenvError("CORRUPT", `${key} in ${store} is shorter than it should be`, {
    data: { store, key },
    hint: "Publish again what uses it.",
  });
}

/** Calls `fn` for every piece of the range, at most `parallel` at a time. The first failure ends all. */
export async function inPieces(
  bytes: number,
  pieceBytes: number,
  parallel: number,
  fn: (position: number, length: number, index: number, signal: AbortSignal) => Promise<void>,
  signal?: AbortSignal,
): Promise<void> {
  const stop = new AbortController();
  const either = signal === undefined ? stop.signal : AbortSignal.any([signal, stop.signal]);
  const count = Math.ceil(bytes / pieceBytes);
  let next = 0;
  const worker = async (): Promise<void> => {
    while (next < count) {
      either.throwIfAborted();
      const i = next++;
      await fn(i * pieceBytes, Math.min(pieceBytes, bytes - i * pieceBytes), i, either);
    }
  };
  const workers = Array.from({ length: Math.min(parallel, count) }, () =>
    worker().catch((e: unknown) => {
      stop.abort(e);
      throw e;
    }),
  );
  const failed = (await Promise.allSettled(workers)).find((r) => r.status === "rejected");
  if (failed) throw signal?.aborted === true ? signal.reason : (stop.signal.reason as Error);
}
