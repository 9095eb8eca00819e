import type { RouteDef } from "./route.ts";

/** Endpoints of the E2B API that this version does not have: they answer 501 with the feature's name. */
export const LATER: readonly { method: RouteDef["method"]; path: string; feature: string }[] = (
  [
    ["POST", "/v3/templates", "building templates"],
    ["POST", "/v2/templates", "building templates"],
    ["POST", "/templates", "building templates"],
    ["POST", "/templates/{templateID}", "building templates"],
    ["PATCH", "/v2/templates/{templateID}", "changing templates"],
    ["PATCH", "/templates/{templateID}", "changing templates"],
    ["GET", "/templates/{templateID}/files/{hash}", "building templates"],
    ["POST", "/v2/templates/{templateID}/builds/{buildID}", "building templates"],
    ["POST", "/templates/{templateID}/builds/{buildID}", "building templates"],
    ["GET", "/templates/{templateID}/builds/{buildID}/status", "building templates"],
    ["GET", "/templates/{templateID}/builds/{buildID}/logs", "building templates"],
    ["POST", "/templates/tags", "template tags"],
    ["DELETE", "/templates/tags", "template tags"],
    ["GET", "/templates/{templateID}/tags", "template tags"],
    ["GET", "/volumes", "volumes"],
    ["POST", "/volumes", "volumes"],
    ["GET", "/volumes/{volumeID}", "volumes"],
    ["DELETE", "/volumes/{volumeID}", "volumes"],
    ["GET", "/secrets", "secrets"],
    ["POST", "/secrets", "secrets"],
    ["GET", "/secrets/{secretID}", "secrets"],
    ["POST", "/secrets/{secretID}", "secrets"],
    ["DELETE", "/secrets/{secretID}", "secrets"],
    ["GET", "/nodes", "several nodes"],
    ["GET", "/nodes/{nodeID}", "several nodes"],
  ] as const
).map(([method, path, feature]) => ({ method, path, feature }));
