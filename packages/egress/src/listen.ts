import { createSocket } from "node:dgram";
import { createServer, type Socket } from "node:net";
import type { EgressGateway } from "./gateway.ts";

/** A guest that asks over TCP may take so long between questions. */
const TCP_IDLE_MS = 10_000;

/** Answers DNS on this port of every address, over UDP and TCP. */
export async function listenDns(gateway: EgressGateway, port: number): Promise<{ close(): void }> {
  const udp = createSocket("udp4");
  udp.on("message", (data, from) => {
    void gateway.ask(from.address, data).then((answer) => {
      if (answer) udp.send(answer, from.port, from.address, () => {});
    });
  });
  await new Promise<void>((resolve, reject) => {
    udp.once("error", reject);
    udp.bind(port, "0.0.0.0", resolve);
  });
  udp.on("error", () => {});
  const tcp = createServer((socket) => void converse(gateway, socket).catch(() => socket.destroy()));
  await new Promise<void>((resolve, reject) => {
    tcp.once("error", reject);
    tcp.listen(port, "0.0.0.0", resolve);
  });
  return {
    close() {
      udp.close();
      tcp.close();
    },
  };
}

/** One question after the other, each with its length before it. */
async function converse(gateway: EgressGateway, socket: Socket): Promise<void> {
  socket.on("error", () => {});
  socket.setTimeout(TCP_IDLE_MS, () => socket.destroy());
  let data: Buffer = Buffer.alloc(0);
  for await (const part of socket as AsyncIterable<Buffer>) {
    data = Buffer.concat([data, part]);
    while (data.length >= 2 && data.length >= 2 + data.readUInt16BE(0)) {
      const size = data.readUInt16BE(0);
      const answer = await gateway.ask(socket.remoteAddress ?? "", data.subarray(2, 2 + size));
      data = data.subarray(2 + size);
      if (!answer) return void socket.destroy();
      const length = Buffer.alloc(2);
      length.writeUInt16BE(answer.length);
      socket.write(Buffer.concat([length, answer]));
    }
  }
  socket.end();
}
