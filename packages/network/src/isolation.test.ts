import assert from "node:assert/strict";
import { createSocket } from "node:dgram";
import { writeFile } from "node:fs/promises";
import { after, before, describe, test } from "node:test";
import { silentLogger } from "@aenv/base";
import { run } from "@aenv/host";
import { arp, otherProtocol, ping, ping6, type Seen, tcpSyn, udp } from "../test/frames.ts";
import { goOnInOwnNamespaces } from "../test/namespace.ts";
import * as world from "../test/world.ts";
import { Network } from "./network.ts";
import { GATEWAY_IP, GATEWAY_MAC, GUEST_IP, GUEST_MAC } from "./rules.ts";
import type { Slot } from "./types.ts";

goOnInOwnNamespaces();

const INSTANCE = "fe01";
const API_PORT = 8000;
/** A public address of the test's host. */
const HOST_PUBLIC = "93.184.1.1";

let outside: world.Agent;
let lan: world.Agent;
let host: world.Agent;
let network: Network;
let slotA: Slot;
let slotB: Slot;
let a: world.FakeGuest;
let b: world.FakeGuest;
const socket = createSocket("udp4");
let marks = 0;

before(async () => {
  ({ outside, lan } = await world.makeWorld());
  await world.ip("addr", "add", `${HOST_PUBLIC}/32`, "dev", "eth0");
  host = new world.Agent();
  await host.listen("0.0.0.0", API_PORT);
  for (const site of [world.SITE, world.OTHER_SITE, world.RESOLVER, ...world.PRIVATE, "192.168.7.1"])
    await outside.listen(site, 80);
  for (const site of [world.SITE, world.RESOLVER]) await outside.listen(site, 53);
  await lan.listen(world.LAN, 80);
  network = await Network.open({ instance: INSTANCE, limit: 8, dns: [world.RESOLVER], logger: silentLogger });
  await network.ensure(2);
  slotA = await network.acquire();
  slotB = await network.acquire();
  a = await world.FakeGuest.plug(slotA, "guest-a");
  b = await world.FakeGuest.plug(slotB, "guest-b");
  for (const guest of [a, b]) await guest.agent.listen("0.0.0.0", 80);
});

after(async () => {
  socket.close();
  await Promise.all([a?.unplug(), b?.unplug(), outside?.stop(), lan?.stop(), host?.stop()]);
  await network?.destroy();
});

/** Host side of a slot's veth: the address before the slot's. */
const hostSide = (slot: Slot): string => slot.hostIp.replace(/\d+$/, (n) => String(Number(n) - 1));

interface Target {
  name: string;
  address: string;
  port: number;
}

const forbidden = (): Target[] => [
  ...world.PRIVATE.map((address) => ({ name: "a private, shared or metadata address", address, port: 80 })),
  { name: "the router", address: "192.168.7.1", port: 80 },
  { name: "another port of the resolver", address: world.RESOLVER, port: 80 },
  { name: "the host's uplink address", address: world.HOST_UPLINK, port: API_PORT },
  { name: "the host's public address", address: HOST_PUBLIC, port: API_PORT },
  { name: "the host's other address", address: world.HOST_LAN, port: API_PORT },
  { name: "the host's end of the veth", address: hostSide(slotA), port: API_PORT },
  { name: "the host's end of the neighbour's veth", address: hostSide(slotB), port: API_PORT },
  { name: "the host's loopback", address: "127.0.0.1", port: API_PORT },
  { name: "a machine on the host's other device", address: world.LAN, port: 80 },
  { name: "the neighbour", address: slotB.hostIp, port: 80 },
  { name: "everyone", address: "255.255.255.255", port: API_PORT },
  { name: "everyone on the link", address: "169.254.0.23", port: 80 },
  { name: "a multicast group", address: "224.0.0.251", port: API_PORT },
];

/** What a guest's own namespace answers for, and the host never sees. */
const ownNamespace = (): Target[] => [
  { name: "the gateway", address: GATEWAY_IP, port: API_PORT },
  { name: "its own slot's address", address: slotA.hostIp, port: 80 },
];

/**
 * Waits until every listener has handled all that was sent to it so far: each gets a datagram straight from the host,
 * queued behind whatever the guest got through.
 */
