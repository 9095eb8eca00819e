import assert from "node:assert/strict";
import { randomBytes } from "node:crypto";
import { createInterface } from "node:readline";
import { after, before, describe, test } from "node:test";
import { finished, startSandbox, stop, Terminal } from "./harness.ts";

describe("exec", () => {
  let world: Awaited<ReturnType<typeof startSandbox>>;
  before(async () => {
    world = await startSandbox();
  });
  after(async () => {
    await world[Symbol.asyncDispose]();
  });
  const exec = (...args: string[]): Promise<Awaited<ReturnType<typeof world.cli.run>>> =>
    world.cli.run(["exec", world.id, "--", ...args]);

  test("arguments reach the command as they are, and each stream its own", async () => {
    const r = await exec("sh", "-c", 'printf "%s|" "$@"; echo err >&2', "sh", "a b", "$HOME", "", "--x", "--");
    assert.deepEqual(r, { code: 0, signal: null, stdout: "a b|$HOME||--x|--|", stderr: "err\n" });
  });

  test("the exit code is the command's", async () => {
    assert.equal((await exec("sh", "-c", "exit 42")).code, 42);
  });

  test("a command ended by a signal gives 128 and the signal's number", async () => {
    assert.equal((await exec("sh", "-c", "kill -KILL $$")).code, 137);
    assert.equal((await exec("sh", "-c", "kill -TERM $$")).code, 143);
    assert.equal((await exec("sh", "-c", "kill -SEGV $$")).code, 139);
  });

  test("no signal is ignored in a new process", async () => {
    assert.equal((await exec("sh", "-c", "kill -HUP $$")).code, 129);
    assert.equal((await exec("sh", "-c", "kill -PIPE $$")).code, 141);
  });

  test("a program that is not there gives 127", async () => {
    const r = await exec("no-such-program");
    assert.equal(r.code, 127);
    assert.match(r.stderr, /no-such-program: there is no such program/);
    assert.equal((await exec("/no/such/program")).code, 127);
  });

  test("a folder that is not there is aenv's own failure: 125 and a message", async () => {
    const r = await world.cli.run(["exec", world.id, "--cwd", "/nowhere", "--", "true"]);
    assert.equal(r.code, 125);
    assert.match(r.stderr, /\/nowhere/);
  });

  test("a user that is not there is named", async () => {
    const r = await world.cli.run(["exec", world.id, "--user", "nobody-here", "--", "true"]);
    assert.equal(r.code, 125);
    assert.match(r.stderr, /nobody-here/);
  });

  test("standard input, output and its end pass through unchanged, whatever the bytes", async () => {
    const bytes = randomBytes(3 * 1024 * 1024);
    const child = world.cli.spawn(["exec", world.id, "--", "cat"]);
    const parts: Buffer[] = [];
    child.stdout?.on("data", (d: Buffer) => parts.push(d));
    child.stdin?.end(bytes);
    const r = await finished(child);
    assert.equal(r.code, 0, r.stderr);
    assert.ok(Buffer.concat(parts).equals(bytes));
  });

  test("a command that does not read its input ends although the input does not", async () => {
    const child = world.cli.spawn(["exec", world.id, "--", "echo", "done"]);
    const r = await finished(child);
    assert.equal(r.code, 0);
    assert.equal(r.stdout, "done\n");
  });

  test("--no-stdin leaves the input to the caller", async () => {
    const r = await world.cli.run(["exec", "-n", world.id, "--", "wc", "-c"], { input: "four" });
    assert.equal(r.stdout.trim(), "0");
  });

  test("variables, folder and user are the command's", async () => {
    const args = ["exec", "-e", "A=x=y", "--cwd", "/tmp", "--user", "root", world.id, "--", "sh", "-c"];
    assert.equal(await world.cli.ok([...args, 'echo "$A $PWD $(id -un)"']), "x=y /tmp root\n");
  });

  test("--timeout kills the command and gives 124", async () => {
    const r = await world.cli.run(["exec", "--timeout", "1", world.id, "--", "sleep", "600"]);
    assert.equal(r.code, 124);
    assert.match(r.stderr, /longer than --timeout 1 s/);
  });

  test("Ctrl-C reaches the command's whole group, and its answer counts", async () => {
    const script =
      'trap "echo caught; exit 9" INT; (trap "echo child; exit" INT; echo ready; sleep 600 & wait) & wait; wait';
    const child = world.cli.spawn(["exec", world.id, "--", "sh", "-c", script]);
    const ended = finished(child);
    await lineOf(child.stdout, "ready");
    child.kill("SIGINT");
    const r = await ended;
    assert.equal(r.code, 9);
    assert.match(r.stdout, /caught/);
  });

  test("SIGTERM is passed on", async () => {
    const child = world.cli.spawn(["exec", world.id, "--", "sh", "-c", "echo ready; exec sleep 600"]);
    const ended = finished(child);
    await lineOf(child.stdout, "ready");
    child.kill("SIGTERM");
    assert.equal((await ended).code, 143);
  });

  test("the third Ctrl-C ends a command that ignores them", async () => {
    const child = world.cli.spawn([
      "exec",
      world.id,
      "--",
      "sh",
      "-c",
      'trap "echo no" INT; echo ready; while :; do sleep 0.05; done',
    ]);
    const ended = finished(child);
    await lineOf(child.stdout, "ready");
    child.kill("SIGINT");
    await lineOf(child.stdout, "no");
    child.kill("SIGINT");
    await lineOf(child.stdout, "no");
    child.kill("SIGINT");
    assert.equal((await ended).code, 137);
  });

  test("a reader that goes away ends the command, as a local one", async () => {
    const child = world.cli.spawn(["exec", world.id, "--", "sh", "-c", "echo $$; exec yes"]);
    const pid = await lineOf(child.stdout, "");
    child.stdout?.destroy();
    assert.equal((await finished(child)).code, 141);
    const gone = await exec("sh", "-c", `kill -0 ${pid} 2>/dev/null && echo alive || echo gone`);
    assert.equal(gone.stdout, "gone\n");
  });

  test("--json gives code, signal and both streams as one object", async () => {
    const r = await world.cli.run(["exec", "--json", world.id, "--", "sh", "-c", "echo a; echo b >&2; exit 3"]);
    assert.equal(r.code, 3);
    assert.deepEqual(JSON.parse(r.stdout), { exitCode: 3, signal: null, stdout: "a\n", stderr: "b\n" });
    const killed = await world.cli.run(["exec", "--json", world.id, "--", "sh", "-c", "kill -9 $$"]);
    assert.equal((JSON.parse(killed.stdout) as { signal: string }).signal, "SIGKILL");
  });

  test("an option of the command before -- is explained", async () => {
    const r = await world.cli.run(["exec", world.id, "ls", "-l"]);
    assert.equal(r.code, 2);
    assert.match(r.stderr, /after --/);
  });

  test("an id that is empty in a script is missing, and the command is not taken for it", async () => {
    const r = await world.cli.run(["exec", "--", "uname", "-a"]);
    assert.equal(r.code, 2);
    assert.match(r.stderr, /ID is missing/);
    assert.match((await world.cli.run(["exec", world.id, "--"])).stderr, /CMD is missing/);
  });

  test("a sandbox that does not exist is said so", async () => {
    const r = await world.cli.run(["exec", "ixxxnotthere00000000", "--", "true"]);
    assert.equal(r.code, 125);
    assert.match(r.stderr, /there is no sandbox ixxxnotthere/);
  });
});

