import assert from "node:assert/strict";
import type { ChildProcess } from "node:child_process";
import { once } from "node:events";
import { existsSync, mkdtempSync, readFileSync, writeFileSync } from "node:fs";
import { rm } from "node:fs/promises";
import { connect } from "node:net";
import { after, before, describe, test } from "node:test";
import { silentLogger, sleep } from "@aenv/base";
import { GatewayClient } from "@aenv/egress";
import { run } from "@aenv/host";
import { issue, makeAuthority } from "@aenv/names";
import { egressPolicy, type EgressRules, Network, type NetworkOptions, type Slot } from "@aenv/network";
import { frames, goOnInOwnNamespaces, world } from "@aenv/network/testing";
import { clientHello, end, httpRequest, Peer, startGateway } from "../test/peers.ts";

goOnInOwnNamespaces();

const INSTANCE = "fe07";
const GATEWAY_UID = 199_999;
const CLOSED = ["0.0.0.0/0"];
const { SITE, OTHER_SITE, RESOLVER } = world;
/** An address of the internet that no name has. */
const NAMELESS = "93.184.216.99";
const RECORDS = {
  "allowed.test": [SITE],
  "deep.wild.test": [SITE],
  "wild.test": [SITE],
  "denied.test": [OTHER_SITE],
  "rebind.test": ["10.1.2.3"],
  "metadata.test": ["169.254.169.254"],
  "both.test": ["10.1.2.3", OTHER_SITE],
};

let outside: Peer;
let lan: world.Agent;
let greeter: world.Agent;
let daemon: ChildProcess;
let client: GatewayClient;
let network: Network;
let slot: Slot;
let guest: world.FakeGuest;
let inside: Peer;
const folder = mkdtempSync("/tmp/aenv-egress-test-");
/** The authority that everybody outside trusts, and that of the sandbox. */
const worldAuthority = makeAuthority("world", Date.now());
const worldFile = `${folder}/world.crt`;
writeFileSync(worldFile, worldAuthority.cert);
const own = makeAuthority("sandbox", Date.now());
const socket = `${folder}/egress.sock`;

const options = (): NetworkOptions => ({
  instance: INSTANCE,
  limit: 8,
  dns: [RESOLVER],
  logger: silentLogger,
  gateway: client,
});

async function openGateway(): Promise<void> {
  daemon = await startGateway(socket, `${folder}/state`, GATEWAY_UID, worldFile);
  while (!existsSync(socket)) await sleep(20);
}

before(async () => {
  ({ outside: greeter, lan } = await world.makeWorld());
  await world.ip("-n", "outside", "addr", "add", `${NAMELESS}/32`, "dev", "lo");
  outside = new Peer("outside");
  await outside.do("dns", { host: RESOLVER });
  await outside.do("records", { records: RECORDS });
  for (const host of [SITE, OTHER_SITE, NAMELESS, ...world.PRIVATE])
    for (const port of [80, 443, 8443]) await outside.do("site", { host, port });
  await openGateway();
  client = await GatewayClient.open(socket, silentLogger);
  network = await Network.open(options());
  slot = await network.acquire();
  guest = await world.FakeGuest.plug(slot, "guest");
  inside = new Peer("guest");
});

after(async () => {
  await Promise.all([inside?.stop(), guest?.unplug(), outside?.stop(), greeter?.stop(), lan?.stop()]);
  await network?.destroy();
  client?.close();
  if (daemon) await end(daemon);
});

const rules = async (r: Partial<EgressRules>): Promise<void> =>
  network.setPolicy(slot, egressPolicy({ allowInternet: null, ...r }));
const lookup = (text: string, resolver = RESOLVER): Promise<string> => inside.do("lookup", { host: resolver, text });
const questions = (): string[] => outside.events.all.filter((e) => e.event === "question").map((e) => e.text);

