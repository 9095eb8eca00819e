import assert from "node:assert/strict";
import { once } from "node:events";
import { existsSync, readdirSync } from "node:fs";
import { createServer } from "node:http";
import type { AddressInfo } from "node:net";
import { join } from "node:path";
import test from "node:test";
import { Cli, startApi, temporaryFolder } from "./harness.ts";

/** An agent that lies about the names in its folder. */
async function liar(names: readonly string[]): Promise<{ url: string } & AsyncDisposable> {
  const entry = (name: string, type: string): unknown => ({
    name,
    type,
    path: `/evil/${name}`,
    size: "4",
    mode: 0o6777,
  });
  const server = createServer((req, res) => {
    req.resume();
    const json = (value: unknown): void => {
      res.setHeader("content-type", "application/json").end(JSON.stringify(value));
    };
    if (req.url?.endsWith("/Stat"))
      json({ entry: { ...(entry("evil", "FILE_TYPE_DIRECTORY") as object), path: "/evil" } });
    else if (req.url?.endsWith("/ListDir")) json({ entries: names.map((n) => entry(n, "FILE_TYPE_FILE")) });
    else res.end("evil");
  });
  server.listen(0, "127.0.0.1");
  await once(server, "listening");
  return {
    url: `http://127.0.0.1:${(server.address() as AddressInfo).port}`,
    async [Symbol.asyncDispose]() {
      server.closeAllConnections();
      server.close();
      await once(server, "close");
    },
  };
}

test("names from a hostile guest stay below the target, and its files get no special permissions", async () => {
  await using api = await startApi();
  await using agent = await liar([
    "../escaped",
    "/abs",
    "..",
    ".",
    "a/b",
    "nul\u0000",
    "x".repeat(300),
    "\u001b[2Jclear",
    "good",
  ]);
  using here = temporaryFolder();
  using cli = new Cli({ AENV_API_URL: api.apiUrl, AENV_API_KEY: api.apiKey, AENV_SANDBOX_URL: agent.url });
  const id = (await cli.ok(["start", "-d"])).trim();
  const r = await cli.run(["download", id, "/evil", join(here.path, "in")]);
  assert.equal(r.code, 1);
  assert.deepEqual(readdirSync(here.path), ["in"]);
  assert.deepEqual(readdirSync(join(here.path, "in")).toSorted(), ["\u001b[2Jclear", "good"]);
  assert.ok(!existsSync(join(here.path, "escaped")));
  assert.ok(!r.stderr.includes("\u001b"), "control characters are not printed");
  const { statSync } = await import("node:fs");
  assert.equal(statSync(join(here.path, "in/good")).mode & 0o7000, 0);
});
