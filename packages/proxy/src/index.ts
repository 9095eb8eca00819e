export { createEdge, type Edge, type EdgeOptions, type EdgeStats } from "./edge.ts";
export { RAW_PROTOCOL } from "./tunnel.ts";
export { createFrontServer, type FrontOptions } from "./front.ts";
export { DEFAULT_LIMITS, type EdgeLimits } from "./limits.ts";
export { ENVD_PORT, type Route, routeOf } from "./route.ts";
export type { Asleep, EdgeError, Resolve, Target } from "./target.ts";
export type { TlsSource } from "./secure.ts";
