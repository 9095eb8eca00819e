import assert from "node:assert/strict";
import { after, before, describe, test } from "node:test";
import { Cli, startApi } from "./harness.ts";

describe("network", () => {
  let api: Awaited<ReturnType<typeof startApi>>;
  let cli: Cli;
  let id: string;
  before(async () => {
    api = await startApi();
    cli = new Cli({ AENV_API_URL: api.apiUrl, AENV_API_KEY: api.apiKey });
    id = (await cli.ok(["start", "-d"])).trim();
  });
  after(async () => {
    cli[Symbol.dispose]();
    await api[Symbol.asyncDispose]();
  });
  const shown = async (): Promise<unknown> => JSON.parse(await cli.ok(["network", "show", id, "--json"]));

  test("set replaces all rules by those that it is given", async () => {
    await cli.ok(["network", "set", id, "--internet", "off", "--allow", "pypi.org", "--allow", "1.1.1.1"]);
    assert.deepEqual(await shown(), { allowInternetAccess: false, allowOut: ["pypi.org", "1.1.1.1"] });
    await cli.ok(["network", "set", id, "--deny", "9.9.9.0/24", "--proxy", "me:pa:ss@proxy.example.com:1080"]);
    assert.deepEqual(await shown(), {
      allowInternetAccess: null,
      denyOut: ["9.9.9.0/24"],
      egressProxy: { address: "proxy.example.com:1080", username: "me" },
    });
    await cli.ok(["network", "set", id]);
    assert.deepEqual(await shown(), { allowInternetAccess: null });
  });

  test("headers are told by domain, and show keeps their values to itself", async () => {
    const secret = "Bearer a=b/c";
    await cli.ok([
      "network",
      "set",
      id,
      "--header",
      `api.test.org/Authorization=${secret}`,
      "--header",
      "api.test.org/X-A=1",
    ]);
    assert.deepEqual(await shown(), {
      allowInternetAccess: null,
      rules: {
        "api.test.org": [
          { transform: { headers: { Authorization: secret } } },
          { transform: { headers: { "X-A": "1" } } },
        ],
      },
    });
    const text = await cli.ok(["network", "show", id]);
    assert.match(text, /^Headers +api\.test\.org: Authorization, X-A$/m);
    assert.doesNotMatch(text, /Bearer/);
  });

  test("what cannot be read is named as it was written", async () => {
    for (const [args, message] of [
      [["--header", "api.test.org"], /--header: .*DOMAIN\/NAME=VALUE/],
      [["--proxy", "a@b@c"], /--proxy: .*HOST:PORT/],
      [["--internet", "maybe"], /--internet/],
    ] as const) {
      const r = await cli.run(["network", "set", id, ...args]);
      assert.equal(r.code, 2);
      assert.match(r.stderr, message);
    }
    assert.equal((await cli.run(["network", "set", "inotthere00000000000"])).code, 3);
  });
});
