import assert from "node:assert/strict";
import { test } from "node:test";
import { call, errorOf, send } from "../../test/client.ts";
import { fakeServer } from "../../test/fake-server.ts";

test("templates are listed newest first", async () => {
  await using server = fakeServer();
  const { body } = await call(server, "listTemplates");
  assert.deepEqual(
    body.map((t) => t.names[0]),
    ["base", "code-interpreter"],
  );
  assert.equal(body[0]?.buildStatus, "ready");
  assert.deepEqual((await call(server, "listTemplates", { query: { teamID: "default" } })).body, body);
});

test("templates come page by page with no token on the last page", async () => {
  await using server = fakeServer();
  const first = await call(server, "listTemplatesV2", { query: { limit: 1 } });
  const nextToken = String(first.headers["x-next-token"]);
  const second = await call(server, "listTemplatesV2", { query: { limit: 1, nextToken } });
  assert.equal(second.headers["x-next-token"], undefined);
  assert.deepEqual(
    [...first.body, ...second.body].map((t) => t.aliases[0]),
    ["base", "code-interpreter"],
  );
  for (const q of ["nextToken=abc", "limit=0", "limit=101"])
    errorOf(await send(server, "GET", `/v2/templates?${q}`), 400, "INVALID_ARGUMENT");
});

test("a template is found by id, name, and encoded name with team and tag", async () => {
  await using server = fakeServer();
  const { body } = await call(server, "getTemplate", { params: { templateID: "base" } });
  assert.equal(body.builds.length, 1);
  for (const name of [body.templateID, "team/base", "base:default", "team/base:default"])
    assert.equal(
      (await call(server, "getTemplate", { params: { templateID: name } })).body.templateID,
      body.templateID,
    );
});

test("an alias exists or is 404", async () => {
  await using server = fakeServer();
  assert.equal((await call(server, "resolveTemplateAlias", { params: { alias: "base" } })).body.public, true);
  errorOf(await send(server, "GET", "/templates/aliases/none"), 404, "NOT_FOUND");
  errorOf(await send(server, "GET", `/templates/aliases/${"a".repeat(600)}`), 404, "NOT_FOUND");
});

test("a deleted template is gone, and the second delete is 404", async () => {
  await using server = fakeServer();
  const params = { templateID: "team/code-interpreter:default" };
  assert.equal((await call(server, "deleteTemplate", { params })).status, 204);
  errorOf(await send(server, "DELETE", "/templates/team%2Fcode-interpreter%3Adefault"), 404, "NOT_FOUND");
  errorOf(await send(server, "GET", "/templates/code-interpreter"), 404, "NOT_FOUND");
});
