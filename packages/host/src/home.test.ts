import assert from "node:assert/strict";
import { mkdtemp, readdir, rm, writeFile } from "node:fs/promises";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { test } from "node:test";
import { AenvError } from "@aenv/base";
import { aenvHome, ensureNodeConfig, readNodeConfig, readServerFile, setNodePort } from "./home.ts";

async function tempHome(undo: AsyncDisposableStack): Promise<string> {
  const home = await mkdtemp(join(tmpdir(), "aenv-home-"));
  undo.defer(() => rm(home, { recursive: true }));
  return home;
}

test("the data folder is AENV_HOME when it is set", () => {
  assert.equal(aenvHome({ AENV_HOME: "/x/../y" }), "/y");
});

test("eight first starts at once agree on one instance and leave one file", async () => {
  await using undo = new AsyncDisposableStack();
  const home = await tempHome(undo);
  const all = await Promise.all(Array.from({ length: 8 }, () => ensureNodeConfig(home, { port: 8000 })));
  assert.equal(new Set(all.map((c) => c.instance)).size, 1);
  assert.deepEqual(await readdir(home), ["config.json"]);
  assert.deepEqual(await readNodeConfig(home), all[0]);
});

for (const bad of [
  "",
  "{",
  "[]",
  '{"instance":"zzzz","port":1,"listen":"","domain":""}',
  '{"instance":"abcd","port":70000,"listen":"","domain":""}',
])
  test(`a config of ${JSON.stringify(bad)} is refused with the file's name`, async () => {
    await using undo = new AsyncDisposableStack();
    const home = await tempHome(undo);
    await writeFile(join(home, "config.json"), bad);
    await assert.rejects(
      readNodeConfig(home),
      (e: unknown) => e instanceof AenvError && e.code === "CORRUPT" && e.message.includes(home),
    );
  });

test("without a domain of its own a node's domain follows its port; one that was set stays", async () => {
  await using undo = new AsyncDisposableStack();
  const home = await tempHome(undo);
  assert.equal((await ensureNodeConfig(home, { port: 8000 })).domain, "localhost:8000");
  await setNodePort(home, 8300);
  assert.deepEqual(
    [(await readNodeConfig(home))?.port, (await readNodeConfig(home))?.domain],
    [8300, "localhost:8300"],
  );
  const own = await tempHome(undo);
  await ensureNodeConfig(own, { port: 8000, domain: "sb.test" });
  await setNodePort(own, 8300);
  assert.equal((await readNodeConfig(own))?.domain, "sb.test");
});

test("no server file and a broken one both mean that no server is known", async () => {
  await using undo = new AsyncDisposableStack();
  const home = await tempHome(undo);
  assert.equal(readServerFile(home), undefined);
  await writeFile(join(home, "server.json"), "{");
  assert.equal(readServerFile(home), undefined);
});
