import assert from "node:assert/strict";
import { Resolver } from "node:dns/promises";
import { test } from "node:test";
import { silentLogger } from "@aenv/base";
import fc from "fast-check";
import { answerDns, DnsServer } from "./dns.ts";

const ADDRESSES = ["192.0.2.7", "2001:db8::7"];

test("node's resolver gets the node's addresses for the domain and all below it, and a refusal for the rest", async (t) => {
  const server = await DnsServer.open({
    listen: "127.0.0.1:0",
    domain: "SB.example.test:8000",
    addresses: ADDRESSES,
    logger: silentLogger,
  });
  t.after(() => server[Symbol.asyncDispose]());
  const resolver = new Resolver();
  resolver.setServers([`127.0.0.1:${server.port}`]);
  for (const name of ["sb.example.test", "api.sb.example.test", "49983-iabc.SB.example.test"]) {
    assert.deepEqual(await resolver.resolve4(name), ["192.0.2.7"], name);
    assert.deepEqual(await resolver.resolve6(name), ["2001:db8::7"], name);
  }
  await assert.rejects(resolver.resolveMx("sb.example.test"), { code: "ENODATA" });
  for (const name of ["example.test", "evilsb.example.test", "sb.example.test.evil"]) {
    await assert.rejects(resolver.resolve4(name), { code: "EREFUSED" }, name);
  }
});

test("no packet breaks it, gets an answer that is much larger, or an answer to an answer", () => {
  const answers = { domain: "a.test", addresses: ADDRESSES };
  const question = Buffer.from("000101000001000000000000016104746573740000ff0001", "hex");
  assert.ok(answerDns(question, answers));
  fc.assert(
    fc.property(
      fc.oneof(
        fc.uint8Array({ maxLength: 600 }),
        fc.tuple(fc.nat(question.length - 1), fc.nat(255)).map(([at, byte]) => {
          const changed = Uint8Array.from(question);
          changed[at] = byte;
          return changed;
        }),
      ),
      (packet) => {
        const answer = answerDns(Buffer.from(packet), answers);
        if ((packet[2] ?? 0) & 0x80) assert.equal(answer, undefined);
        assert.ok((answer?.length ?? 0) <= packet.length + 60);
      },
    ),
  );
});

test("an address to listen on or to answer that is none is refused by name", async () => {
  const o = { domain: "a.test", addresses: ADDRESSES, logger: silentLogger };
  await assert.rejects(DnsServer.open({ ...o, listen: "localhost:53" }), /dns\.listen/);
  await assert.rejects(DnsServer.open({ ...o, listen: "127.0.0.1" }), /dns\.listen/);
  await assert.rejects(DnsServer.open({ ...o, listen: "127.0.0.1:0", addresses: ["node"] }), /dns\.answer.*node/);
  await assert.rejects(DnsServer.open({ ...o, listen: "127.0.0.1:0", addresses: [] }), /dns\.answer/);
});
