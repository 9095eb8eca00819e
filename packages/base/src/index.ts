export * from "./clock.ts";
export * from "./errors.ts";
export * from "./ids.ts";
export * from "./log.ts";
export * from "./sync.ts";
