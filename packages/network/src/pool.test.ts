import assert from "node:assert/strict";
import { spawn } from "node:child_process";
import { once } from "node:events";
import { readdirSync, readFileSync, watch } from "node:fs";
import { connect } from "node:net";
import { test } from "node:test";
import { errnoOf, silentLogger } from "@aenv/base";
import { run } from "@aenv/host";
import { goOnInOwnNamespaces } from "../test/namespace.ts";
import { FakeGuest, ip } from "../test/world.ts";
import { Network } from "./network.ts";
import type { NetworkOptions } from "./types.ts";

goOnInOwnNamespaces();

// The host of these tests has no default route.
const INSTANCE = "fe02";
const options = (more: Partial<NetworkOptions> = {}): NetworkOptions => ({
  instance: INSTANCE,
  limit: 80,
  dns: [],
  logger: silentLogger,
  ...more,
});

/** Names of the instance that the kernel still knows, and its rules. */
async function leftovers(instance = INSTANCE): Promise<string[]> {
  const devices = readFileSync("/proc/net/dev", "utf8").matchAll(new RegExp(`av${instance}-\\d+`, "g"));
  const netns = readdirSync("/run/netns").filter((n) => n.includes(instance));
  const tables = (await run("nft", ["list", "tables"])).stdout.match(new RegExp(`.*aenv_${instance}`, "g")) ?? [];
  const run_ = readdirSync("/run").filter((n) => n.includes(instance));
  return [...[...devices].map(String), ...netns, ...tables, ...run_];
}

/** What the host gets from a guest's port. */
async function greeting(host: string, port: number): Promise<string> {
  const socket = connect({ host, port });
  try {
    const [data] = (await once(socket, "data")) as [Buffer];
    return data.toString().trim();
  } catch (e) {
    return errnoOf(e) ?? String(e);
  } finally {
    socket.destroy();
  }
}

interface TapJson {
  address: string;
  flags: string[];
  linkinfo: { info_data: { type: string; persist: boolean; user: number; group: number } };
}

test("64 slots are made at once, each with its own addresses and its own user's tap", async () => {
  const network = await Network.open(options({ limit: 64 }));
  try {
    await network.ensure(64);
    assert.equal(network.free, 64);
    const slots = await Promise.all(Array.from({ length: 64 }, () => network.acquire()));
    assert.equal(new Set(slots.map((s) => s.hostIp)).size, 64);
    assert.equal(new Set(slots.map((s) => s.netns)).size, 64);
    for (const s of slots) {
      const { stdout } = await run("ip", ["-n", s.netns, "-j", "-d", "link", "show", "tap0"]);
      const [tap] = JSON.parse(stdout) as [TapJson];
      assert.equal(tap.address, "02:fc:00:00:00:01");
      assert.ok(tap.flags.includes("UP"));
      assert.deepEqual(tap.linkinfo.info_data.persist, true);
      assert.equal(tap.linkinfo.info_data.user, 200_000 + s.index);
      assert.equal(tap.linkinfo.info_data.group, s.gid);
    }
    await Promise.all(slots.map((s) => network.release(s)));
    assert.deepEqual(
      network.list().map((s) => s.state),
      Array.from({ length: 64 }, () => "free"),
    );
  } finally {
    await network.destroy();
  }
  assert.deepEqual(await leftovers(), []);
});

test("the pool fills up again by itself when half of it is taken", async () => {
  const network = await Network.open(options());
  try {
    await network.ensure(4);
    await Promise.all(Array.from({ length: 4 }, () => network.acquire()));
    await network.idle();
    assert.deepEqual(
      network.list().map((s) => s.state),
      [...Array<string>(4).fill("used"), ...Array<string>(4).fill("free")],
    );
  } finally {
    await network.destroy();
  }
});

