/** HTTP, HTTPS and HTTP/2 on one port: the first byte of a connection tells whether it speaks TLS. */
import type { Server } from "node:http";
import type { Http2Session } from "node:http2";
import type { Socket } from "node:net";
import { createServer, type SecureContext, type SecureContextOptions, type TLSSocket } from "node:tls";
import type { Logger } from "@aenv/base";
import { serveH2 } from "./h2.ts";

/** Where certificates come from. They may change while the server runs. */
export interface TlsSource {
  /** For clients that name no host. */
  current(): SecureContextOptions;
  forName(name: string): SecureContext | undefined;
  /** `listener` is called after `current` has changed. */
  onChange(listener: () => void): void;
}

export interface SecureOptions {
  source: TlsSource;
  logger: Logger;
  /** A client must say something, and then finish the handshake, within this (ms). */
  handshakeMs: number;
  /** HTTP/2 connections without an open stream are closed after this (ms). */
  idleMs: number;
}

/** First byte of every TLS connection: a handshake record. No HTTP method starts with it. */
const TLS_HANDSHAKE = 0x16;

/** Makes a server of HTTP, which must not have any connection yet, answer TLS on the same port. */
export function answerTls(server: Server, o: SecureOptions): void {
  const [plain] = server.listeners("connection") as ((this: Server, socket: Socket) => void)[];
  if (!plain) throw new Error("the server takes no connections");
  const http = (socket: unknown): void => plain.call(server, socket as Socket);
  const sessions = new Set<Http2Session>();
  const silent = new Set<Socket>();
  const secure = createServer({
    ...o.source.current(),
    ALPNProtocols: ["h2", "http/1.1"],
    minVersion: "TLSv1.2",
    handshakeTimeout: o.handshakeMs,
    SNICallback: (name, done) => done(null, o.source.forName(name)),
  });
  o.source.onChange(() => secure.setSecureContext(o.source.current()));
  secure.on("tlsClientError", (e: Error, socket: TLSSocket) => {
    o.logger.debug({ err: e.message, client: socket.remoteAddress }, "TLS handshake failed");
    socket.destroy();
  });
  secure.on("secureConnection", (socket: TLSSocket) => {
    if (socket.alpnProtocol !== "h2") return http(socket);
    const session = serveH2(socket, { serve: http, idleMs: o.idleMs });
    sessions.add(session);
    session.once("close", () => sessions.delete(session));
  });

  server.removeAllListeners("connection");
  server.on("connection", (socket: Socket) => {
    const gone = (): void => void socket.destroy();
    const forget = (): void => void silent.delete(socket);
    silent.add(socket);
    socket.setTimeout(o.handshakeMs, gone);
    socket.on("error", gone).once("close", forget);
    socket.once("data", (chunk: Buffer) => {
      socket.setTimeout(0, gone);
      socket.off("error", gone).off("close", forget).off("timeout", gone);
      silent.delete(socket);
      socket.pause();
      socket.unshift(chunk);
      if (chunk[0] === TLS_HANDSHAKE) {
        // Half of a TLS connection cannot go on alone.
        socket.allowHalfOpen = false;
        secure.emit("connection", socket);
      } else {
        http(socket);
        socket.resume();
      }
    });
  });
  // What a closing server asks for: connections on which nothing is under way go.
  const closeIdle = server.closeIdleConnections.bind(server);
  server.closeIdleConnections = () => {
    closeIdle();
    for (const s of sessions) s.close();
    for (const s of silent) s.destroy();
  };
}
