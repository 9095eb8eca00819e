import type { Socket } from "node:net";
import { AenvError } from "@aenv/base";
import type { SocksProxy } from "@aenv/network";

const VERSION = 5;
const NO_AUTH = 0;
const USER_PASSWORD = 2;
const CONNECT = 1;
const IPV4 = 1;

const failed = (what: string): AenvError => new AenvError("UNAVAILABLE", `the SOCKS5 proxy ${what}`);

/**
 * Asks the proxy at the other end of `socket` (RFC 1928, 1929) for a connection to an IPv4 address; the socket is that
 * connection when it resolves. Rejects with UNAVAILABLE when the proxy refuses or speaks something else.
 */
export async function socksConnect(
  socket: Socket,
  { username, password }: Pick<SocksProxy, "username" | "password">,
  to: { address: string; port: number },
): Promise<void> {
  const read = byteReader(socket);
  try {
    const method = username === undefined ? NO_AUTH : USER_PASSWORD;
    socket.write(Buffer.from([VERSION, 1, method]));
    const [version, chosen] = await read.exactly(2);
    if (version !== VERSION) throw failed("does not speak SOCKS5");
    if (chosen !== method) throw failed("wants another way to log in");
    if (method === USER_PASSWORD) {
      const field = (text: string): Buffer =>
        Buffer.concat([Buffer.from([Buffer.byteLength(text)]), Buffer.from(text)]);
      socket.write(Buffer.concat([Buffer.from([1]), field(username ?? ""), field(password ?? "")]));
      if ((await read.exactly(2))[1] !== 0) throw failed("refuses username and password");
    }
    const port = Buffer.alloc(2);
    port.writeUInt16BE(to.port);
    socket.write(Buffer.concat([Buffer.from([VERSION, CONNECT, 0, IPV4, ...to.address.split(".").map(Number)]), port]));
    const [, code, , kind] = await read.exactly(4);
    if (code !== 0) throw failed(`could not connect (code ${code})`);
    const size = kind === IPV4 ? 4 : kind === 4 ? 16 : ((await read.exactly(1))[0] ?? 0);
    await read.exactly(size + 2);
  } finally {
    read.done();
  }
}

/** Reads from a socket as much as is asked for; what came after it stays in the socket. */
function byteReader(socket: Socket): { exactly(size: number): Promise<Buffer>; done(): void } {
  let wake = (): void => {};
  let error: Error | undefined;
  const onReadable = (): void => wake();
  const onEnd = (): void => {
    error ??= failed("closed the connection");
    wake();
  };
  const onError = (e: Error): void => {
    error ??= e;
    wake();
  };
  socket.on("readable", onReadable).on("end", onEnd).on("close", onEnd).on("error", onError);
  return {
    async exactly(size) {
      for (;;) {
        const data = size === 0 ? Buffer.alloc(0) : (socket.read(size) as Buffer | null);
        if (data?.length === size) return data;
        if (error) throw error;
        await new Promise<void>((resolve) => (wake = resolve));
      }
    },
    done() {
      socket.off("readable", onReadable).off("end", onEnd).off("close", onEnd).off("error", onError);
    },
  };
}