test("without a default route the host still reaches its guests, and a route that appears later is used", async () => {
  const network = await Network.open(options());
  await ip("netns", "add", "gate");
  try {
    const slot = await network.acquire();
    const guest = await FakeGuest.plug(slot, "guest");
    try {
      await guest.agent.listen("0.0.0.0", 80);
      assert.equal(await greeting(slot.hostIp, 80), "hello 169.254.0.22");
      await ip("link", "add", "up1", "type", "veth", "peer", "name", "eth0", "netns", "gate");
      await run("ip", ["-batch", "-"], {
        input: "addr add 192.168.9.2/24 dev up1\nlink set up1 up\nroute add default via 192.168.9.1",
      });
      await run("ip", ["-n", "gate", "-batch", "-"], {
        input: "addr add 192.168.9.1/24 dev eth0\naddr add 9.9.9.9/32 dev lo\nlink set lo up\nlink set eth0 up",
      });
      await network.refreshUplink();
      // Nobody listens there: the refusal has crossed the uplink and come back.
      assert.equal(await guest.agent.connect("9.9.9.9", 80), "error ECONNREFUSED");
    } finally {
      await guest.unplug();
    }
  } finally {
    await ip("link", "del", "up1");
    await ip("netns", "del", "gate");
    await network.destroy();
  }
});

test("the next server adopts what VMs use, with the same addresses, and sweeps the rest", async () => {
  const first = await Network.open(options());
  await first.ensure(6);
  const used = [await first.acquire(), await first.acquire()];
  await first.close();

  const second = await Network.open(options({ block: "198.18.0.0/19" }));
  try {
    assert.equal(second.block, first.block);
    assert.deepEqual(second.adopt([...used.map((s) => s.index), 77]), used);
    assert.throws(() => second.adopt([used[0]?.index ?? -1]), { code: "CONFLICT" });
    assert.deepEqual(await second.sweep(), { freed: [2, 3, 4, 5], failed: [] });
    assert.deepEqual(
      second.list().map((s) => [s.index, s.state]),
      [
        [0, "used"],
        [1, "used"],
      ],
    );
    assert.equal((await second.acquire()).index, 2);
  } finally {
    await second.destroy();
  }
  assert.deepEqual(await leftovers(), []);
});

test("a server killed while it makes slots leaves nothing that the next sweep does not free", async () => {
  for (const when of ["first netns", "first batch"]) {
    const child = spawn(process.execPath, [`${import.meta.dirname}/../test/crash.ts`, "fe03"], {
      stdio: ["ignore", "pipe", "inherit"],
    });
    const watcher = watch("/run/netns");
    await (when === "first netns" ? once(watcher, "change") : once(child.stdout, "data"));
    child.kill("SIGKILL");
    watcher.close();
    await once(child, "exit");

    const network = await Network.open(options({ instance: "fe03" }));
    const found = network.list().length;
    assert.ok(found > 0, when);
    const { freed, failed } = await network.sweep();
    assert.deepEqual([freed.length, failed], [found, []]);
    assert.deepEqual((await leftovers("fe03")).sort(), ["aenv-fe03", "table inet aenv_fe03"]);
    await network.destroy();
    assert.deepEqual(await leftovers("fe03"), []);
  }
});

test("half-made slots of every kind are found and freed", async () => {
  await ip("netns", "add", `aenv-${INSTANCE}-3`);
  await ip("link", "add", `av${INSTANCE}-5`, "type", "veth", "peer", "name", "lost");
  await run("touch", [`/run/netns/aenv-${INSTANCE}-9`]);
  await ip("netns", "add", "aenv-fe0f-3");
  const network = await Network.open(options());
  try {
    assert.deepEqual(await network.sweep(), { freed: [3, 5, 9], failed: [] });
    assert.ok(readdirSync("/run/netns").includes("aenv-fe0f-3"), "another instance's");
  } finally {
    await network.destroy();
    await ip("netns", "del", "aenv-fe0f-3");
  }
  assert.deepEqual(await leftovers(), []);
});

test("a slot that appears while the node runs belongs to nobody, is named and freed", async () => {
  const network = await Network.open(options());
  try {
    await network.sweep();
    const slot = await network.acquire();
    const names = async (): Promise<string[]> =>
      (await network.check()).filter((f) => f.subject.startsWith("slot ")).map((f) => `${f.subject} ${f.problem}`);
    assert.deepEqual(await names(), []);
    await ip("netns", "add", `aenv-${INSTANCE}-7`);
    assert.deepEqual(await names(), ["slot 7 belonged to nobody"]);
    assert.deepEqual(await names(), []);
    assert.deepEqual(
      network.list().map((s) => [s.index, s.state]),
      [[slot.index, "used"]],
    );
  } finally {
    await network.destroy();
  }
  assert.deepEqual(await leftovers(), []);
});

