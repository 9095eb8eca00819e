/** The edge alone, as the server mounts it, in front of one fixed upstream: `edge-server.ts DOMAIN UPSTREAM_PORT`. */
import type { AddressInfo } from "node:net";
import { silentLogger } from "@aenv/base";
import { createEdge, createFrontServer } from "@aenv/proxy";

const [domain = "", port = ""] = process.argv.slice(2);
const edge = createEdge({
  domain,
  logger: silentLogger,
  resolve: (_id, sandboxPort) => ({
    run: "r1",
    host: "127.0.0.1",
    port: sandboxPort === 1 ? Number(port) : sandboxPort,
  }),
});
const server = createFrontServer({ edge, api: (_req, res) => void res.writeHead(404).end() });
server.listen(0, "127.0.0.1", 4096, () => {
  process.stdout.write(`${(server.address() as AddressInfo).port}\n`);
});
process.on("SIGTERM", () => process.exit(0));
