import assert from "node:assert/strict";
import { after, before, test } from "node:test";
import { silentLogger } from "@aenv/base";
import { type Seen, udp } from "../test/frames.ts";
import { goOnInOwnNamespaces } from "../test/namespace.ts";
import * as world from "../test/world.ts";
import { egressPolicy } from "./egress.ts";
import { Network } from "./network.ts";
import { GATEWAY_IP } from "./rules.ts";
import { type NetworkOptions, OPEN_POLICY, type Slot } from "./types.ts";

goOnInOwnNamespaces();

const options = (more: Partial<NetworkOptions> = {}): NetworkOptions => ({
  instance: "fe06",
  limit: 8,
  dns: [world.RESOLVER],
  logger: silentLogger,
  ...more,
});

let outside: world.Agent;
let lan: world.Agent;
let host: world.Agent;
let network: Network;
let slot: Slot;
let guest: world.FakeGuest;

before(async () => {
  ({ outside, lan } = await world.makeWorld());
  host = new world.Agent();
  for (const site of [world.SITE, world.OTHER_SITE, ...world.PRIVATE]) await outside.listen(site, 80);
  for (const resolver of [world.RESOLVER, world.SITE, world.OTHER_SITE]) await outside.listen(resolver, 53);
  await lan.listen(world.LAN, 80);
  network = await Network.open(options());
  slot = await network.acquire();
  guest = await world.FakeGuest.plug(slot, "guest");
  await guest.agent.listen("0.0.0.0", 80);
});

after(async () => {
  await Promise.all([guest?.unplug(), outside?.stop(), lan?.stop(), host?.stop()]);
  await network?.destroy();
});

test("a policy cuts open connections that it denies, and no others", async () => {
  await network.setPolicy(slot, OPEN_POLICY);
  const sites = [world.SITE, world.OTHER_SITE];
  for (const site of sites) assert.equal(await guest.agent.connect(site, 80), `hello ${world.HOST_UPLINK}`);
  assert.equal(await host.connect(slot.hostIp, 80), `hello ${GATEWAY_IP}`);
  const echoes = (): Promise<string[]> => Promise.all(sites.map((site) => guest.agent.echo(site, 80)));
  assert.deepEqual(await echoes(), ["still here?", "still here?"]);

  await network.setPolicy(slot, egressPolicy({ allowInternet: null, denyOut: [world.SITE] }));
  assert.deepEqual(await echoes(), ["error ECONNRESET", "still here?"]);
  await network.setPolicy(slot, egressPolicy({ allowInternet: false, allowOut: [`${world.OTHER_SITE}/31`] }));
  assert.equal(await guest.agent.echo(world.OTHER_SITE, 80), "still here?");
  await network.setPolicy(slot, egressPolicy({ allowInternet: false }));
  assert.equal(await guest.agent.echo(world.OTHER_SITE, 80), "error ECONNRESET");
  assert.equal(await host.echo(slot.hostIp, 80), "still here?");
});

test("what a policy cuts does not come in from outside either", async () => {
  await network.setPolicy(slot, OPEN_POLICY);
  const datagrams = (): number => guest.seen.all.filter((s) => s.kind === "udp" && s.dstPort === 30_001).length;
  const arrive = (n: number): Promise<Seen> => guest.seen.until(`datagram ${n}`, () => datagrams() === n);
  guest.send(udp(world.SITE, 80, "a stream begins", { srcPort: 30_001 }));
  await arrive(1);
  await outside.push(world.SITE, 80);
  await arrive(2);
  await network.setPolicy(slot, egressPolicy({ allowInternet: null, denyOut: [world.SITE] }));
  await outside.push(world.SITE, 80);
  assert.equal(await guest.agent.ask(world.OTHER_SITE, 80), `hello ${world.HOST_UPLINK}`);
  assert.equal(datagrams(), 2);
});

test("changes of one slot's policy hold in the order of their calls", async () => {
  const policies = Array.from({ length: 8 }, (_, i) => ({ allowInternet: i % 2 === 0 }));
  await Promise.all(policies.map((p) => network.setPolicy(slot, p)));
  assert.equal(await guest.agent.connect(world.SITE, 80), "error EHOSTUNREACH");
  await network.setPolicy(slot, OPEN_POLICY);
  assert.equal(await guest.agent.connect(world.SITE, 80), `hello ${world.HOST_UPLINK}`);
});

