/** A host, its guests and an internet in network namespaces, for tests of this package and of what it works with. */
export { goOnInOwnNamespaces } from "./namespace.ts";
export * as world from "./world.ts";
export * as frames from "./frames.ts";
