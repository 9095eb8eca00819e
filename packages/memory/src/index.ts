export * from "./delta.ts";
export * from "./dirty.ts";
export * from "./inject.ts";
export * from "./delta-file.ts";
