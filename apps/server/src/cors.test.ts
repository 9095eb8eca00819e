import assert from "node:assert/strict";
import { test } from "node:test";
import { fakeServer } from "../test/fake-server.ts";

const ORIGIN = { origin: "https://page.test" };

test("a page of any origin may use the API with a key: preflight, answer, error", async () => {
  await using server = fakeServer();
  const ask = (method: "OPTIONS" | "GET" | "POST", url: string, headers: Record<string, string>) =>
    server.app.inject({ method, url, headers });
  for (const url of ["/v2/sandboxes", "/no/such/path"]) {
    const preflight = await ask("OPTIONS", url, {
      ...ORIGIN,
      "access-control-request-method": "POST",
      "access-control-request-headers": "x-api-key",
    });
    assert.equal(preflight.statusCode, 204);
    assert.equal(preflight.headers["access-control-allow-origin"], "*");
    assert.match(String(preflight.headers["access-control-allow-methods"]), /POST/);
    assert.match(String(preflight.headers["access-control-allow-headers"]), /^\*/);
  }
  const list = await ask("GET", "/v2/sandboxes", { ...ORIGIN, "x-api-key": server.key });
  assert.equal(list.statusCode, 200);
  assert.equal(list.headers["access-control-allow-origin"], "*");
  assert.match(String(list.headers["access-control-expose-headers"]), /x-next-token/);
  const refused = await ask("GET", "/v2/sandboxes", ORIGIN);
  assert.equal(refused.statusCode, 401);
  assert.equal(refused.headers["access-control-allow-origin"], "*");
  // Cookies and the like are never asked for.
  assert.equal(list.headers["access-control-allow-credentials"], undefined);
});

test("who is no page sees nothing of it, and OPTIONS that is no preflight is no endpoint", async () => {
  await using server = fakeServer();
  const list = await server.app.inject({ method: "GET", url: "/v2/sandboxes", headers: { "x-api-key": server.key } });
  assert.equal(list.headers["access-control-allow-origin"], undefined);
  const options = await server.app.inject({ method: "OPTIONS", url: "/v2/sandboxes" });
  assert.equal(options.statusCode, 404);
});
