/** An edge in a process of its own, so that its memory can be measured. Answers every message with its peak in bytes. */
import type { AddressInfo } from "node:net";
import { silentLogger } from "@aenv/base";
import { createEdge } from "../src/edge.ts";
import { createFrontServer } from "../src/front.ts";

const edge = createEdge({
  domain: "sandbox.test",
  logger: silentLogger,
  resolve: (_id, port) => ({ run: "r1", host: "127.0.0.1", port }),
});
const server = createFrontServer({ edge, api: (_req, res) => void res.end() });
server.listen(0, "127.0.0.1", () => process.send?.((server.address() as AddressInfo).port));
process.on("message", () => process.send?.(process.resourceUsage().maxRSS * 1024));
process.on("disconnect", () => process.exit(0));