async function settle(): Promise<void> {
  const mark = `mark ${++marks}`;
  const listeners: [world.Agent, string, number][] = [
    [host, "127.0.0.1", API_PORT],
    [lan, world.LAN, 80],
    [b.agent, slotB.hostIp, 80],
    ...[world.SITE, world.OTHER_SITE, world.RESOLVER, ...world.PRIVATE, "192.168.7.1"].map(
      (site): [world.Agent, string, number] => [outside, site, 80],
    ),
  ];
  // From the guest: its own frames before this one have passed when the answer is back.
  const srcPort = 20_000 + marks;
  a.send(udp(world.SITE, 80, mark, { srcPort }));
  await a.seen.until("the answer to the mark", (s) => s.kind === "udp" && s.dstPort === srcPort);
  for (const [agent, address, port] of listeners) {
    const direct = `${mark} to ${address}`;
    socket.send(direct, port, address);
    await agent.heard.until(direct, (h) => h.text === direct);
  }
}

/** A reset, or ICMP's "unreachable": what a guest gets that is refused. */
const RST = 0x04;
const UNREACHABLE = 3;
const isRefusal = (s: Seen): boolean =>
  (s.kind === "tcp" && (s.code & RST) !== 0) || (s.kind === "icmp" && s.code === UNREACHABLE && s.src === GATEWAY_IP);

/** Sends to each target what a guest could try, and asserts that nobody heard it and nothing came back but refusals. */
async function assertUnreachable(targets: readonly Target[]): Promise<void> {
  const word = `knock ${++marks}`;
  const frames = targets.flatMap(({ address, port }, i) => [
    udp(address, port, word, { srcPort: 6000 + i }),
    tcpSyn(address, port, 7000 + i),
    ping(address, 100 + i),
  ]);
  const from = a.seen.all.length;
  a.send(...frames);
  await settle();
  const heard = [outside, lan, host, b.agent].flatMap((l) => l.heard.all).filter((h) => h.text === word);
  assert.deepEqual(heard, []);
  const back = a.seen.all.slice(from).filter((s) => s.src !== world.SITE && !isRefusal(s));
  const names = back.map((s: Seen) => `${targets.find((t) => t.address === s.src)?.name}: ${JSON.stringify(s)}`);
  assert.deepEqual(names, []);
}

const hostNft = (text: string): Promise<unknown> => run("nft", ["-f", "-"], { input: text });
const slotNft = (text: string): Promise<unknown> =>
  run("nsenter", [`--net=/run/netns/${slotA.netns}`, "nft", "-f", "-"], { input: text });

describe("a guest reaches", () => {
  test("the internet over TCP, UDP and ping, from the host's address", async () => {
    assert.equal(await a.agent.connect(world.SITE, 80), `hello ${world.HOST_UPLINK}`);
    assert.equal(await a.agent.ask(world.OTHER_SITE, 80), `hello ${world.HOST_UPLINK}`);
    a.send(ping(world.SITE, 1));
    await a.seen.until("the answer to the ping", (s) => s.kind === "icmp" && s.code === 0 && s.src === world.SITE);
  });

  test("the resolver on port 53, private as its address is", async () => {
    assert.equal(await a.agent.connect(world.RESOLVER, 53), `hello ${world.HOST_UPLINK}`);
    assert.equal(await a.agent.ask(world.RESOLVER, 53), `hello ${world.HOST_UPLINK}`);
  });
});

describe("the host reaches", () => {
  test("any port of a guest at the slot's address, and the guest sees its gateway", async () => {
    await a.agent.listen("0.0.0.0", 49983);
    for (const port of [80, 49983]) assert.equal(await host.connect(slotA.hostIp, port), `hello ${GATEWAY_IP}`);
    assert.equal(await host.ask(slotB.hostIp, 80), `hello ${GATEWAY_IP}`);
  });
});

