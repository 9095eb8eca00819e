export * from "./config.ts";
export * from "./damage.ts";
export * from "./engine.ts";
export type { Exchange, StoredSnapshot } from "./exchange.ts";
export * from "./ports.ts";
export type { Transfer } from "./transfers.ts";
export * from "./types.ts";
