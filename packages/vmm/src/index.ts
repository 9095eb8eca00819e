export * from "./contract.ts";
export { JsonLines, jsonLine } from "./json-lines.ts";
export * from "./spawner.ts";
export { VmdClient } from "./vmd-client.ts";
export type * from "./vmd-protocol.ts";