describe("a guest never reaches", () => {
  test("the host, other guests, private ranges, metadata or everyone", async () => {
    await assertUnreachable([...forbidden(), ...ownNamespace()]);
  });

  test("these by the rules in its namespace alone", async () => {
    const table = `inet aenv_${INSTANCE}`;
    await hostNft(["guard", "input", "forward"].map((c) => `flush chain ${table} ${c}`).join("\n"));
    try {
      await assertUnreachable([...forbidden(), ...ownNamespace()]);
    } finally {
      network = await Network.open({ instance: INSTANCE, limit: 8, dns: [world.RESOLVER], logger: silentLogger });
      [slotA, slotB] = network.adopt([slotA.index, slotB.index]) as [Slot, Slot];
    }
  });

  test("these by the rules on the host alone", async () => {
    const table = `inet aenv_${INSTANCE}`;
    const saved = (await run("nsenter", [`--net=/run/netns/${slotA.netns}`, "nft", "list", "ruleset"])).stdout;
    const rpFilter = `/proc/sys/net/ipv4/conf/av${INSTANCE}-${slotA.index}/rp_filter`;
    const open = ["guard", "input", "output", "forward"].map((c) => `delete chain ${table} ${c}`);
    await slotNft(`delete table netdev aenv_${INSTANCE}\n${open.join("\n")}`);
    try {
      await assertUnreachable(forbidden());
      // Spoofed sources, which no rule of the namespace translates any more.
      await slotNft(`flush chain ${table} to_src`);
      await world.inNetns(slotA.netns, "sh", "-c", "echo 0 | tee /proc/sys/net/ipv4/conf/*/rp_filter");
      await writeFile(rpFilter, "0");
      for (const srcIp of [slotB.hostIp, world.LAN, world.SITE, "8.8.8.8"])
        a.send(udp(world.OTHER_SITE, 80, "spoofed past the namespace", { srcIp }));
    } finally {
      await slotNft(`flush ruleset\n${saved}`);
      await writeFile(rpFilter, "1");
    }
    await settle();
    assert.ok(!outside.heard.all.some((h) => h.text === "spoofed past the namespace"));
  });

  test("the internet with a source address, MAC or protocol that is not its own", async () => {
    const word = "spoofed";
    for (const srcIp of ["169.254.0.20", GATEWAY_IP, slotA.hostIp, slotB.hostIp, "8.8.8.8", "127.0.0.1", "0.0.0.0"])
      a.send(udp(world.OTHER_SITE, 80, word, { srcIp }));
    a.send(udp(world.OTHER_SITE, 80, word, { srcMac: "02:fc:00:00:00:06" }));
    a.send(udp(world.OTHER_SITE, 80, word, { srcMac: GATEWAY_MAC }));
    a.send(udp(world.OTHER_SITE, 80, word, { dstMac: "ff:ff:ff:ff:ff:ff" }));
    const from = a.seen.all.length;
    for (const protocol of [2, 4, 41, 47, 50, 132]) a.send(otherProtocol(world.SITE, protocol));
    await settle();
    assert.ok(!outside.heard.all.some((h) => h.text === word));
    // A kernel that gets a protocol it does not speak says so over ICMP.
    assert.deepEqual(
      a.seen.all.slice(from).filter((s) => s.kind === "icmp"),
      [],
    );
  });

  test("anything over IPv6", async () => {
    const from = a.seen.all.length;
    a.send(ping6());
    await settle();
    assert.deepEqual(
      a.seen.all.slice(from).filter((s) => s.kind === "other"),
      [],
    );
    assert.equal(await world.inNetns(slotA.netns, "cat", "/proc/net/if_inet6"), "");
    const { stdout } = await run("ip", ["-6", "-o", "addr", "show", "dev", `av${INSTANCE}-${slotA.index}`]);
    assert.equal(stdout, "");
  });
});

test("a guest that asks for a private range or another guest is refused at once", async () => {
  for (const { address, port } of [
    ...world.PRIVATE.map((p) => ({ address: p, port: 80 })),
    { address: slotB.hostIp, port: 80 },
  ])
    assert.match(await a.agent.connect(address, port), /^error (ECONNREFUSED|EHOSTUNREACH)$/, address);
  const from = a.seen.all.length;
  // The kernel answers one guest with few of these in a second: it may have to be asked again.
  const asking = setInterval(() => a.send(udp("10.9.9.9", 80, "refused")), 100);
  try {
    await a.seen.until(
      "a refusal over ICMP",
      (s) => a.seen.all.indexOf(s) >= from && s.kind === "icmp" && isRefusal(s),
    );
  } finally {
    clearInterval(asking);
  }
});

