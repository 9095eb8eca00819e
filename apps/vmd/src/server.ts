import { randomBytes } from "node:crypto";
import { createServer, type Server, type Socket } from "node:net";
import { AenvError, type Logger } from "@aenv/base";
import { procIdentity } from "@aenv/host";
import { JsonLines, jsonLine, type ProcExit, type VmdInfo, type VmdMessage, type VmdRequest } from "@aenv/vmm";
import type { Children } from "./children.ts";

/** Bytes a client may leave unread before it is dropped. */
const MAX_UNREAD_BYTES = 8 * 1024 * 1024;

function isRequest(line: unknown): line is VmdRequest {
  if (typeof line !== "object" || line === null) return false;
  const { id, op } = line as { id?: unknown; op?: unknown };
  return Number.isSafeInteger(id) && typeof op === "string";
}

/** Serves JSON lines to the node's server process; the socket's mode keeps everybody else out. */
export function createVmdServer(children: Children, logger: Logger): Server {
  const epoch = randomBytes(8).toString("hex");

  const answer = async (request: VmdRequest, send: (m: VmdMessage) => void, watch: () => void): Promise<unknown> => {
    switch (request.op) {
      case "ping": {
        const info: VmdInfo = {
          identity: procIdentity(process.pid) ?? { pid: process.pid, startTicks: 0 },
          epoch,
          children: children.list.length,
        };
        return info;
      }
      case "spawn": {
        const identity = await children.spawn(request.spec);
        logger.info({ run: request.spec.run, pid: identity.pid }, "spawned");
        return identity;
      }
      case "list":
        return children.list;
      case "exits":
        watch();
        for (const exit of children.exits) send({ exit });
        return {};
      case "ack":
        if (request.epoch === epoch) children.acknowledge(request.seq);
        return {};
      default:
        throw new AenvError("UNIMPLEMENTED", `vmd does not know ${JSON.stringify((request as { op: unknown }).op)}`);
    }
  };

  return createServer((socket: Socket) => {
    const lines = new JsonLines();
    let unwatch: (() => void) | undefined;
    const send = (message: VmdMessage): void => {
      if (socket.writableLength > MAX_UNREAD_BYTES) socket.destroy();
      else socket.write(jsonLine(message));
    };
    const watch = (): void => {
      unwatch ??= children.onExit((exit: ProcExit) => send({ exit }));
    };
    const serve = async (request: VmdRequest): Promise<void> => {
      const { id } = request;
      try {
        send({ id, ok: await answer(request, send, watch) });
      } catch (e) {
        const error = AenvError.from(e, request.op);
        logger.warn({ op: request.op, error: error.message }, "request failed");
        send({ id, error: { code: error.code, message: error.message } });
      }
    };
    socket.on("data", (chunk) => {
      try {
        for (const line of lines.push(chunk)) {
          if (!isRequest(line)) throw new AenvError("INVALID_ARGUMENT", "not a request");
          void serve(line);
        }
      } catch {
        socket.destroy();
      }
    });
    socket.on("error", () => {});
    socket.on("close", () => unwatch?.());
  });
}
