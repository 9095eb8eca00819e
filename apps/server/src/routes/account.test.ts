import assert from "node:assert/strict";
import { test } from "node:test";
import { call, errorOf, send } from "../../test/client.ts";
import { fakeServer } from "../../test/fake-server.ts";

test("a new key works, is shown once, and is masked afterwards", async () => {
  await using server = fakeServer();
  const { body } = await call(server, "createApiKey", { body: { name: " laptop " } });
  assert.match(body.key, /^e2b_[0-9a-f]{40}$/);
  assert.equal(body.name, "laptop");
  assert.equal((await send(server, "GET", "/teams", { headers: { "x-api-key": body.key } })).status, 200);
  const list = await call(server, "listApiKeys");
  const listed = list.body.find((k) => k.id === body.id);
  assert.equal(listed?.mask.maskedValueSuffix, body.key.slice(-4));
  assert.equal(listed.mask.valueLength, 40);
  assert.ok(listed.lastUsed !== null);
  assert.ok(!list.text.includes(body.key));
});

test("the team of a key comes with that key", async () => {
  await using server = fakeServer();
  const { body } = await call(server, "listTeams");
  assert.deepEqual(body, [{ teamID: "default", name: "default", apiKey: server.key, isDefault: true }]);
});

test("a key can be renamed and deleted; the last one stays", async () => {
  await using server = fakeServer();
  const { body } = await call(server, "createApiKey", { body: { name: "a" } });
  const params = { apiKeyID: body.id };
  assert.equal((await call(server, "renameApiKey", { params, body: { name: "b" } })).body.name, "b");
  assert.equal((await call(server, "deleteApiKey", { params })).status, 204);
  errorOf(await send(server, "DELETE", `/api-keys/${body.id}`), 404, "NOT_FOUND");
  errorOf(await send(server, "PATCH", `/api-keys/${body.id}`, { body: { name: "c" } }), 404, "NOT_FOUND");
  errorOf(await send(server, "GET", "/teams", { headers: { "x-api-key": body.key } }), 401);
  const [last] = (await call(server, "listApiKeys")).body;
  errorOf(await send(server, "DELETE", `/api-keys/${last?.id}`), 409, "CONFLICT");
});

test("names of keys are 1 to 100 characters", async () => {
  await using server = fakeServer();
  for (const body of [{}, { name: "" }, { name: "  " }, { name: "x".repeat(101) }, { name: 5 }])
    errorOf(await send(server, "POST", "/api-keys", { body }), 400, "INVALID_ARGUMENT");
});
