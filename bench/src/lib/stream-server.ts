/** Upstream of the stream benchmark: GET /BYTES sends that many bytes, an upload is counted and thrown away. */
import { createServer } from "node:http";
import type { AddressInfo } from "node:net";

const block = Buffer.alloc(256 * 1024, "x");

const server = createServer({ requestTimeout: 0 }, (req, res) => {
  if (req.method !== "GET") {
    let bytes = 0;
    req.on("data", (d: Buffer) => (bytes += d.length));
    req.on("end", () => res.end(String(bytes)));
    return;
  }
  let left = Number(req.url?.slice(1));
  res.writeHead(200, { "Content-Length": left });
  const more = (): void => {
    while (left > 0) {
      const part = block.subarray(0, Math.min(left, block.length));
      left -= part.length;
      if (left === 0) res.end(part);
      else if (!res.write(part)) return void res.once("drain", more);
    }
  };
  more();
});
server.listen(0, "127.0.0.1", () => {
  process.stdout.write(`${(server.address() as AddressInfo).port}\n`);
});
process.on("SIGTERM", () => process.exit(0));
