/** How the server tells the gateway what holds: JSON lines over a Unix socket, each with an answer of the same id. */
import type { Socket } from "node:net";
import { createInterface } from "node:readline";
import { messageOf } from "@aenv/base";
import type { EgressPolicy } from "@aenv/network";
import type { EgressGateway } from "./gateway.ts";

export interface Place {
  tcpPort: number;
  dnsPort: number;
  uid: number;
}

export type Order =
  | { op: "hello" }
  | { op: "configure"; denied: string[]; dns: string[] }
  | { op: "policy"; guest: string; policy: EgressPolicy | null }
  | { op: "retain"; guests: string[] };

export type Request = Order & { id: number };
export type Response = { id: number; error?: string } & Partial<Place>;

/** Only the node's server gets to this socket. */
export function obey(socket: Socket, gateway: EgressGateway, place: Place): void {
  socket.on("error", () => {});
  const lines = createInterface({ input: socket });
  // It repeats the socket's.
  lines.on("error", () => {});
  lines.on("line", (line) => {
    let id = 0;
    const say = (r: Omit<Response, "id">): void => {
      if (socket.writable) socket.write(`${JSON.stringify({ id, ...r })}\n`);
    };
    try {
      const request = JSON.parse(line) as Request;
      id = request.id;
      if (request.op === "configure") gateway.configure(request);
      else if (request.op === "policy") gateway.setPolicy(request.guest, request.policy ?? undefined);
      else if (request.op === "retain") gateway.retain(request.guests);
      say(request.op === "hello" ? place : {});
    } catch (e) {
      say({ error: messageOf(e) });
    }
  });
}