test("at the limit a caller waits for a slot in reset, is refused when none is coming, and may give up", async () => {
  const network = await Network.open(options({ limit: 2 }));
  try {
    const [a, b] = await Promise.all([network.acquire(), network.acquire()]);
    await assert.rejects(network.acquire(), { code: "SLOT_EXHAUSTED" });
    const released = network.release(a);
    const next = network.acquire();
    await assert.rejects(network.acquire(), { code: "SLOT_EXHAUSTED" });
    await released;
    assert.equal((await next).index, a.index);
    await assert.rejects(network.release(a), { code: "CONFLICT" });

    const again = network.release(b);
    const patience = new AbortController();
    const impatient = network.acquire(patience.signal);
    patience.abort(new Error("gave up"));
    await assert.rejects(impatient, /gave up/);
    await again;
    assert.equal(network.free, 1);
  } finally {
    await network.destroy();
  }
});

test("a slot whose namespace an old process still holds is made anew, and the old one reaches nothing", async () => {
  const network = await Network.open(options());
  try {
    const slot = await network.acquire();
    const guest = await FakeGuest.plug(slot, "guest");
    await guest.agent.listen("0.0.0.0", 80);
    await network.release(slot);
    const next = await network.acquire();
    assert.equal(next.hostIp, slot.hostIp);
    const second = await FakeGuest.plug(next, "guest-2");
    await second.agent.listen("0.0.0.0", 81);
    assert.equal(await greeting(next.hostIp, 81), "hello 169.254.0.22");
    assert.equal(await greeting(next.hostIp, 80), "ECONNREFUSED");
    await second.unplug();
    await guest.unplug();
  } finally {
    await network.destroy();
  }
});

test("two instances keep out of each other's addresses and of the host's routes", async () => {
  const first = await Network.open(options());
  await ip("route", "add", "10.0.0.0/8", "dev", "lo");
  const second = await Network.open(options({ instance: "fe04", dns: ["100.64.0.1"] }));
  const third = await Network.open(options({ instance: "fe05" }));
  try {
    assert.match(first.block, /^10\./);
    assert.match(second.block, /^100\./);
    await second.ensure(1);
    await first.ensure(1);
    await first.destroy();
    assert.equal(second.list().length, 1);
    assert.notDeepEqual(await leftovers("fe04"), []);
  } finally {
    await second.destroy();
    await third.destroy();
    await ip("route", "del", "10.0.0.0/8", "dev", "lo");
  }
});

test("where the kernel cannot hand connections to the gateway, a node works without one and says so", async () => {
  const gateway = {
    // No kernel takes this port.
    place: { tcpPort: 70_000, dnsPort: 20_001, uid: 199_999 },
    configure: async () => {},
    setPolicy: async () => assert.fail("the gateway was told of a slot"),
    retain: async () => {},
  };
  const network = await Network.open(options({ gateway }));
  try {
    const slot = await network.acquire();
    await network.setPolicy(slot, { allowInternet: false, allow: ["9.9.9.9"] });
    await assert.rejects(network.setPolicy(slot, { allowInternet: false, domains: ["a.test"] }), {
      code: "INVALID_ARGUMENT",
      message: /gateway/,
    });
    assert.ok((await network.check()).some((f) => f.subject === "egress gateway" && f.severity === "warning"));
  } finally {
    await network.destroy();
  }
  assert.deepEqual(await leftovers(), []);
});

test("wrong options are refused by name", async () => {
  for (const [wrong, message] of [
    [{ instance: "FE02" }, /4 hex digits/],
    [{ instance: "fe02; reboot" }, /4 hex digits/],
    [{ limit: 0 }, /1\.\.4096/],
    [{ dns: ["127.0.0.53"] }, /127\.0\.0\.53/],
    [{ dns: ["::1"] }, /IPv4/],
    [{ uplink: 'eth0" }' }, /network device/],
    [{ block: "10.0.0.0/8" }, /\/19/],
    [{ deny: ["10.0.0.0/33"] }, /CIDR/],
  ] as const)
    await assert.rejects(Network.open(options(wrong)), { code: "INVALID_ARGUMENT", message });
});
