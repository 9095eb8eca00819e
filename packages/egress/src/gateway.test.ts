import assert from "node:assert/strict";
import { once } from "node:events";
import { connect, createServer, type Socket } from "node:net";
import { test, type TestContext } from "node:test";
import { type Logger, silentLogger } from "@aenv/base";
import { EgressGateway } from "./gateway.ts";
import { Names } from "./names.ts";

const nobody = { setServers: () => {}, resolve4: async () => [] };

/** A gateway on the loopback device, where guest and destination are both 127.0.0.1. */
async function start(t: TestContext, logger: Logger = silentLogger) {
  const now = (): number => 1;
  const gateway = new EgressGateway({ names: new Names(nobody, now), logger, now });
  gateway.configure({ denied: [], dns: ["127.0.0.1"] });
  const server = createServer({ allowHalfOpen: true, pauseOnConnect: true }, (s) => void gateway.serve(s));
  server.listen(0, "127.0.0.1");
  await once(server, "listening");
  t.after(() => server.close());
  t.after(() => gateway.retain([]));
  const { port } = server.address() as { port: number };
  const dial = (): Socket => {
    const socket = connect(port, "127.0.0.1");
    socket.on("error", () => {});
    t.after(() => socket.destroy());
    return socket;
  };
  return { gateway, dial };
}

const BY_NAME = { allowInternet: false, domains: ["a.test"] };
const closed = (socket: Socket): Promise<unknown> => new Promise((resolve) => socket.once("close", resolve));

test("a guest that is refused again and again fills no log", async (t) => {
  let lines = 0;
  const { gateway, dial } = await start(t, { ...silentLogger, info: () => lines++ });
  gateway.setPolicy("127.0.0.1", BY_NAME);
  for (let i = 0; i < 60; i++) {
    const socket = dial();
    socket.write("SSH-2.0-x\r\n");
    await closed(socket);
  }
  assert.ok(lines > 0 && lines <= 20, `${lines} lines`);
});

test("a guest with very many connections gets no more, and loses none of its own", async (t) => {
  const { gateway, dial } = await start(t);
  gateway.setPolicy("127.0.0.1", BY_NAME);
  const held: Socket[] = [];
  for (let i = 0; i < 512; i++) {
    const socket = dial();
    await once(socket, "connect");
    held.push(socket);
  }
  await closed(dial());
  assert.equal(gateway.stats().connections, 512);
  assert.ok(held.every((s) => !s.destroyed));
  held[0]?.destroy();
  while (gateway.stats().connections === 512) await new Promise((resolve) => setImmediate(resolve));
  const next = dial();
  await once(next, "connect");
  while (gateway.stats().connections < 512) await new Promise((resolve) => setImmediate(resolve));
});

test("what is no DNS message, or from nobody, costs nothing and gets no names", async (t) => {
  const { gateway } = await start(t);
  assert.equal(await gateway.ask("127.0.0.1", Buffer.from("x")), undefined);
  const question = Buffer.from("004d01000001000000000000016104746573740000010001", "hex");
  const rcode = async (from: string): Promise<number | undefined> => {
    const answer = await gateway.ask(from, question);
    return answer && (answer[3] ?? 0) & 15;
  };
  assert.equal(await rcode("9.9.9.9"), 5);
  gateway.setPolicy("127.0.0.1", { allowInternet: true });
  assert.equal(await rcode("127.0.0.1"), 5, "a guest whose names are not ours");
  gateway.setPolicy("127.0.0.1", { allowInternet: false, domains: ["b.test"] });
  assert.equal(await rcode("127.0.0.1"), 3);
});
