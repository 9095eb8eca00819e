import assert from "node:assert/strict";
import { execFileSync, spawn, spawnSync } from "node:child_process";
import { once } from "node:events";
import { mkdirSync, readFileSync, statSync, symlinkSync, writeFileSync } from "node:fs";
import { join } from "node:path";
import { after, before, describe, test } from "node:test";
import { AENV, Cli, finished, ROOT, startApi, Terminal, temporaryFolder } from "./harness.ts";

type Listed = { sandboxID: string; state: string; metadata?: Record<string, string> };

describe("sandboxes", () => {
  let api: Awaited<ReturnType<typeof startApi>>;
  let cli: Cli;
  before(async () => {
    api = await startApi();
    cli = new Cli({ AENV_API_URL: api.apiUrl, AENV_API_KEY: api.apiKey });
  });
  after(async () => {
    cli[Symbol.dispose]();
    await api[Symbol.asyncDispose]();
  });

  test("start -d prints the id and nothing else, and sends what it was given", async () => {
    const args = ["start", "-d", "base", "--timeout", "2h", "-m", "team=red", "--name", "one", "-e", "A=1"];
    const r = await cli.run(args);
    assert.match(r.stdout, /^i[a-z0-9]{19}\n$/);
    assert.equal(r.stderr, "");
    const info = JSON.parse(await cli.ok(["info", r.stdout.trim(), "--json"])) as Listed & {
      endAt: string;
      startedAt: string;
    };
    assert.deepEqual(info.metadata, { team: "red", name: "one" });
    assert.equal(Date.parse(info.endAt) - Date.parse(info.startedAt), 7_200_000);
  });

  test("start of an unknown template says so", async () => {
    const r = await cli.run(["start", "-d", "nothing"]);
    assert.equal(r.code, 125);
    assert.match(r.stderr, /nothing/);
  });

  test("list filters by label, and prints a table, ids or the API's own objects", async () => {
    const odd = "k 1&=é";
    const id = (await cli.ok(["start", "-d", "-m", "team=blue", "-m", `odd=${odd}`])).trim();
    const filter = ["-m", `odd=${odd}`];
    assert.equal(await cli.ok(["list", "-q", ...filter]), `${id}\n`);
    const json = JSON.parse(await cli.ok(["list", "--json", ...filter])) as Listed[];
    assert.deepEqual(
      json.map((s) => [s.sandboxID, s.state]),
      [[id, "running"]],
    );
    const table = await cli.ok(["list", ...filter]);
    assert.match(table, /^ID +TEMPLATE +STATE +AGE +ENDS IN +CPU +MEMORY +METADATA\n/);
    assert.ok(table.includes(id));
    assert.ok(!table.includes("\u001b"), "no colours without a terminal");
    assert.equal(await cli.ok(["ls", "-q", "--state", "paused", ...filter]), "");
  });

  test("list reads every page", async () => {
    for (let i = 0; i < 5; i++) await cli.ok(["start", "-d", "-m", "page=yes"]);
    assert.equal((await cli.ok(["list", "-q", "-m", "page=yes"])).trim().split("\n").length, 5);
    assert.equal((await cli.ok(["list", "-q", "-m", "page=yes", "--limit", "2"])).trim().split("\n").length, 2);
  });

  test("timeout sets the end, both ways", async () => {
    const id = (await cli.ok(["start", "-d"])).trim();
    for (const [given, seconds] of [
      ["1h", 3600],
      ["60", 60],
    ] as const) {
      await cli.ok(["timeout", id, given]);
      const { endAt } = JSON.parse(await cli.ok(["info", "--json", id])) as { endAt: string };
      const left = (Date.parse(endAt) - Date.now()) / 1000;
      assert.ok(left <= seconds && left > seconds - 30, `${left} s left of ${seconds}`);
    }
    await cli.ok(["timeout", id, "0"]);
    assert.equal((await cli.run(["info", id])).code, 3);
  });

  test("delete ends several, names those that are not there, and its exit code says so", async () => {
    const a = (await cli.ok(["start", "-d"])).trim();
    const b = (await cli.ok(["start", "-d"])).trim();
    const r = await cli.run(["delete", a, "inothere000000000000", b]);
    assert.equal(r.code, 3);
    assert.deepEqual(r.stdout.trim().split("\n").toSorted(), [a, b].toSorted());
    assert.match(r.stderr, /inothere/);
    const again = JSON.parse((await cli.run(["delete", "--json", a])).stdout) as unknown;
    assert.deepEqual(again, { deleted: [], missing: [a] });
  });

  test("delete --all asks, and without a terminal wants --yes", async () => {
    await cli.ok(["start", "-d", "-m", "sweep=1"]);
    const refused = await cli.run(["delete", "--all", "-m", "sweep=1"]);
    assert.equal(refused.code, 2);
    assert.match(refused.stderr, /--yes/);
    await cli.ok(["delete", "--all", "-m", "sweep=1", "--yes"]);
    assert.equal(await cli.ok(["list", "-q", "-m", "sweep=1"]), "");
    assert.equal((await cli.run(["delete"])).code, 2);
    assert.equal((await cli.run(["delete", "abc", "--all"])).code, 2);
  });

  test("metrics, logs and templates print and give JSON", async () => {
    const id = (await cli.ok(["start", "-d"])).trim();
    assert.match(await cli.ok(["metrics", id]), /^TIME \(UTC\).*CPU.*MEMORY.*DISK\n\d{4}-/);
    assert.equal((JSON.parse(await cli.ok(["metrics", id, "--json"])) as { cpuCount: number }[])[0]?.cpuCount, 1);
    assert.match(await cli.ok(["logs", id]), /info {2}sandbox started/);
    assert.doesNotMatch(await cli.ok(["logs", id, "--level", "warn"]), /sandbox started/);
    assert.match(await cli.ok(["template", "list"]), /base .*ready/);
    assert.match(await cli.ok(["template", "info", "base"]), /Names +base/);
    assert.equal((await cli.run(["template", "info", "nothing"])).code, 3);
  });

  test("metrics --follow prints each sample once", async () => {
    const id = (await cli.ok(["start", "-d"])).trim();
    const child = cli.spawn(["metrics", "--follow", "--json", id]);
    const ended = finished(child);
    await once(child.stdout ?? process.stdin, "data");
    await cli.ok(["delete", id]);
    const r = await ended;
    assert.equal(r.code, 0);
    assert.equal(r.stdout.trim().split("\n").length, 1);
    JSON.parse(r.stdout);
  });

  test("what the shell evaluates is what an SDK needs", async () => {
    const sh = execFileSync("sh", ["-c", 'eval "$(aenv env)"; echo "$E2B_API_KEY $E2B_API_URL $E2B_SANDBOX_URL"'], {
      env: cli.env,
      encoding: "utf8",
    });
    assert.equal(sh, `${api.apiKey} ${api.apiUrl} ${api.apiUrl}\n`);
    const odd = await cli.ok(["env"], { env: { AENV_API_KEY: "it's $odd" } });
    assert.ok(odd.includes(`export E2B_API_KEY='it'\\''s $odd'\n`));
    assert.match(await cli.ok(["env", "--shell", "fish"]), /^set -gx E2B_API_KEY e2b_/);
    assert.equal((JSON.parse(await cli.ok(["env", "--json"])) as { E2B_API_URL: string }).E2B_API_URL, api.apiUrl);
  });

  test("login checks the key, saves it for this user only, and logout forgets it", async () => {
    using fresh = new Cli({});
    const bad = await fresh.run(["auth", "login", "--api-url", api.apiUrl], { input: "e2b_wrong\n" });
    assert.equal(bad.code, 4);
    assert.equal((await fresh.run(["list"])).code, 4);
    await fresh.ok(["auth", "login", "--api-url", api.apiUrl], { input: `${api.apiKey}\n` });
    const path = join(fresh.home.path, ".config/aenv/config.json");
    assert.equal(statSync(path).mode & 0o777, 0o600);
    await fresh.ok(["list"]);
    const shown = await fresh.ok(["auth"]);
    assert.ok(shown.includes(path) && !shown.includes(api.apiKey));
    assert.ok((await fresh.ok(["auth", "show", "--reveal"])).includes(api.apiKey));
    await fresh.ok(["auth", "logout"]);
    assert.equal((await fresh.run(["list"])).code, 4);
  });

  test("a setting comes from the option, the environment, the login, the node's own file, in this order", async () => {
    using fresh = new Cli({});
    const source = async (args: string[], env: Record<string, string> = {}): Promise<string> =>
      (
        JSON.parse((await fresh.run(["auth", "show", "--json", "--reveal", ...args], { env })).stdout) as {
          apiKey: { value: string };
        }
      ).apiKey.value;
    mkdirSync(join(fresh.home.path, "node"));
    writeFileSync(join(fresh.home.path, "node/auth.json"), JSON.stringify({ apiKey: "local" }));
    assert.equal(await source([]), "local");
    await fresh.ok(["auth", "login", "--unchecked", "--api-key", "saved"]);
    assert.equal(await source([]), "saved");
    assert.equal(await source([], { E2B_API_KEY: "e2b" }), "e2b");
    assert.equal(await source([], { E2B_API_KEY: "e2b", AENV_API_KEY: "aenv" }), "aenv");
    assert.equal(await source(["--api-key", "flag"], { AENV_API_KEY: "aenv" }), "flag");
    assert.equal(await source([], { AENV_API_KEY: "" }), "saved");
  });

  test("on the node itself its port and key are found without any setting", async () => {
    using fresh = new Cli({});
    const home = join(fresh.home.path, "node");
    mkdirSync(home);
    writeFileSync(join(home, "auth.json"), JSON.stringify({ apiKey: api.apiKey }));
    writeFileSync(
      join(home, "config.json"),
      JSON.stringify({ port: Number(new URL(api.apiUrl).port), listen: "0.0.0.0" }),
    );
    await fresh.ok(["list"]);
    assert.match(await fresh.ok(["env"]), new RegExp(`E2B_API_URL=${api.apiUrl}\n`));
  });

  test("a damaged settings file is named", async () => {
    using fresh = new Cli({});
    mkdirSync(join(fresh.home.path, ".config/aenv"), { recursive: true });
    writeFileSync(join(fresh.home.path, ".config/aenv/config.json"), "{");
    const r = await fresh.run(["list"]);
    assert.equal(r.code, 1);
    assert.match(r.stderr, /\.config\/aenv\/config\.json is not a JSON object/);
  });

  test("a pipe whose reader goes away ends the output quietly", () => {
    const r = spawnSync("bash", ["-c", "aenv help | head -1; echo ${PIPESTATUS[0]}"], {
      env: cli.env,
      encoding: "utf8",
    });
    assert.equal(r.stderr, "");
    assert.match(r.stdout, /^aenv: .*\n0\n$/);
  });

  test("completion offers commands, options, values and ids", async () => {
    const id = (await cli.ok(["start", "-d"])).trim();
    const complete = (...words: string[]): string[] => {
      const script = `eval "$(aenv completion bash)"; COMP_WORDS=("$@"); COMP_CWORD=$(($#-1)); _aenv; printf '%s\\n' "\${COMPREPLY[@]}"`;
      return execFileSync("bash", ["-c", script, "bash", ...words], { env: cli.env, encoding: "utf8" })
        .trim()
        .split("\n");
    };
    assert.ok(complete("aenv", "").includes("start"));
    assert.deepEqual(complete("aenv", "template", "in"), ["info"]);
    assert.deepEqual(complete("aenv", "list", "--sta"), ["--state"]);
    assert.deepEqual(complete("aenv", "list", "--state", "p"), ["paused"]);
    assert.deepEqual(complete("aenv", "start", "ba"), ["base"]);
    assert.ok(complete("aenv", "exec", "").includes(id));
    assert.ok(complete("aenv", "sandbox", "connect", "--user", "root", "").includes(id));
    assert.ok(complete("aenv", "delete", "first", "").includes(id));
  });
});

