export * from "./contract.ts";
export { FakeDriver, type FakeGuest, type FakeKnobs, type FakeOp, FakeWorld } from "./fake.ts";
export { JsonLines, jsonLine } from "./json-lines.ts";
export * from "./spawner.ts";
export { VmdClient } from "./vmd-client.ts";
export type * from "./vmd-protocol.ts";
