import { Socket, type SocketConstructorOpts } from "node:net";

export interface Reader {
  /** Memory for the next bytes. */
  space(): Uint8Array;
  /** The first `bytes` of `buffer`, which `space` gave, were filled. They are only ours until the call returns. */
  filled(bytes: number, buffer: Uint8Array): void;
}

/**
 * An accepted socket (from a server with `pauseOnConnect`) that reads into memory of ours: Node gives the `onread` option to
 * sockets that connect only, so the connection's handle moves to a new Socket. Its own way, a fresh 64 KiB buffer per
 * read, costs more than everything else we do for a large write. Should a Node version hide the handle, the socket is
 * used as it is.
 */
export function directSocket(accepted: Socket, reader: Reader): Socket {
  const inner = accepted as unknown as { _handle?: object | null };
  const handle = inner._handle;
  if (!handle) {
    accepted.on("data", (chunk: Buffer) => {
      for (let at = 0; at < chunk.length; ) {
        const space = reader.space();
        const take = Math.min(space.length, chunk.length - at);
        space.set(chunk.subarray(at, at + take));
        at += take;
        reader.filled(take, space);
      }
    });
    accepted.resume();
    return accepted;
  }
  inner._handle = null;
  accepted.destroy();
  const options = {
    handle,
    allowHalfOpen: true,
    readable: true,
    writable: true,
    onread: {
      buffer: (): Uint8Array => reader.space(),
      callback: (bytes: number, buffer: Uint8Array): boolean => {
        reader.filled(bytes, buffer);
        return true;
      },
    },
  };
  return new Socket(options as unknown as SocketConstructorOpts);
}