describe("questions on a terminal", () => {
  test("login takes the key without showing it", async () => {
    await using api = await startApi();
    using cli = new Cli({});
    await using t = new Terminal(cli, ["auth", "login", "--api-url", api.apiUrl]);
    await t.shows("API key: ");
    t.send(`${api.apiKey}x\u007f\r`);
    assert.deepEqual(await t.ended(), { exit: 0, restored: true });
    assert.ok(!t.output.includes(api.apiKey));
    await cli.ok(["list"]);
  });

  test("delete --all does nothing unless the answer is yes", async () => {
    await using api = await startApi();
    using cli = new Cli({ AENV_API_URL: api.apiUrl, AENV_API_KEY: api.apiKey });
    const id = (await cli.ok(["start", "-d"])).trim();
    for (const [answer, left] of [
      ["\r", `${id}\n`],
      ["no\r", `${id}\n`],
      ["y\r", ""],
    ] as const) {
      await using t = new Terminal(cli, ["delete", "--all"]);
      await t.shows("Delete 1 sandbox and its data? [y/N] ");
      t.send(answer);
      assert.deepEqual(await t.ended(), { exit: left === "" ? 0 : 1, restored: true });
      assert.equal(await cli.ok(["list", "-q"]), left);
    }
  });

  test("colours appear on a terminal, and not with NO_COLOR or --no-color", async () => {
    const coloured = async (env: Record<string, string>, ...args: string[]): Promise<boolean> => {
      using cli = new Cli(env);
      await using t = new Terminal(cli, ["help", ...args]);
      await t.ended();
      return t.output.includes("\u001b[1m");
    };
    assert.deepEqual(
      [await coloured({}), await coloured({ NO_COLOR: "1" }), await coloured({}, "--no-color")],
      [true, false, false],
    );
  });
});