describe("a sandbox that may reach names only", () => {
  before(() =>
    rules({
      allowOut: ["allowed.test", "*.wild.test", "rebind.test", "metadata.test", "both.test", "turns.test"],
      denyOut: CLOSED,
    }),
  );

  test("reaches them over TLS and HTTP on any port, from the host's address", async () => {
    assert.equal(await lookup("A allowed.test"), JSON.stringify([SITE]));
    assert.equal(await inside.say(SITE, 443, clientHello("allowed.test")), `site ${SITE}\n`);
    assert.equal(await inside.say(SITE, 8443, clientHello("allowed.test")), `site ${SITE}\n`);
    assert.equal(await inside.say(SITE, 80, httpRequest("Allowed.TEST")), `site ${SITE}\n`);
    assert.ok(outside.events.all.every((e) => e.from === world.HOST_UPLINK));
  });

  test("reaches what is below a wildcard, and not the name itself", async () => {
    assert.equal(await inside.say(SITE, 443, clientHello("deep.wild.test")), `site ${SITE}\n`);
    assert.equal(await inside.say(SITE, 443, clientHello("wild.test")), "error ECONNRESET");
    assert.equal(await lookup("A wild.test"), "error ENOTFOUND");
  });

  test("reaches no other name, no address without one, and no other address under an allowed name", async () => {
    for (const [address, word] of [
      [OTHER_SITE, clientHello("denied.test")],
      [SITE, clientHello("denied.test")],
      [SITE, clientHello(undefined)],
      [SITE, httpRequest("denied.test")],
      [SITE, httpRequest("allowed.test\r\nHost: denied.test")],
      [SITE, httpRequest("allowed.test", "http://denied.test/")],
      [SITE, httpRequest(SITE)],
      [SITE, "SSH-2.0-x\r\n"],
      [NAMELESS, clientHello("allowed.test")],
      [NAMELESS, httpRequest("allowed.test")],
    ] as const)
      assert.equal(await inside.say(address, 443, word), "error ECONNRESET", word);
    assert.ok(!outside.events.all.some((e) => e.event === "said" && e.host !== SITE));
  });

  test("asks nobody for other names or other kinds of records, at whatever resolver", async () => {
    const from = questions().length;
    assert.equal(await lookup("A secret-data.denied.test"), "error ENOTFOUND");
    assert.equal(await lookup("A secret-data.denied.test", NAMELESS), "error ENOTFOUND");
    assert.equal(await lookup("TXT allowed.test"), "error ENODATA");
    assert.equal(await lookup("AAAA allowed.test"), "error ENODATA");
    assert.equal(await lookup("TXT secret-data.denied.test"), "error ENOTFOUND");
    assert.deepEqual(questions().slice(from), []);
  });

  test("gets no private address for a name, also when it had another before", async () => {
    assert.equal(await lookup("A rebind.test"), "error ENOTFOUND");
    assert.equal(await lookup("A metadata.test"), "error ENOTFOUND");
    assert.equal(await lookup("A both.test"), JSON.stringify([OTHER_SITE]));
    assert.equal(await inside.say(OTHER_SITE, 443, clientHello("both.test")), `site ${OTHER_SITE}\n`);
    await outside.do("records", { records: { ...RECORDS, "turns.test": [NAMELESS] } });
    assert.equal(await lookup("A turns.test"), JSON.stringify([NAMELESS]));
    await outside.do("records", { records: { ...RECORDS, "turns.test": ["10.1.2.3"] } });
    assert.equal(await inside.say(NAMELESS, 443, clientHello("turns.test")), `site ${NAMELESS}\n`);
    // The name's time is over: the next answer is the new one.
    while ((await lookup("A turns.test")) === JSON.stringify([NAMELESS])) await sleep(200);
    assert.equal(await lookup("A turns.test"), "error ENOTFOUND");
    assert.ok(!outside.events.all.some((e) => e.event === "said" && world.PRIVATE.includes(e.host)));
  });

  test("reaches nothing over UDP or ping, and learns so at once", async () => {
    const refusals = (): number => guest.seen.all.filter((s) => s.kind === "icmp" && s.code === 3).length;
    for (const frame of [frames.udp(SITE, 443, "quic"), frames.ping(SITE, 7)]) {
      const before = refusals();
      const again = setInterval(() => guest.send(frame), 100);
      await guest.seen.until("the refusal", () => refusals() > before).finally(() => clearInterval(again));
    }
    assert.ok(!greeter.heard.all.some((h) => h.text === "quic"));
  });
});