test("a flood of what is refused is answered by far fewer refusals, and leaves no tracked connection", async () => {
  const before = await world.tracked(slotA.netns);
  const from = a.seen.all.length;
  const flood = 5000;
  for (let port = 1; port <= flood; port++) a.send(udp("10.9.9.9", port, "flood"), tcpSyn("10.9.9.9", port, 9000));
  await settle();
  assert.ok(a.seen.all.slice(from).filter(isRefusal).length < flood / 2);
  // The mark of settle() is a connection.
  assert.ok((await world.tracked(slotA.netns)) <= before + 1);
});

test("ARP answers for the gateway only, and only to the guest's own address", async () => {
  const from = a.seen.all.length;
  const replies = (): string[] =>
    a.seen.all
      .slice(from)
      .filter((s) => s.kind === "arp" && s.code === 2)
      .map((s) => s.src);
  a.send(
    ...["169.254.0.23", hostSide(slotA), slotA.hostIp, "169.254.169.254"].map((t) =>
      arp("request", GUEST_MAC, GUEST_IP, t),
    ),
    arp("request", "02:fc:00:00:00:99", GUEST_IP, GATEWAY_IP),
    arp("request", GUEST_MAC, "169.254.0.20", GATEWAY_IP),
    arp("reply", "02:fc:00:00:00:99", GUEST_IP, GATEWAY_IP),
    arp("reply", GUEST_MAC, GATEWAY_IP, GATEWAY_IP),
  );
  await settle();
  assert.deepEqual(replies(), []);
  a.send(arp("request", GUEST_MAC, GUEST_IP, GATEWAY_IP));
  await a.seen.until("the gateway's ARP reply", (s) => s.kind === "arp" && s.code === 2 && s.src === GATEWAY_IP);
  assert.equal(await host.connect(slotA.hostIp, 80), `hello ${GATEWAY_IP}`);
});

test("machines beyond the host do not reach a guest by routing to its slot", async () => {
  await world.ip("-n", "outside", "route", "add", slotA.hostIp, "via", world.HOST_UPLINK);
  for (const netns of ["outside", "lan"]) {
    const script = `require("dgram").createSocket("udp4").send("intruder", 80, "${slotA.hostIp}", () => process.exit(0))`;
    await world.inNetns(netns, process.execPath, "-e", script);
  }
  socket.send("after the intruder", 80, slotA.hostIp);
  await a.agent.heard.until("the host's datagram", (h) => h.text === "after the intruder");
  assert.ok(!a.agent.heard.all.some((h) => h.text === "intruder"));
});

test("a sandbox's policy holds for new connections at once, and is refused loudly", async () => {
  await network.setPolicy(slotA, { allowInternet: false });
  assert.equal(await a.agent.connect(world.SITE, 80), "error EHOSTUNREACH");
  assert.equal(await a.agent.connect(world.RESOLVER, 53), "error EHOSTUNREACH");
  assert.equal(await host.connect(slotA.hostIp, 80), `hello ${GATEWAY_IP}`);

  await network.setPolicy(slotA, { allowInternet: false, allow: [world.SITE, "10.0.0.0/8"] });
  assert.equal(await a.agent.connect(world.SITE, 80), `hello ${world.HOST_UPLINK}`);
  assert.equal(await a.agent.connect(world.OTHER_SITE, 80), "error EHOSTUNREACH");

  await network.setPolicy(slotA, { allowInternet: true, deny: ["93.184.0.0/16"], allow: [] });
  assert.equal(await a.agent.connect(world.SITE, 80), "error EHOSTUNREACH");
  assert.equal(await a.agent.connect(world.OTHER_SITE, 80), `hello ${world.HOST_UPLINK}`);
  assert.equal(await b.agent.connect(world.SITE, 80), `hello ${world.HOST_UPLINK}`);

  await network.setPolicy(slotA, { allowInternet: true, allow: ["0.0.0.0/0"] });
  await assertUnreachable(forbidden());
});

