import { createServer, type IncomingMessage, type Server } from "node:http";
import { AenvError, type Logger } from "@aenv/base";
import { diskSpecSchema, importSchema, layerRefSchema, mergeSchema, restackSchema } from "@aenv/block";
import type { z } from "zod";
import type { BlockService } from "./service.ts";

const MAX_BODY_BYTES = 1024 * 1024;
const SEAL = /^\/disks\/([^/]+)\/seal$/;
const LAYERS = /^\/disks\/([^/]+)\/layers$/;
const DISK = /^\/disks\/([^/]+)$/;

/** blockd's control API; @aenv/block's BlockdClient is its client. */
export function controlServer(service: BlockService, logger: Logger): Server {
  return createServer((req, res) => {
    const send = (status: number, value: unknown): void => {
      const text = JSON.stringify(value);
      res.writeHead(status, { "content-type": "application/json", "content-length": Buffer.byteLength(text) });
      res.end(text);
    };
    const caller = new AbortController();
    res.once("close", () => caller.abort(new AenvError("CANCELLED", "the caller of blockd is gone")));
    void route(service, req, caller.signal).then(
      (value) => send(200, value ?? {}),
      (e: unknown) => {
        const { code, message, hint, data, status } = AenvError.from(e, `${req.method} ${req.url}`);
        logger.warn({ method: req.method, url: req.url, code, error: message }, "control call failed");
        send(status, { code, message, hint, data });
      },
    );
  });
}

/** `caller` aborts when nobody waits for the answer any more: what takes as long as its data is given up then. */
async function route(service: BlockService, req: IncomingMessage, caller: AbortSignal): Promise<unknown> {
  const url = new URL(req.url ?? "/", "http://blockd");
  const call = `${req.method} ${url.pathname}`;
  if (call === "GET /ping") return service.ping();
  if (call === "GET /disks") return service.list();
  if (call === "GET /cache") return service.cacheStats;
  if (call === "POST /disks") return await service.create(await body(req, diskSpecSchema));
  if (call === "POST /import") {
    const { rawPath, target } = await body(req, importSchema);
    return await service.importRaw(rawPath, target, caller);
  }
  const seal = SEAL.exec(url.pathname)?.[1];
  if (req.method === "POST" && seal !== undefined) return await service.seal(seal, await body(req, layerRefSchema));
  const restack = LAYERS.exec(url.pathname)?.[1];
  if (req.method === "PUT" && restack !== undefined)
    return await service.restack(restack, await body(req, restackSchema));
  if (call === "POST /merge") {
    const { layers, target } = await body(req, mergeSchema);
    return await service.merge(layers, target);
  }
  const disk = DISK.exec(url.pathname)?.[1];
  if (req.method === "DELETE" && disk !== undefined) {
    return await service.close(disk, url.searchParams.get("deleteUpper") === "true");
  }
  throw new AenvError("NOT_FOUND", `blockd has no ${call}`);
}

async function body<T>(req: IncomingMessage, schema: z.ZodType<T>): Promise<T> {
  const chunks: Buffer[] = [];
  let size = 0;
  for await (const chunk of req as AsyncIterable<Buffer>) {
    size += chunk.length;
    if (size > MAX_BODY_BYTES) throw new AenvError("TOO_LARGE", `the body is longer than ${MAX_BODY_BYTES} bytes`);
    chunks.push(chunk);
  }
  let json: unknown;
  try {
    json = JSON.parse(Buffer.concat(chunks).toString());
  } catch (e) {
    throw new AenvError("INVALID_ARGUMENT", "the body is not JSON", { cause: e });
  }
  const parsed = schema.safeParse(json);
  if (parsed.success) return parsed.data;
  const issues = parsed.error.issues.map((i) => `${i.path.join(".") || "body"}: ${i.message}`).join("; ");
  throw new AenvError("INVALID_ARGUMENT", issues);
}
