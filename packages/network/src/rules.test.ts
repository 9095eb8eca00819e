import { test, type TestContext } from "node:test";
import { parseCidr } from "./address.ts";
import { type Instance, planSlot } from "./names.ts";
import { nodeRules, policyRules, slotRules, uplinkRules } from "./rules.ts";
import { makeScript, removeScript } from "./script.ts";
import { DEFAULT_LIMITS, type EgressPolicy } from "./types.ts";

const INSTANCE: Instance = { id: "ab12", block: parseCidr("10.134.224.0/19"), uidBase: 200_000 };
const NODE = {
  instance: "ab12",
  block: INSTANCE.block,
  dns: ["1.1.1.1", "10.0.0.2"],
  uplinks: ["eth0"],
  deny: [parseCidr("93.184.1.1")],
  open: [parseCidr("10.7.0.0/16")],
  flowsPerSlot: 512,
};

const DNS = { resolvers: NODE.dns };

/** Compares with a file in the folder `snapshots`; `node --test --test-update-snapshots` rewrites it. */
const expectText = (t: TestContext, name: string, text: string): void =>
  t.assert.fileSnapshot(text, `${import.meta.dirname}/snapshots/${name}`, { serializers: [String] });

test("the node's rules are as recorded", (t) => {
  expectText(t, "node.nft", nodeRules(NODE));
  expectText(t, "node-bare.nft", nodeRules({ ...NODE, dns: [], uplinks: [], deny: [], open: [] }));
  expectText(t, "uplink.nft", uplinkRules("ab12", ["eth1"]) + uplinkRules("ab12", []));
});

test("a slot's rules are as recorded", (t) => {
  expectText(t, "slot.nft", slotRules("ab12", planSlot(INSTANCE, 3), NODE, DEFAULT_LIMITS));
});

test("a limit of bandwidth holds both ways, before any verdict", (t) => {
  const limits = { ...DEFAULT_LIMITS, bytesPerSecond: 12_500_000 };
  expectText(t, "slot-bandwidth.nft", slotRules("ab12", planSlot(INSTANCE, 3), NODE, limits));
});

test("the node's rules with a gateway are as recorded", (t) => {
  const gateway = { tcpPort: 20_000, dnsPort: 20_001, uid: 199_999 };
  expectText(t, "node-gateway.nft", nodeRules({ ...NODE, gateway }));
});

test("policies that need the gateway are as recorded", (t) => {
  const dns = { ...DNS, gateway: { ip: "10.134.224.6", port: 20_001 } };
  const proxy = { host: "proxy.example.com", port: 1080 };
  const transforms = [{ domain: "api.example.com", headers: { a: "b" } }];
  const text = (policy: EgressPolicy): string => policyRules("ab12", policy, 9, dns);
  expectText(t, "policy-domains.nft", text({ allowInternet: false, allow: ["8.8.8.8"], domains: ["example.com"] }));
  expectText(t, "policy-proxy.nft", text({ allowInternet: true, deny: ["9.0.0.0/8"], proxy }));
  expectText(t, "policy-transforms.nft", text({ allowInternet: true, transforms }));
});

test("a policy's change is as recorded", (t) => {
  expectText(t, "policy-closed.nft", policyRules("ab12", { allowInternet: false }, 7, DNS));
  const mixed = { allowInternet: true, allow: ["8.8.8.8", "9.9.9.0/24"], deny: ["9.0.0.0/8", "9.9.0.0/16"] };
  expectText(t, "policy-mixed.nft", policyRules("ab12", mixed, 8, DNS));
});

test("the scripts that make and remove slots are as recorded", (t) => {
  const slots = [3, 4].map((i) => planSlot(INSTANCE, i));
  expectText(
    t,
    "make.sh",
    makeScript(slots, (s) => `# rules of slot ${s.index}`),
  );
  expectText(t, "remove.sh", removeScript("ab12", slots));
});