describe("errors", () => {
  test("a node that does not answer is named, with what to do", async () => {
    using cli = new Cli({ AENV_API_URL: "http://127.0.0.1:1", AENV_API_KEY: "e2b_00" });
    const r = await cli.run(["list"]);
    assert.equal(r.code, 5);
    assert.match(
      r.stderr,
      /^error: Cannot reach the server at http:\/\/127\.0\.0\.1:1: nothing listens there\nhint: {2}Start the node/,
    );
    assert.ok(!r.stderr.includes("    at "), "no stack without --verbose");
    const loud = await cli.run(["list", "--verbose"]);
    assert.match(loud.stderr, /caused by .*ECONNREFUSED/);
    const json = JSON.parse((await cli.run(["list", "--json"])).stderr) as {
      error: { code: string; exitCode: number };
    };
    assert.deepEqual([json.error.code, json.error.exitCode], ["UNAVAILABLE", 5]);
  });

  test("a wrong command line says what is wrong and gives 2", async () => {
    using cli = new Cli({});
    for (const [args, text] of [
      [["lisst"], /Did you mean aenv list/],
      [["lsit"], /Did you mean aenv list/],
      [["template", "lst"], /Did you mean aenv template list/],
      [["tempalte"], /Did you mean aenv template/],
      [["ps"], /Did you mean aenv list/],
      [["help", "strat"], /Did you mean aenv start/],
      [["list", "--nothing"], /unknown option '--nothing'/i],
      [["list", "--stat", "running"], /Did you mean --state/],
      [["exec", "--usr", "root", "abc", "--", "true"], /Did you mean --user/],
      [["start", "--time", "5"], /Unknown option '--time'\nhint: .*--help/],
      [["start", "--detahc"], /Did you mean --detach/],
      [["--jsn"], /Did you mean --json/],
      [["--jsn", "list"], /Did you mean --json/],
      [["start", "--rm", "-d"], /--rm needs a shell/],
      [["connect"], /ID is missing/],
      [["exec", "abc"], /CMD is missing/],
      [["exec", "--tty", "--json", "abc", "--", "true"], /exclude each other/],
      [["list", "--limit", "0"], /--limit: "0" is not a positive whole number/],
      [["list", "-m", "novalue"], /--metadata: "novalue" is not KEY=VALUE/],
      [["list", "extra"], /too many arguments/i],
      [["info"], /ID is missing/],
      [["info", "../../x"], /ID is not a sandbox id/],
      [["timeout", "abc", "soon"], /"soon" is not a time/],
      [["completion", "tcsh"], /SHELL is bash, zsh or fish/],
      [["list", "--api-url", "localhost:8000", "--api-key", "x"], /not an http or https URL/],
    ] as const) {
      const r = await cli.run(args);
      assert.equal(r.code, 2, args.join(" "));
      assert.match(r.stderr, text);
      assert.equal(r.stdout, "");
    }
  });

  test("a missing key names every way to give one", async () => {
    using cli = new Cli({});
    const r = await cli.run(["list"]);
    assert.equal(r.code, 4);
    assert.match(r.stderr, /aenv auth login.*AENV_API_KEY.*auth\.json/);
  });
});

