import { test, type TestContext } from "node:test";
import { parseCidr } from "./address.ts";
import { type Instance, planSlot } from "./names.ts";
import { nodeRules, policyRules, slotRules, uplinkRules } from "./rules.ts";
import { makeScript, removeScript } from "./script.ts";
import { DEFAULT_LIMITS } from "./types.ts";

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

test("a policy's change is as recorded", (t) => {
  expectText(t, "policy-closed.nft", policyRules("ab12", { allowInternet: false }, 7));
  const mixed = { allowInternet: true, allow: ["8.8.8.8", "9.9.9.0/24"], deny: ["9.0.0.0/8", "9.9.0.0/16"] };
  expectText(t, "policy-mixed.nft", policyRules("ab12", mixed, 8));
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
