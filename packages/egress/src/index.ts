export { GatewayClient } from "./client.ts";
export { obey, type Place } from "./control.ts";
export { EgressGateway } from "./gateway.ts";
export { listenDns } from "./listen.ts";
export { Names, systemLookup } from "./names.ts";
export { Transformer } from "./transform.ts";