describe("doctor", () => {
  test("a server that is down is a finding with what to do", async () => {
    using cli = new Cli({ AENV_API_URL: "http://127.0.0.1:1", AENV_API_KEY: "e2b_00" });
    const r = await cli.run(["doctor", "--json"]);
    assert.equal(r.code, 1);
    const said = JSON.parse(r.stdout) as {
      ok: boolean;
      serverAnswers: boolean;
      checks: { name: string; fix?: string }[];
    };
    assert.deepEqual([said.ok, said.serverAnswers], [false, false]);
    assert.match(said.checks.find((c) => c.name === "server")?.fix ?? "", /npm run up/);
    assert.match((await cli.run(["doctor"])).stdout, /FAIL server: Cannot reach/);
  });
});

describe("the launcher", () => {
  test("works through a chain of symbolic links and from any folder", () => {
    using folder = temporaryFolder();
    symlinkSync(AENV, join(folder.path, "one"));
    symlinkSync("one", join(folder.path, "aenv"));
    const out = execFileSync(join(folder.path, "aenv"), ["version", "--client"], { cwd: "/", encoding: "utf8" });
    assert.match(out, /^aenv \d+\.\d+\.\d+\n$/);
  });

  test("says what to do in a clone without its dependencies", () => {
    using folder = temporaryFolder();
    mkdirSync(join(folder.path, "bin"));
    writeFileSync(join(folder.path, "bin/aenv"), readFileSync(AENV), { mode: 0o755 });
    const r = spawnSync(join(folder.path, "bin/aenv"), ["list"], { encoding: "utf8" });
    assert.equal(r.status, 1);
    assert.match(r.stderr, /npm run up/);
  });
});

