export * from "./contract.ts";
export * from "./spawner.ts";
