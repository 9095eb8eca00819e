import assert from "node:assert/strict";
import { createHash } from "node:crypto";
import { once } from "node:events";
import { createServer, type IncomingMessage, request, type RequestListener } from "node:http";
import { createServer as createTlsServer } from "node:https";
import type { AddressInfo, Server } from "node:net";
import { test, type TestContext } from "node:test";
import { silentLogger } from "@aenv/base";
import { issue, makeAuthority } from "@aenv/names";
import { createEdge, createFrontServer, type EdgeOptions, type Target } from "@aenv/proxy";

const LIMIT = { timeout: 30_000 };
const ONE = "iaaaabbbbccccdddd001";
const TWO = "iaaaabbbbccccdddd002";

async function listening(t: TestContext, server: Server): Promise<number> {
  server.listen(0, "127.0.0.1");
  await once(server, "listening");
  t.after(() => {
    (server as Partial<ReturnType<typeof createServer>>).closeAllConnections?.();
    server.close();
  });
  return (server.address() as AddressInfo).port;
}

async function edgeFor(
  t: TestContext,
  resolve: EdgeOptions["resolve"],
  more: Partial<EdgeOptions> = {},
): Promise<number> {
  const edge = createEdge({ resolve, domain: "localhost", logger: silentLogger, limits: { drainMs: 0 }, ...more });
  const api: RequestListener = (_req, res) => void res.writeHead(404).end("the API");
  t.after(() => edge.close());
  return listening(t, createFrontServer({ edge, api }));
}

function ask(
  port: number,
  path: string,
  headers: Record<string, string> = {},
  method = "GET",
): Promise<{ status: number; body: string }> {
  return new Promise((resolve, reject) => {
    const req = request({ host: "127.0.0.1", port, path, method, headers, agent: false }, (res: IncomingMessage) => {
      let body = "";
      res.setEncoding("utf8").on("data", (d: string) => (body += d));
      res.on("end", () => resolve({ status: res.statusCode ?? 0, body }));
    });
    req.on("error", reject).end();
  });
}

const hostOf = (req: IncomingMessage): string => `${req.headers.host} for ${String(req.headers["x-forwarded-host"])}`;
const at = (id: string, port: number): Record<string, string> => ({
  "E2b-Sandbox-Id": id,
  "E2b-Sandbox-Port": String(port),
});

test("a mask replaces the Host header; who was asked for stays in X-Forwarded-Host", LIMIT, async (t) => {
  const guest = await listening(
    t,
    createServer((req, res) => void res.end(hostOf(req))),
  );
  const port = await edgeFor(
    t,
    (_id, p): Target => ({ run: "r1", host: "127.0.0.1", port: p, maskHost: `inside.test:${p}` }),
  );
  const seen = await ask(port, "/", { Host: `${guest}-${ONE}.localhost` });
  assert.equal(seen.body, `inside.test:${guest} for ${guest}-${ONE}.localhost`);
});

test("a port that speaks TLS is spoken to by TLS, over again on one connection", LIMIT, async (t) => {
  const { cert, key } = issue(makeAuthority("guest", Date.now()), ["guest.test"], Date.now());
  const server = createTlsServer(
    { cert, key },
    (req, res) => void res.end(`${req.url} of ${(req.socket as { remotePort?: number }).remotePort}`),
  );
  const guest = await listening(t, server);
  const plain = await listening(
    t,
    createServer((_req, res) => void res.end("plain")),
  );
  const port = await edgeFor(
    t,
    (_id, p): Target => ({ run: "r1", host: "127.0.0.1", port: p === 1 ? 1 : p, tls: true }),
  );
  const first = await ask(port, "/a", at(ONE, guest));
  assert.match(first.body, /^\/a of \d+$/);
  assert.equal((await ask(port, "/b", at(ONE, guest))).body, first.body.replace("/a", "/b"));
  const wrong = await ask(port, "/", at(ONE, plain));
  assert.equal(wrong.status, 502);
  assert.match(wrong.body, /httpsPorts/);
  assert.match((await ask(port, "/", at(ONE, 1))).body, /port is not open/);
});

const signature = (raw: string): string => `v1_${createHash("sha256").update(raw).digest("base64").replace(/=+$/, "")}`;

test(
  "a signed URL without a sandbox leads to the one whose token signed it, expired or not; others to the API",
  LIMIT,
  async (t) => {
    const guest = await listening(
      t,
      createServer((req, res) => void res.end(`${req.method} ${req.url}`)),
    );
    const asked: string[] = [];
    const port = await edgeFor(
      t,
      (id, p) => {
        asked.push(`${id}:${p}`);
        return { run: "r1", host: "127.0.0.1", port: guest };
      },
      {
        accessTokens: () => [
          [ONE, "token one"],
          [TWO, "token two"],
        ],
      },
    );
    const url = (token: string, operation: string, more = ""): string => {
      const raw = `a b.txt:${operation}:user:${token}${more === "" ? "" : `:${more}`}`;
      const query = new URLSearchParams({ path: "a b.txt", username: "user", signature: signature(raw) });
      if (more !== "") query.set("signature_expiration", more);
      return `/files?${query.toString()}`;
    };
    const read = url("token two", "read");
    assert.equal((await ask(port, read)).body, `GET ${read}`);
    const write = url("token one", "write");
    assert.equal((await ask(port, write, {}, "POST")).body, `POST ${write}`);
    // The agent says that it has expired; only it has the words for that.
    const old = url("token one", "read", "1");
    assert.equal((await ask(port, old)).body, `GET ${old}`);
    assert.deepEqual(asked, [`${TWO}:49983`, `${ONE}:49983`, `${ONE}:49983`]);

    for (const [path, method] of [
      [url("token one", "read"), "POST"],
      [url("token three", "read"), "GET"],
      [`${url("token one", "read")}x`, "GET"],
      ["/files?path=a", "GET"],
      [url("token one", "read").replace("/files", "/other"), "GET"],
    ] as const)
      assert.equal((await ask(port, path, {}, method)).body, "the API", path);
    assert.equal(asked.length, 3);
    assert.equal((await ask(port, read, at(ONE, 49_983))).status, 200);
    assert.equal(asked.at(-1), `${ONE}:49983`);
  },
);
