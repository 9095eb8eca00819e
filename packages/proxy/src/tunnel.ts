import type { Socket } from "node:net";
import { resetSocket } from "./answer.ts";
import type { ResponseHead } from "./response-head.ts";
import type { GuestConnection } from "./upstream.ts";

/** In the Upgrade header of a client that wants the bytes of a port and no HTTP. */
export const RAW_PROTOCOL = "aenv-tcp";

/**
 * After 101: bytes both ways, each half closed on its own, no time limit. `done` is called once, when both are gone.
 */
export function startTunnel(
  c: GuestConnection,
  client: { socket: Socket; head: Buffer },
  head: ResponseHead,
  early: Buffer,
  done: () => void,
): void {
  const guest = c.socket;
  const { socket } = client;
  let text = `HTTP/1.1 101 ${head.reason || "Switching Protocols"}\r\nConnection: Upgrade\r\n`;
  if (head.upgrade !== undefined) text += `Upgrade: ${head.upgrade}\r\n`;
  for (let i = 0; i < head.headers.length; i += 2) text += `${head.headers[i]}: ${head.headers[i + 1]}\r\n`;
  socket.write(`${text}\r\n`, "latin1");
  if (early.length > 0) socket.write(early);
  if (client.head.length > 0) guest.write(client.head);

  let open = true;
  // Either side's abnormal end is the other's reset; after a whole end of both there is nothing to tell.
  const close = (): void => {
    if (!open) return;
    open = false;
    const whole = socket.readableEnded && guest.readableEnded;
    for (const s of [socket, guest]) {
      if (whole) s.destroySoon();
      else resetSocket(s);
    }
    done();
  };
  c.use({
    connected() {},
    data(chunk) {
      if (!socket.write(chunk)) guest.pause();
    },
    ended() {
      socket.end();
      if (socket.readableEnded) guest.end();
    },
    drained() {
      socket.resume();
    },
    closed: close,
  });
  socket.setTimeout(0);
  socket
    .on("data", (chunk: Buffer) => {
      if (!guest.write(chunk)) socket.pause();
    })
    .on("drain", () => guest.resume())
    .on("end", () => guest.end())
    .on("error", close)
    .on("close", close);
  socket.resume();
}
