export * from "./cgroups.ts";
export * from "./files.ts";
export * from "./home.ts";
export * from "./proc.ts";
export * from "./run.ts";
export * from "./resolvers.ts";
export * from "./uid-claims.ts";