describe("a change of the rules", () => {
  const numbered = async (host: string, word: string): Promise<number> => {
    assert.equal(await inside.say(host, 443, word), `site ${host}\n`);
    return inside.last;
  };
  const more = (connection: number): Promise<string> => inside.do("more", { port: connection, text: "x" });

  test("cuts open connections to names that are denied now, and no others", async () => {
    await rules({ allowOut: ["allowed.test", "both.test"], denyOut: CLOSED });
    const one = await numbered(SITE, clientHello("allowed.test"));
    const two = await numbered(OTHER_SITE, clientHello("both.test"));
    await rules({ allowOut: ["both.test"], denyOut: CLOSED });
    assert.equal(await more(one), "error ECONNRESET");
    assert.equal(await more(two), "again x");
    assert.equal(await inside.say(SITE, 443, clientHello("allowed.test")), "error ECONNRESET");
    // By its address now, then by nothing.
    await rules({ allowOut: [OTHER_SITE], denyOut: CLOSED });
    assert.equal(await more(two), "again x");
    await rules({});
    assert.equal(await more(two), "again x");
    await rules({ denyOut: CLOSED });
    assert.equal(await more(two), "error ECONNRESET");
  });

  test("cuts open connections that went past the gateway and would have to go through it", async () => {
    await rules({});
    const one = await numbered(SITE, clientHello("denied.test"));
    await rules({ allowOut: ["allowed.test"], denyOut: CLOSED });
    assert.equal(await more(one), "error ECONNRESET");
  });

  test("gives names back to the resolvers that the sandbox asks, or takes them away", async () => {
    await rules({ allowOut: ["allowed.test"], denyOut: CLOSED });
    assert.equal(await lookup("A denied.test"), "error ENOTFOUND");
    await rules({});
    assert.equal(await lookup("A denied.test"), JSON.stringify([OTHER_SITE]));
    await rules({ denyOut: CLOSED });
    const from = questions().length;
    assert.match(await lookup("A allowed.test"), /^error/);
    assert.deepEqual(questions().slice(from), []);
  });
});

describe("with a proxy", () => {
  const PROXY = OTHER_SITE;
  const proxied = (): string[] => outside.events.all.filter((e) => e.event === "proxied").map((e) => e.text);
  before(async () => {
    await outside.do("socks", { host: PROXY, port: 1080, login: "" });
    await outside.do("socks", { host: PROXY, port: 1081, login: "me:secret" });
  });

  test("everything over TCP goes through it, whoever speaks first, and the rules hold before it", async () => {
    await rules({ egressProxy: { address: `${PROXY}:1080` }, denyOut: [NAMELESS] });
    assert.equal(await inside.say(SITE, 8443, "SSH-2.0-x"), `site ${SITE}\n`);
    assert.deepEqual(proxied(), [`${SITE}:8443`]);
    assert.equal(outside.events.all.at(-1)?.from, SITE, "the site is asked by the proxy");
    assert.match(await inside.say(NAMELESS, 80, httpRequest("x.test")), /^error E(HOSTUNREACH|CONNRESET)/);
    assert.deepEqual(proxied().length, 1);
    assert.equal(await lookup("A denied.test"), JSON.stringify([OTHER_SITE]));
    const word = "past the proxy";
    guest.send(frames.udp(SITE, 80, word));
    await guest.seen.until("the refusal", (s) => s.kind === "icmp" && s.code === 3);
    assert.ok(!greeter.heard.all.some((h) => h.text === word));
  });

  test("a login is given, and a proxy that refuses lets nothing through", async () => {
    const address = "socks5://proxy.test:1081";
    await outside.do("records", { records: { ...RECORDS, "proxy.test": [PROXY], "inner.test": ["10.1.2.3"] } });
    await rules({ egressProxy: { address, username: "me", password: "secret" } });
    assert.equal(await inside.say(SITE, 80, "hello"), `site ${SITE}\n`);
    const from = outside.events.all.length;
    for (const egressProxy of [
      { address, username: "me", password: "wrong" },
      { address },
      { address: `${NAMELESS}:1` },
      { address: "10.1.2.3:80" },
      { address: "inner.test:80" },
      { address: "127.0.0.1:22" },
    ]) {
      await rules({ egressProxy });
      assert.equal(await inside.say(SITE, 80, "hello"), "error ECONNRESET", egressProxy.address);
    }
    assert.deepEqual(
      outside.events.all.slice(from).filter((e) => e.event !== "question"),
      [],
    );
  });

  test("names are judged before it as well", async () => {
    await rules({ egressProxy: { address: `${PROXY}:1080` }, allowOut: ["allowed.test"], denyOut: CLOSED });
    const from = proxied().length;
    assert.equal(await inside.say(SITE, 443, clientHello("allowed.test")), `site ${SITE}\n`);
    assert.equal(await inside.say(SITE, 443, clientHello("denied.test")), "error ECONNRESET");
    assert.deepEqual(proxied().slice(from), [`${SITE}:443`]);
  });
});