describe("texts", () => {
  /** `UPDATE=1 node --test apps/cli/test/control.test.ts` writes them anew. */
  const golden = (name: string, text: string): void => {
    const path = join(ROOT, "apps/cli/test/golden", name);
    if (process.env["UPDATE"] === "1") writeFileSync(path, text);
    assert.equal(text, readFileSync(path, "utf8"), `${name} differs; UPDATE=1 writes it anew`);
  };

  test("help of aenv, of a command and of a noun are as agreed", async () => {
    using cli = new Cli({});
    golden("help.txt", await cli.ok(["--help"]));
    golden("help-exec.txt", await cli.ok(["exec", "--help"]));
    golden("help-start.txt", await cli.ok(["help", "sandbox", "start"]));
    golden("help-download.txt", await cli.ok(["download", "-h"]));
    golden("help-template.txt", await cli.ok(["template", "--help"]));
    assert.equal(await cli.ok([]), await cli.ok(["help"]));
  });

  test("completion scripts are valid for each shell that is installed", async (t) => {
    using cli = new Cli({});
    for (const [shell, check] of [
      ["bash", ["-n"]],
      ["zsh", ["-n"]],
      ["fish", ["--no-execute"]],
    ] as const) {
      const script = await cli.ok(["completion", shell]);
      if (spawnSync(shell, ["-c", "true"]).error) {
        t.diagnostic(`${shell} is not installed: its script was not checked`);
        continue;
      }
      const path = join(cli.home.path, `completion.${shell}`);
      writeFileSync(path, script);
      const child = spawn(shell, [...check, path]);
      const r = await finished(child);
      assert.equal(r.code, 0, `${shell}: ${r.stderr}`);
    }
  });
});
