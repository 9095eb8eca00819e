import assert from "node:assert/strict";
import { once } from "node:events";
import { mkdtempSync, rmSync } from "node:fs";
import { createServer, type Socket } from "node:net";
import { join } from "node:path";
import { tmpdir } from "node:os";
import { createInterface } from "node:readline";
import { test, type TestContext } from "node:test";
import { silentLogger } from "@aenv/base";
import { GatewayClient } from "./client.ts";
import type { Request } from "./control.ts";

/** A gateway that remembers what it is told; `answer` false: it never answers but to hello. */
async function fakeGateway(t: TestContext) {
  const folder = mkdtempSync(join(tmpdir(), "aenv-client-"));
  t.after(() => rmSync(folder, { recursive: true }));
  const path = join(folder, "s");
  const told: Request[] = [];
  const state = { answer: true, sockets: [] as Socket[], waiting: [] as (() => void)[] };
  const server = createServer((socket) => {
    state.sockets.push(socket);
    socket.on("error", () => {});
    const lines = createInterface({ input: socket });
    lines.on("error", () => {});
    lines.on("line", (line) => {
      const request = JSON.parse(line) as Request;
      told.push(request);
      for (const w of state.waiting.splice(0)) w();
      if (state.answer || request.op === "hello")
        socket.write(`${JSON.stringify({ id: request.id, tcpPort: 1, dnsPort: 2, uid: 3 })}\n`);
    });
  });
  server.listen(path);
  await once(server, "listening");
  t.after(() => server.close());
  const until = async (fits: () => boolean): Promise<void> => {
    while (!fits()) await new Promise<void>((resolve) => state.waiting.push(resolve));
  };
  return { path, told, state, until };
}

test("a gateway that is back is told everything anew, and nothing of guests that are gone", {
  timeout: 30_000,
}, async (t) => {
  const gateway = await fakeGateway(t);
  const client = await GatewayClient.open(gateway.path, silentLogger);
  t.after(() => client.close());
  assert.deepEqual(client.place, { tcpPort: 1, dnsPort: 2, uid: 3 });
  await client.configure({ denied: ["10.0.0.0/8"], dns: ["9.9.9.9"] });
  const policy = { allowInternet: false, domains: ["a.test"] };
  for (const guest of ["1.1.1.1", "2.2.2.2", "3.3.3.3"]) await client.setPolicy(guest, policy);
  await client.setPolicy("2.2.2.2", undefined);
  await client.retain(["1.1.1.1"]);
  const from = gateway.told.length;
  // What a process leaves that is killed: with something unread it is a reset, not an end.
  gateway.state.sockets[0]?.pause();
  const lost = client.setPolicy("1.1.1.1", policy);
  gateway.state.sockets[0]?.destroy();
  await assert.rejects(lost, { code: "UNAVAILABLE" });
  await gateway.until(() => gateway.told.slice(from).some((r) => r.op === "policy"));
  assert.deepEqual(
    gateway.told.slice(from).map(({ id: _id, ...order }) => order),
    [
      { op: "hello" },
      { op: "configure", denied: ["10.0.0.0/8"], dns: ["9.9.9.9"] },
      { op: "policy", guest: "1.1.1.1", policy },
    ],
  );
});

test("an order to a gateway that goes away fails, and the rules before it are what the next one is told", {
  timeout: 30_000,
}, async (t) => {
  const gateway = await fakeGateway(t);
  const client = await GatewayClient.open(gateway.path, silentLogger);
  t.after(() => client.close());
  const before = { allowInternet: false, domains: ["a.test"] };
  await client.setPolicy("1.1.1.1", before);
  gateway.state.answer = false;
  const change = client.setPolicy("1.1.1.1", { allowInternet: false, domains: ["b.test"] });
  await gateway.until(() => gateway.told.filter((r) => r.op === "policy").length === 2);
  const from = gateway.told.length;
  gateway.state.answer = true;
  gateway.state.sockets[0]?.destroy();
  await assert.rejects(change, { code: "UNAVAILABLE" });
  await gateway.until(() => gateway.told.slice(from).some((r) => r.op === "policy"));
  const again = gateway.told.slice(from).find((r) => r.op === "policy");
  assert.deepEqual(again?.op === "policy" && again.policy, before);
});

test("a gateway that is not there is an error that says so", async () => {
  await assert.rejects(GatewayClient.open("/nonexistent/socket", silentLogger), { code: "UNAVAILABLE" });
});