describe("with transforms", () => {
  const TLS_SITE = "93.184.216.77";
  const secret = { "x-secret": "for the server only", "X-Other": "1" };
  const get = (name: string, more: object = {}, host = TLS_SITE): Promise<string> =>
    inside.do("fetch", { host, port: 443, text: name, cert: own.cert, ...more });
  const answered = (text: string): { method: string; url: string; headers: string[]; body: string } => {
    assert.match(text, /^200 /);
    return JSON.parse(text.slice(4)) as { method: string; url: string; headers: string[]; body: string };
  };
  const transform = async (r: Partial<EgressRules> = {}): Promise<void> =>
    network.setPolicy(slot, {
      ...egressPolicy({ allowInternet: null, rules: { "api.test": [{ transform: { headers: secret } }] }, ...r }),
      authority: own,
    });

  before(async () => {
    await world.ip("-n", "outside", "addr", "add", `${TLS_SITE}/32`, "dev", "lo");
    const names = ["api.test", "plain.test", "a.wild.test", "a.b.wild.test", "api.wild.test"];
    await outside.do("secure", { host: TLS_SITE, port: 443, ...issue(worldAuthority, names, Date.now()) });
    await outside.do("records", { records: { ...RECORDS, "api.test": [TLS_SITE], "plain.test": [TLS_SITE] } });
    await transform();
  });

  test("requests to the host get the headers in place of the guest's own, bodies and answers pass", async () => {
    const headers = { "X-SECRET": "guest's", "x-mine": "kept" };
    const got = answered(await get("api.test", { headers, body: "a body" }));
    assert.deepEqual([got.method, got.url, got.body], ["POST", "/x?y", "a body"]);
    const pairs = got.headers.flatMap((h, i) => (i % 2 === 0 ? [[h.toLowerCase(), got.headers[i + 1]]] : []));
    assert.deepEqual(
      pairs.filter(([n]) => n?.startsWith("x-")).sort((a, b) => String(a[0]).localeCompare(String(b[0]))),
      [
        ["x-mine", "kept"],
        ["x-other", "1"],
        ["x-secret", "for the server only"],
      ],
    );
    assert.deepEqual(
      pairs.filter(([n]) => n === "host"),
      [["host", "api.test"]],
    );
  });

  test("a connection that becomes another protocol gets them as well", async () => {
    const headers = { connection: "Upgrade", upgrade: "echo" };
    assert.equal(await get("api.test", { headers }), "101 for the server onlyping");
  });

  test("other hosts are not opened", async () => {
    assert.equal(await get("plain.test"), "error SELF_SIGNED_CERT_IN_CHAIN");
    const got = answered(await get("plain.test", { cert: worldAuthority.cert }));
    assert.ok(!got.headers.includes("for the server only"));
    assert.equal(await inside.say(SITE, 443, "SSH-2.0-x\r\n"), `site ${SITE}\n`);
  });

  test("HTTP/3 does not go past them", async () => {
    const refusals = (): number => guest.seen.all.filter((s) => s.kind === "icmp" && s.code === 3).length;
    const before = refusals();
    // The kernel sends few refusals a second to anyone.
    const again = setInterval(() => guest.send(frames.udp(TLS_SITE, 443, "quic with no headers")), 100);
    await guest.seen.until("the refusal", () => refusals() > before).finally(() => clearInterval(again));
    assert.ok(!greeter.heard.all.some((h) => h.text === "quic with no headers"));
  });

  test("nobody but the host's own server learns the headers", async () => {
    // A server that only the sandbox's authority vouches for.
    await world.ip("-n", "outside", "addr", "add", "93.184.216.78/32", "dev", "lo");
    await outside.do("secure", { host: "93.184.216.78", port: 443, ...issue(own, ["api.test"], Date.now()) });
    assert.match(await get("api.test", {}, "93.184.216.78"), /^502 /);
    assert.match(await get("api.test", { headers: { host: "plain.test" } }), /^421 /);
  });

  test("the longest wildcard holds where no row names the host, and a change cuts what goes on under the old one", async () => {
    const rows = { "*.b.wild.test": "long", "*.wild.test": "short", "api.wild.test": "exact" };
    const rules_ = Object.fromEntries(
      Object.entries(rows).map(([d, v]) => [d, [{ transform: { headers: { "x-row": v } } }]]),
    );
    await transform({ rules: rules_ });
    for (const [name, row] of [
      ["a.b.wild.test", "long"],
      ["a.wild.test", "short"],
      ["api.wild.test", "exact"],
    ] as const)
      assert.ok(answered(await get(name)).headers.includes(row), name);
  });

  test("a transform opens nothing that the rules close, and goes through the proxy", async () => {
    await transform({ denyOut: [TLS_SITE] });
    assert.match(await get("api.test"), /^error E(HOSTUNREACH|CONNRESET)/);
    await transform({ allowOut: ["plain.test"], denyOut: CLOSED });
    assert.equal(await get("api.test"), "error ECONNRESET");
    await transform({ egressProxy: { address: `${OTHER_SITE}:1080` } });
    const from = outside.events.all.length;
    assert.ok(answered(await get("api.test")).headers.includes("for the server only"));
    assert.deepEqual(
      outside.events.all
        .slice(from)
        .filter((e) => e.event === "proxied")
        .map((e) => e.text),
      [`${TLS_SITE}:443`],
    );
  });
});

