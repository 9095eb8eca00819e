export * from "./config.ts";
export * from "./damage.ts";
export * from "./engine.ts";
export * from "./ports.ts";
export * from "./types.ts";
