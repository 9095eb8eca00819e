/** Ctrl-C and signals at the earliest moment at which somebody can send them: when the first byte is seen. */
import assert from "node:assert/strict";
import { once } from "node:events";
import { join } from "node:path";
import { after, before, describe, test } from "node:test";
import { Cli, finished, startSandbox, Terminal } from "./harness.ts";

const SLOW = { NODE_OPTIONS: `--import=${join(import.meta.dirname, "slow-writes.ts")}` };
const CTRL_C = "\u0003";

describe("as soon as something is shown", () => {
  let world: Awaited<ReturnType<typeof startSandbox>>;
  let slow: Cli;
  before(async () => {
    world = await startSandbox();
    slow = new Cli({ ...world.cli.env, ...SLOW });
  });
  after(async () => {
    slow[Symbol.dispose]();
    await world[Symbol.asyncDispose]();
  });

  for (const [what, args, shown] of [
    ["the question for the key", ["auth", "login"], "API key: "],
    ["a question for yes or no", ["delete", "--all"], "[y/N] "],
    ["a followed log", ["logs", "--follow", "ID"], /./],
    ["followed metrics", ["metrics", "--follow", "ID"], /./],
    ["a start that will open a shell", ["start", "--name", "early"], /./],
    ["a start that will delete", ["start", "--rm", "--name", "early-rm"], /./],
  ] as const)
    test(`Ctrl-C at ${what} gives 130 and the terminal back`, async () => {
      await using t = new Terminal(
        slow,
        args.map((a) => (a === "ID" ? world.id : a)),
      );
      await t.shows(shown);
      t.send(CTRL_C);
      assert.deepEqual(await t.ended(), { exit: 130, restored: true });
      assert.equal((await world.cli.ok(["list", "-q"])).includes(world.id), true, "nothing was deleted");
      if (args[1] === "--rm") assert.equal(await world.cli.ok(["list", "-q", "-m", "name=early-rm"]), "");
    });

  for (const [name, code] of [
    ["SIGINT", 130],
    ["SIGTERM", 143],
    ["SIGHUP", 129],
  ] as const) {
    for (const command of ["logs", "metrics"] as const)
      test(`${name} ends ${command} --follow with ${code}`, async () => {
        const child = slow.spawn([command, "--follow", "--json", world.id]);
        const ended = finished(child);
        await once(child.stdout ?? process.stdin, "data");
        child.kill(name);
        const r = await ended;
        assert.deepEqual([r.code, r.signal, r.stderr], [code, null, ""]);
        for (const line of r.stdout.trim().split("\n")) JSON.parse(line);
      });

    test(`${name} at a question gives ${code} and the terminal back`, async () => {
      for (const args of [
        ["auth", "login"],
        ["delete", "--all"],
      ]) {
        await using t = new Terminal(slow, args);
        await t.shows(/: $|\] $/);
        t.signal(name);
        assert.deepEqual(await t.ended(), { exit: code, restored: true });
      }
    });

    test(`${name} at a program's first output on a terminal hangs up, gives ${code} and the terminal back`, async () => {
      await using t = new Terminal(slow, ["exec", "-t", world.id, "--", "sh", "-c", "echo here; sleep 600"]);
      await t.shows("here");
      t.signal(name);
      assert.deepEqual(await t.ended(), { exit: code, restored: true });
    });

    test(`${name} at a command's first output reaches the command`, async () => {
      const child = slow.spawn(["exec", world.id, "--", "sh", "-c", "echo here; exec sleep 600"]);
      const ended = finished(child);
      await once(child.stdout ?? process.stdin, "data");
      child.kill(name);
      assert.equal((await ended).code, code);
    });
  }

  test("what is typed at once is the answer", async () => {
    await using t = new Terminal(slow, ["delete", "--all"]);
    await t.shows("[y/N] ");
    t.send("nx\u007fope\b\b\bo\r");
    assert.deepEqual(await t.ended(), { exit: 1, restored: true });
    assert.match(t.output, /Nothing was deleted/);
  });
});