describe("the gateway", () => {
  before(async () => {
    await outside.do("records", { records: RECORDS });
    await rules({ allowOut: ["allowed.test"], denyOut: CLOSED });
  });

  test("goes on without the server, and the next one takes it over with its connections", async () => {
    assert.equal(await inside.say(SITE, 443, clientHello("allowed.test")), `site ${SITE}\n`);
    const connection = inside.last;
    await network.close();
    client.close();
    assert.equal(await inside.say(SITE, 443, clientHello("allowed.test")), `site ${SITE}\n`);
    client = await GatewayClient.open(socket, silentLogger);
    network = await Network.open(options());
    [slot] = network.adopt([slot.index]) as [Slot];
    await network.sweep();
    assert.equal(await inside.do("more", { port: connection, text: "x" }), "again x");
    // Nobody told the new server that the gateway has connections of this slot.
    await rules({ denyOut: [SITE] });
    assert.equal(await inside.do("more", { port: connection, text: "x" }), "error ECONNRESET");
  });

  test("lets nothing past while it is away, and is told everything when it is back", async () => {
    await rules({ allowOut: ["allowed.test"], denyOut: CLOSED });
    const from = outside.events.all.length;
    await end(daemon);
    assert.equal(await inside.say(SITE, 443, clientHello("allowed.test")), "error ECONNREFUSED");
    await rm(socket, { force: true });
    await openGateway();
    while ((await inside.say(SITE, 443, clientHello("allowed.test"))) !== `site ${SITE}\n`) await sleep(50);
    assert.equal(await inside.say(SITE, 443, clientHello("denied.test")), "error ECONNRESET");
    assert.ok(!outside.events.all.slice(from).some((e) => e.text === clientHello("denied.test")));
  });

  test("runs without root, and reaches no more than guests do", async () => {
    const status = readFileSync(`/proc/${daemon.pid}/status`, "utf8");
    assert.match(status, new RegExp(`^Uid:\\s${GATEWAY_UID}\\s${GATEWAY_UID}\\s${GATEWAY_UID}`, "m"));
    assert.match(status, /^CapEff:\s0+$/m);
    const knock = `const s=require("net").connect(80,"10.1.2.3");s.on("connect",()=>console.log("in"));s.on("error",e=>console.log(e.code))`;
    const { stdout } = await run("setpriv", [
      `--reuid=${GATEWAY_UID}`,
      "--clear-groups",
      process.execPath,
      "-e",
      knock,
    ]);
    assert.match(stdout, /^E/);
  });

  test("serves nobody but guests", async () => {
    const { tcpPort } = client.place;
    const s = connect(tcpPort, "127.0.0.1");
    const [e] = (await once(s, "error")) as [NodeJS.ErrnoException];
    assert.equal(e.code, "ECONNRESET");
  });

  test("forgets a slot with its owner", async () => {
    await guest.unplug();
    await inside.stop();
    await network.release(slot);
    slot = await network.acquire();
    guest = await world.FakeGuest.plug(slot, "guest");
    inside = new Peer("guest");
    assert.equal(await inside.say(SITE, 443, clientHello("denied.test")), `site ${SITE}\n`);
  });
});
