import assert from "node:assert/strict";
import { existsSync, mkdtempSync, readdirSync, readFileSync, rmSync, writeFileSync } from "node:fs";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { after, before, describe, test } from "node:test";
import { Cli, startApi } from "./harness.ts";

describe("the store", () => {
  let api: Awaited<ReturnType<typeof startApi>>;
  let cli: Cli;
  const dir = mkdtempSync(join(tmpdir(), "aenv-cli-store-"));
  before(async () => {
    api = await startApi();
    cli = new Cli({ AENV_API_URL: api.apiUrl, AENV_API_KEY: api.apiKey });
  });
  after(async () => {
    cli[Symbol.dispose]();
    await api[Symbol.asyncDispose]();
    rmSync(dir, { recursive: true, force: true });
  });
  const json = async <T>(...args: string[]): Promise<T> => JSON.parse(await cli.ok([...args, "--json"])) as T;

  test("publish, list, fetch, transfers, collect and delete", async () => {
    const id = (await cli.ok(["store", "publish", "base"])).trim();
    assert.equal(await cli.ok(["store", "list", "-q"]), `${id}\n`);
    assert.match(await cli.ok(["store", "ls"]), new RegExp(`${id} +base +10 B +10 B +yes`));
    const fetched = await json<{ templateID: string }>("store", "fetch", id, "--name", "fetched");
    assert.match(await cli.ok(["template", "info", "fetched"]), new RegExp(fetched.templateID));
    const table = await cli.ok(["store", "transfers"]);
    assert.match(table, /fetch .* done/);
    assert.match(table, /publish .* done/);
    assert.match(await cli.ok(["store", "publish", "-d", "base"]), /^x\d+\n$/);
    assert.match(await cli.ok(["store", "gc", "--dry-run", "--grace", "2h"]), /Would be deleted +0 objects/);
    assert.equal(await cli.ok(["store", "delete", id, "--yes"]), `${id}\n`);
    assert.match((await cli.run(["store", "list"])).stderr, /empty/);
    for (const args of [
      ["store", "publish", "nothing"],
      ["store", "fetch", id],
      ["store", "rm", id, "-y"],
    ]) {
      assert.equal((await cli.run(args)).code, 3, args.join(" "));
    }
  });

  test("export and import, to files and through pipes; a failed one leaves nothing", async () => {
    const file = join(dir, "base.tar");
    await cli.ok(["snapshot", "export", "base", file]);
    const again = await cli.run(["snapshot", "export", "base", file]);
    assert.equal(again.code, 6);
    assert.match(again.stderr, /--force/);
    assert.equal(
      (await json<{ bytes: number }>("snapshot", "export", "base", file, "-f")).bytes,
      readFileSync(file).length,
    );
    assert.equal(await cli.ok(["snapshot", "export", "base", "-"]), readFileSync(file, "utf8"));
    assert.equal(await cli.ok(["snapshot", "import", file, "--name", "imported"]), "imported\n");
    assert.match(await cli.ok(["template", "info", "imported"]), /imported/);
    const none = join(dir, "none.tar");
    assert.equal((await cli.run(["snapshot", "export", "nothing", none])).code, 3);
    assert.equal(existsSync(none), false);
    assert.equal((await cli.run(["snapshot", "import", none])).code, 3);
    writeFileSync(none, "no archive");
    const wrong = await cli.run(["snapshot", "import", none]);
    assert.notEqual(wrong.code, 0);
    assert.match(wrong.stderr, /cannot be read/);
    assert.deepEqual(readdirSync(dir).toSorted(), ["base.tar", "none.tar"]);
  });
});