describe("a terminal", () => {
  let world: Awaited<ReturnType<typeof startSandbox>>;
  before(async () => {
    world = await startSandbox();
  });
  after(async () => {
    await world[Symbol.asyncDispose]();
  });

  test("exec --tty has the size of ours, follows it, echoes once and passes the exit code", async () => {
    const script =
      'stty size; until stty size | grep -q "50 132"; do sleep 0.05; done; echo ready; read x; echo "got $x"; exit 5';
    await using t = new Terminal(world.cli, ["exec", "-t", world.id, "--", "bash", "-c", script], [101, 37]);
    await t.shows("37 101");
    t.resize(132, 50);
    await t.shows("ready");
    t.send("hello\r");
    await t.shows("got hello");
    assert.deepEqual(await t.ended(), { exit: 5, restored: true });
    assert.equal(t.output.split("hello").length - 1, 2, "once as echo, once as answer");
  });

  test("connect opens a shell that ends with Ctrl-D and gives its exit code", async () => {
    await using t = new Terminal(world.cli, ["connect", world.id]);
    t.send("PS1='prompt> '; echo $((4000+242)); false\r");
    await t.shows(/4242[^]*prompt> /);
    t.send("\u0004");
    assert.deepEqual(await t.ended(), { exit: 1, restored: true });
  });

  test("Ctrl-C reaches the program and not aenv", async () => {
    await using t = new Terminal(world.cli, [
      "exec",
      "-t",
      world.id,
      "--",
      "bash",
      "-c",
      'trap "echo caught; exit 7" INT; echo ready; while :; do sleep 0.05; done',
    ]);
    await t.shows("ready");
    t.send("\u0003");
    await t.shows("caught");
    assert.deepEqual(await t.ended(), { exit: 7, restored: true });
  });

  test("~. at the beginning of a line leaves and hangs up", async () => {
    await using t = new Terminal(world.cli, [
      "exec",
      "-t",
      world.id,
      "--",
      "bash",
      "-c",
      'echo pid=$$.; trap "" INT; sleep 600',
    ]);
    await t.shows(/pid=\d+\./);
    const pid = /pid=(\d+)\./.exec(t.output)?.[1] ?? "";
    t.send("~.");
    assert.deepEqual(await t.ended(), { exit: 129, restored: true });
    const r = await world.cli.run([
      "exec",
      world.id,
      "--",
      "sh",
      "-c",
      `kill -0 ${pid} 2>/dev/null && echo alive || echo gone`,
    ]);
    assert.equal(r.stdout, "gone\n");
  });

  test("the terminal is set back when aenv is ended by a signal", async () => {
    for (const [name, code] of [
      ["SIGTERM", 143],
      ["SIGHUP", 129],
    ] as const) {
      await using t = new Terminal(world.cli, ["exec", "-t", world.id, "--", "sh", "-c", "echo ready; sleep 600"]);
      await t.shows("ready");
      t.signal(name);
      assert.deepEqual(await t.ended(), { exit: code, restored: true });
    }
  });

  test("start attaches, --rm deletes the sandbox afterwards", async () => {
    await using t = new Terminal(world.cli, ["start", "--rm", "--name", "gone-soon"]);
    t.send("exit 3\r");
    assert.deepEqual(await t.ended(), { exit: 3, restored: true });
    assert.equal(await world.cli.ok(["list", "-q", "-m", "name=gone-soon"]), "");
  });

  test("start without --rm leaves it and says how to come back", async () => {
    await using t = new Terminal(world.cli, ["start", "--name", "stays"]);
    t.send("exit\r");
    assert.equal((await t.ended()).exit, 0);
    const id = (await world.cli.ok(["list", "-q", "-m", "name=stays"])).trim();
    assert.ok(t.output.includes(`aenv connect ${id}`));
  });

  test("an open shell holds a lease: the sandbox lives on, however short its time, from before the shell can be used", async () => {
    const leftOf = async (id: string): Promise<number> => {
      const { endAt } = JSON.parse(await world.cli.ok(["info", "--json", id])) as { endAt: string };
      return (Date.parse(endAt) - Date.now()) / 1000;
    };
    await using started = new Terminal(world.cli, ["start", "--timeout", "20", "--name", "short"]);
    started.send("echo $((3000+21))\r");
    await started.shows("3021");
    const id = (await world.cli.ok(["list", "-q", "-m", "name=short"])).trim();
    assert.ok((await leftOf(id)) > 20);
    const other = (await world.cli.ok(["start", "-d", "--timeout", "20"])).trim();
    await using connected = new Terminal(world.cli, ["connect", other, "--timeout", "1"]);
    connected.send("echo $((3000+22))\r");
    await connected.shows("3022");
    assert.ok((await leftOf(other)) > 20);
  });

  test("a connection that breaks is reported, and the terminal set back", async () => {
    await using lost = await startSandbox();
    await using t = new Terminal(lost.cli, ["exec", "-t", lost.id, "--", "sh", "-c", "echo ready; sleep 600"]);
    await t.shows("ready");
    lost.agent.kill("SIGKILL");
    assert.deepEqual(await t.ended(), { exit: 125, restored: true });
    assert.match(t.output, /connection to the sandbox .* broke/i);
  });

  test("a sandbox that was deleted meanwhile is reported as that", async () => {
    await using lost = await startSandbox();
    await using t = new Terminal(lost.cli, ["connect", lost.id]);
    t.send("echo $((2000+323))\r");
    await t.shows("2323");
    await lost.cli.ok(["delete", lost.id]);
    await stop(lost.agent);
    assert.deepEqual(await t.ended(), { exit: 125, restored: true });
    assert.match(t.output, /has ended/);
  });
});

async function lineOf(stream: NodeJS.ReadableStream | null, text: string): Promise<string> {
  if (stream === null) throw new Error("no stream");
  const lines = createInterface({ input: stream });
  try {
    return await new Promise((resolve, reject) => {
      lines.on("line", (line) => {
        if (line.includes(text)) resolve(line);
      });
      lines.once("close", () => reject(new Error(`the stream ended without ${text}`)));
    });
  } finally {
    lines.removeAllListeners();
  }
}
