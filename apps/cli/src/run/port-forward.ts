import { once } from "node:events";
import { type ClientRequest, type IncomingMessage, request as httpRequest } from "node:http";
import { request as httpsRequest } from "node:https";
import { type AddressInfo, createServer, isIPv6, type Server, type Socket } from "node:net";
import { AenvError, errnoOf } from "@aenv/base";
import { RAW_PROTOCOL } from "@aenv/proxy";
import type * as commands from "../commands/sandbox.ts";
import type { Context } from "../context.ts";
import type { Args, Exit } from "../define.ts";
import { exitCodeOf } from "../exit.ts";

/** A sandbox that is resumed for this lives at least so long. */
const RESUME_S = 300;
/** What is read of a refusal. */
const MAX_REFUSAL = 4096;

export async function portForward(args: Args<typeof commands.portForward>, context: Context): Promise<Exit> {
  const { out } = context;
  const signal = context.interrupted();
  const client = await context.client();
  const detail = await client.get(args.id, signal);
  const sandbox = detail.state === "paused" ? (await client.connect(args.id, RESUME_S)).sandbox : detail;
  const url = context.settings().sandboxUrl.value;
  const headers = {
    "e2b-sandbox-id": sandbox.sandboxID,
    ...(sandbox.envdAccessToken === undefined ? {} : { "x-access-token": sandbox.envdAccessToken }),
    ...("trafficAccessToken" in sandbox && sandbox.trafficAccessToken
      ? { "e2b-traffic-access-token": sandbox.trafficAccessToken }
      : {}),
  };
  const sockets = new Set<Socket>();
  context.defer(() => {
    for (const s of sockets) s.destroy();
  });
  for (const { local, remote } of args.ports) {
    const server = createServer({ allowHalfOpen: true, noDelay: true }, (socket) => {
      sockets.add(socket);
      socket.once("close", () => sockets.delete(socket));
      const refused = (why: string): void => out.note(`port ${remote}: ${why}`);
      join(socket, url, { ...headers, "e2b-sandbox-port": String(remote) }, refused);
    });
    context.defer(() => void server.close());
    const address = await listen(server, args.address, local);
    if (out.json) out.event({ local: address, remote });
    else out.line(`${address} is port ${remote} of ${sandbox.sandboxID}`);
  }
  if (!signal.aborted) await once(signal, "abort");
  return exitCodeOf(AenvError.from(signal.reason, "port-forward"));
}

async function listen(server: Server, address: string, port: number): Promise<string> {
  try {
    server.listen(port, address);
    await once(server, "listening");
  } catch (e) {
    const hint =
      errnoOf(e) === "EADDRINUSE"
        ? `Something else listens there; write LOCAL:PORT with another LOCAL, or :PORT for a free one.`
        : "Check --address and the port; ports below 1024 need root.";
    throw new AenvError("INVALID_ARGUMENT", `${address}:${port} cannot be listened on`, { cause: e, hint });
  }
  const at = server.address() as AddressInfo;
  return `${isIPv6(at.address) ? `[${at.address}]` : at.address}:${at.port}`;
}

/** Bytes of one local connection to the port and back, each half closed on its own. */
function join(local: Socket, url: string, headers: Record<string, string>, refused: (why: string) => void): void {
  const send = url.startsWith("https:") ? httpsRequest : httpRequest;
  const req: ClientRequest = send(url, {
    headers: { ...headers, connection: "Upgrade", upgrade: RAW_PROTOCOL },
    agent: false,
  });
  // Not read before there is somebody to read it for.
  local.on("error", () => req.destroy());
  local.once("close", () => req.destroy());
  req.on("upgrade", (_res, remote: Socket, early: Buffer) => {
    remote.setNoDelay(true);
    if (early.length > 0) local.write(early);
    local.pipe(remote).pipe(local);
    const cut = (): void => {
      local.destroy();
      remote.destroy();
    };
    for (const s of [local, remote]) s.on("error", cut);
    remote.once("close", () => local.destroySoon());
    local.once("close", () => remote.destroySoon());
  });
  req.on("response", (res: IncomingMessage) => {
    let text = "";
    res.setEncoding("utf8");
    res.on("data", (d: string) => (text = (text + d).slice(0, MAX_REFUSAL)));
    res.on("close", () => {
      refused(messageIn(text) ?? `the node answered with ${res.statusCode}`);
      local.resetAndDestroy();
    });
  });
  req.on("error", (e) => {
    if (!local.destroyed) refused(e.message);
    local.destroy();
  });
  req.end();
}

function messageIn(text: string): string | undefined {
  try {
    const { message } = JSON.parse(text) as { message?: unknown };
    return typeof message === "string" ? message : undefined;
  } catch {
    return undefined;
  }
}