test("the most rules that a sandbox may have are in force, each of them", async () => {
  const many = Array.from({ length: 999 }, (_, i) => `20.${i >> 8}.${i & 255}.0/25`);
  await network.setPolicy(slot, egressPolicy({ allowInternet: false, allowOut: [...many, world.SITE], denyOut: many }));
  assert.equal(await guest.agent.connect(world.SITE, 80), `hello ${world.HOST_UPLINK}`);
  assert.equal(await guest.agent.connect(world.OTHER_SITE, 80), "error EHOSTUNREACH");
});

test("a policy that denies everything by its list gives no DNS, like one without the internet", async () => {
  for (const rules of [{ allowInternet: null, denyOut: ["0.0.0.0/1", "128.0.0.0/1"] }, { allowInternet: false }]) {
    await network.setPolicy(slot, OPEN_POLICY);
    assert.equal(await guest.agent.ask(world.RESOLVER, 53), `hello ${world.HOST_UPLINK}`);
    await network.setPolicy(slot, egressPolicy(rules));
    assert.equal(await guest.agent.connect(world.RESOLVER, 53), "error EHOSTUNREACH");
    const from = outside.heard.all.length;
    guest.send(udp(world.RESOLVER, 53, "a question that tells"));
    await guest.seen.until("the refusal", (s) => s.kind === "icmp" && s.code === 3);
    assert.deepEqual(outside.heard.all.slice(from), []);
  }
});

test("a guest's own gateway stands for the node's resolvers, whichever these are", async () => {
  await network.setPolicy(slot, OPEN_POLICY);
  assert.equal(await guest.agent.ask(GATEWAY_IP, 53), `hello ${world.HOST_UPLINK}`);
  assert.equal(await guest.agent.connect(GATEWAY_IP, 53), `hello ${world.HOST_UPLINK}`);
  await network.setPolicy(slot, egressPolicy({ allowInternet: null, denyOut: [world.RESOLVER] }));
  assert.equal(await guest.agent.connect(GATEWAY_IP, 53), `hello ${world.HOST_UPLINK}`);

  await network.setPolicy(slot, egressPolicy({ allowInternet: false }));
  assert.equal(await guest.agent.connect(GATEWAY_IP, 53), "error ECONNREFUSED");
  const refusals = (): number => guest.seen.all.filter((s) => s.kind === "icmp" && s.src === GATEWAY_IP).length;
  const before = refusals();
  // The kernel sends few refusals a second to anyone.
  const again = setInterval(() => guest.send(udp(GATEWAY_IP, 53, "a question that tells")), 100);
  await guest.seen.until("the refusal", () => refusals() > before).finally(() => clearInterval(again));
  assert.ok(!outside.heard.all.some((h) => h.text === "a question that tells"));

  // The next server has two others.
  await network.close();
  network = await Network.open(options({ dns: [world.OTHER_SITE, world.SITE] }));
  [slot] = network.adopt([slot.index]) as [Slot];
  await network.setPolicy(slot, OPEN_POLICY);
  for (let i = 0; i < 8; i++) assert.equal(await guest.agent.ask(GATEWAY_IP, 53), `hello ${world.HOST_UPLINK}`);
  const asked = new Set(outside.heard.all.filter((h) => h.port === 53 && h.event === "udp").map((h) => h.host));
  assert.ok(asked.has(world.OTHER_SITE) || asked.has(world.SITE));
});

test("a range that the operator opens is reached as the internet is, its neighbours are not", async () => {
  await network.close();
  network = await Network.open(options({ open: ["10.1.2.0/24", "172.18.0.0/16"] }));
  [slot] = network.adopt([slot.index]) as [Slot];
  const other = await network.acquire();
  const second = await world.FakeGuest.plug(other, "guest-2");
  try {
    assert.equal(await second.agent.connect("10.1.2.3", 80), `hello ${world.HOST_UPLINK}`);
    assert.equal(await second.agent.connect(world.LAN, 80), `hello ${world.HOST_LAN}`);
    const from = outside.heard.all.length;
    for (const [i, address] of world.PRIVATE.slice(1).entries())
      second.send(udp(address, 80, "knock", { srcPort: 6000 + i }));
    // The host's own address in the opened range stays closed.
    second.send(udp(world.HOST_LAN, 80, "knock", { srcPort: 6100 }));
    assert.equal(await second.agent.ask(world.SITE, 80), `hello ${world.HOST_UPLINK}`);
    assert.ok(!outside.heard.all.slice(from).some((h) => h.text === "knock"));
    await network.setPolicy(other, egressPolicy({ allowInternet: null, denyOut: ["10.1.2.3"] }));
    assert.equal(await second.agent.connect("10.1.2.3", 80), "error EHOSTUNREACH");
  } finally {
    await second.unplug();
    await network.release(other);
  }
});