test("a slot leaves nothing to its next owner", async () => {
  await network.setPolicy(slotA, { allowInternet: false });
  const old = slotA;
  await world.ip("-n", slotA.netns, "addr", "add", "169.254.9.9/32", "dev", "lo");
  assert.ok((await world.tracked(slotA.netns)) > 0);
  await a.unplug();
  await network.release(slotA);
  await assert.rejects(network.release(old), { code: "CONFLICT" });
  slotA = await network.acquire();
  assert.equal(slotA.index, old.index);
  assert.equal(await world.inNetns(slotA.netns, "ip", "-o", "addr", "show", "dev", "lo"), "");
  const [link] = JSON.parse(await world.inNetns(slotA.netns, "ip", "-j", "-s", "link", "show", "tap0")) as [
    { stats64: { rx: { packets: number }; tx: { packets: number } } },
  ];
  assert.deepEqual([link.stats64.rx.packets, link.stats64.tx.packets], [0, 0]);
  assert.equal(await world.tracked(slotA.netns), 0);
  const { stdout } = await run("conntrack", ["-L", "-s", slotA.hostIp]);
  assert.equal(stdout, "");
  await assert.rejects(network.setPolicy(old, { allowInternet: true }), { code: "CONFLICT" });
  a = await world.FakeGuest.plug(slotA, "guest-a");
  await a.agent.listen("0.0.0.0", 80);
  assert.equal(await a.agent.connect(world.SITE, 80), `hello ${world.HOST_UPLINK}`);
});

test("a flood fills neither connection table, and the neighbour still connects", async () => {
  await a.unplug();
  await network.release(slotA);
  await network.close();
  const limits = { connections: 200, newPerSecond: 100_000, newBurst: 100_000 };
  const options = { instance: INSTANCE, limit: 8, dns: [world.RESOLVER], logger: silentLogger, limits };
  network = await Network.open(options);
  [slotB] = network.adopt([slotB.index]) as [Slot];
  await network.sweep();
  slotA = await network.acquire();
  a = await world.FakeGuest.plug(slotA, "guest-a");
  const before = await world.tracked();
  // Nobody has this address: every datagram is a connection that stays unanswered.
  for (let port = 1; port <= 3000; port++) a.send(udp("93.184.99.99", port, "flood"));
  for (let port = 1; port <= 3000; port++) a.send(tcpSyn("93.184.99.99", 80, 10_000 + port));
  a.send(arp("request", GUEST_MAC, GUEST_IP, GATEWAY_IP));
  await a.seen.until("the end of the flood", (s) => s.kind === "arp" && s.code === 2);
  // Guests and the host's answers count as well: the table is never near the size of the flood.
  assert.ok((await world.tracked(slotA.netns)) <= limits.connections + 10);
  assert.ok((await world.tracked()) - before <= limits.connections + 10);
  assert.equal(await b.agent.connect(world.SITE, 80), `hello ${world.HOST_UPLINK}`);
  assert.equal(await host.connect(slotB.hostIp, 80), `hello ${GATEWAY_IP}`);
});

test("a limit of bandwidth holds in both directions, for the internet only", async () => {
  await a.unplug();
  await network.release(slotA);
  await network.close();
  // What is sent below would take half a minute.
  const limits = { bytesPerSecond: 10_000 };
  network = await Network.open({ instance: INSTANCE, limit: 8, dns: [world.RESOLVER], logger: silentLogger, limits });
  [slotB] = network.adopt([slotB.index]) as [Slot];
  await network.sweep();
  slotA = await network.acquire();
  a = await world.FakeGuest.plug(slotA, "guest-a");
  await a.agent.listen("0.0.0.0", 80);
  const word = "x".repeat(1000);
  const count = 300;
  a.send(...Array.from({ length: count }, () => udp(world.SITE, 80, word)));
  a.send(arp("request", GUEST_MAC, GUEST_IP, GATEWAY_IP));
  await a.seen.until("the end of the flood", (s) => s.kind === "arp" && s.code === 2);
  const through = outside.heard.all.filter((h) => h.text === word).length;
  assert.ok(through > 0 && through < count / 2, `${through} datagrams`);
  // From the host, which is not the internet.
  for (let i = 0; i < count; i++) socket.send(word, 80, slotA.hostIp);
  socket.send("the end", 80, slotA.hostIp);
  await a.agent.heard.until("the host's last datagram", (h) => h.text === "the end");
  // A program that reads slowly loses some.
  assert.ok(a.agent.heard.all.filter((h) => h.text === word).length > count / 2);
});
