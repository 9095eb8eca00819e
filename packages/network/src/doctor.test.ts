import assert from "node:assert/strict";
import { test } from "node:test";
import { silentLogger } from "@aenv/base";
import { run } from "@aenv/host";
import { goOnInOwnNamespaces } from "../test/namespace.ts";
import { ip } from "../test/world.ts";
import { checkNetwork, judgeRuleset } from "./doctor.ts";
import { Network } from "./network.ts";

goOnInOwnNamespaces();

const INSTANCE = "fe06";
const nft = (input: string): Promise<unknown> => run("nft", ["-f", "-"], { input });
const subjects = async (dns: string[] = []): Promise<string[]> =>
  (await checkNetwork({ instance: INSTANCE, dns })).map((f) => `${f.severity} ${f.subject}`);

test("a host without a default route gets a warning, an uplink that does not forward an error", async () => {
  const network = await Network.open({ instance: INSTANCE, limit: 2, dns: [], logger: silentLogger });
  await network.destroy();
  assert.deepEqual(await subjects(), ["warning uplink"]);
  await ip("link", "add", "up0", "type", "veth", "peer", "name", "up1");
  await ip("addr", "add", "192.168.9.2/24", "dev", "up0");
  await ip("link", "set", "up0", "up");
  await ip("route", "add", "default", "via", "192.168.9.1");
  assert.deepEqual(await subjects(), ["error up0"]);
  await run("sysctl", ["-qw", "net.ipv4.conf.up0.forwarding=1"]);
  assert.deepEqual(await subjects(), []);
});

test("a forward chain of the operator that drops is found until it lets our devices pass", async () => {
  await nft("table ip filter {\n chain FORWARD {\n type filter hook forward priority 0; policy drop;\n }\n}");
  const [finding] = await checkNetwork({ instance: INSTANCE, dns: [] });
  assert.equal(finding?.subject, "ip filter FORWARD");
  // The advice is a command that works.
  const advice = finding?.fix.split(" (and")[0] ?? "";
  await run("sh", ["-c", advice]);
  assert.deepEqual(await subjects(), []);
  await nft("delete table ip filter");
});

test("a forward chain that ends in a refusal counts as well, one with conditions or of another hook does not", async () => {
  const chain = (hook: string, rule: string): string =>
    `table inet fw {\n chain c {\n type filter hook ${hook} priority 0; policy accept;\n ${rule}\n }\n}`;
  for (const [hook, rule, dns, expected] of [
    ["forward", "counter reject", [], ["error inet fw c"]],
    ["forward", "iifname eth7 drop", [], []],
    ["input", "drop", [], []],
    ["input", "drop", ["192.168.9.2"], ["error inet fw c"]],
  ] as const) {
    await nft(chain(hook, rule));
    assert.deepEqual(await subjects([...dns]), expected, `${hook} ${rule}`);
    await nft("delete table inet fw");
  }
});

test("Docker's chain is answered with Docker's own way to let packets pass", () => {
  const chain = (name: string, more: object): object => ({ chain: { family: "ip", table: "filter", name, ...more } });
  const ruleset = { nftables: [chain("FORWARD", { hook: "forward", policy: "drop" }), chain("DOCKER-USER", {})] };
  const [finding] = judgeRuleset(JSON.stringify(ruleset), INSTANCE, false);
  assert.match(
    finding?.fix ?? "",
    /^iptables -I DOCKER-USER -i avfe06-\+ -j ACCEPT; iptables -I DOCKER-USER -o avfe06-\+/,
  );
});

test("the node's rules come back when a firewall reload has flushed them, and a route over the slots is found", async () => {
  const network = await Network.open({ instance: INSTANCE, limit: 2, dns: [], logger: silentLogger });
  try {
    assert.deepEqual(await network.check(), []);
    await nft("flush ruleset");
    assert.deepEqual(
      (await network.check()).map((f) => f.subject),
      ["node rules"],
    );
    assert.deepEqual(await network.check(), []);
    await ip("route", "add", network.block, "dev", "lo");
    assert.deepEqual(
      (await network.check()).map((f) => f.subject),
      ["addresses"],
    );
  } finally {
    await ip("route", "del", network.block, "dev", "lo");
    await network.destroy();
  }
});
