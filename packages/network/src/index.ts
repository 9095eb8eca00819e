export { addressSet } from "./address.ts";
export { type CheckOptions, checkNetwork } from "./doctor.ts";
export {
  domainMatches,
  type EgressRules,
  egressPolicy,
  namesAreOurs,
  needsGateway,
  type ProxyRule,
  type TransformRule,
} from "./egress.ts";
export { Network } from "./network.ts";
export { GATEWAY_IP, GUEST_IP, GUEST_MAC } from "./rules.ts";
export * from "./types.ts";
