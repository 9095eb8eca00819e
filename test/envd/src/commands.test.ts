import assert from "node:assert/strict";
import { after, before, test } from "node:test";
import { CommandExitError, NotFoundError, type Sandbox, TimeoutError } from "e2b";
import { type Envd, eventually, soon, startEnvd } from "./envd.ts";

let envd: Envd;
let sandbox: Sandbox;
before(async () => {
  envd = await startEnvd();
  sandbox = await envd.sandbox();
});
after(() => envd[Symbol.asyncDispose]());

test("a command gives its output, its errors and its exit code", async () => {
  const result = await sandbox.commands.run("echo out; echo err >&2");
  assert.deepEqual([result.stdout, result.stderr, result.exitCode], ["out\n", "err\n", 0]);
  await assert.rejects(sandbox.commands.run("exit 7"), (e) => e instanceof CommandExitError && e.exitCode === 7);
});

test("a command sees the sandbox's environment, the request's, and nothing of the daemon's", async () => {
  const result = await sandbox.commands.run("echo $E2B_SANDBOX $HOME $USER $MINE; env | wc -l", {
    envs: { MINE: "yes" },
  });
  assert.equal(result.stdout.split("\n")[0], `true ${envd.dir} root yes`);
  assert.ok(Number(result.stdout.trim().split("\n")[1]) < 20, result.stdout);
});

test("a working directory that does not exist is refused with its name", async () => {
  await assert.rejects(sandbox.commands.run("true", { cwd: "/no/such" }), /cwd '\/no\/such' does not exist/);
});

test("an unknown user is refused with its name", async () => {
  await assert.rejects(sandbox.commands.run("true", { user: "nobody-here" }), /invalid username: 'nobody-here'/);
});

test("another user's command runs with that user's id and groups", async () => {
  const result = await sandbox.commands.run("id -un; id -gn", { user: "daemon", cwd: "/" });
  assert.equal(result.stdout, "daemon\ndaemon\n");
});

/** How many processes of the group live; a zombie waits for the pid 1 of this host and does not count. */
async function alive(group: number): Promise<number> {
  const { stdout } = await sandbox.commands.run("ps -eo pgid=,stat=");
  return stdout.split("\n").filter((line) => new RegExp(`^\\s*${group}\\s+[^Z]`).test(line)).length;
}

test("a killed command ends with -1, takes its children along and is gone at once", async () => {
  const handle = await sandbox.commands.run("sleep 1000 & sleep 1000", { background: true });
  await eventually(async () => ((await alive(handle.pid)) >= 3 ? true : undefined));
  assert.equal(await handle.kill(), true);
  const killed = (e: unknown): boolean =>
    e instanceof CommandExitError && e.exitCode === -1 && e.error === "signal: killed";
  await assert.rejects(handle.wait(), killed);
  assert.match((await sandbox.commands.run(`kill -0 ${handle.pid} 2>&1 || true`)).stdout, /no such process/i);
  await eventually(async () => ((await alive(handle.pid)) === 0 ? true : undefined));
  assert.equal(await sandbox.commands.kill(handle.pid), false);
  assert.equal(await sandbox.commands.kill(999_999), false);
});

test("a command is listed with its tag while it runs, and a late connect still gives its end", async () => {
  const process = await envd.client.start({ cmd: "cat", stdin: true, tag: "mine" }, soon());
  const listed = (await envd.client.list(soon())).find((p) => p.pid === process.pid);
  assert.deepEqual([listed?.tag, listed?.config.cmd], ["mine", "cat"]);
  const other = await envd.client.connect({ tag: "mine" }, soon());
  await envd.client.sendInput(process.pid, { stdin: Buffer.from("abc") }, soon());
  await envd.client.closeStdin(process.pid, soon());
  for (const follower of [process, other]) {
    const seen = [];
    for await (const e of follower) seen.push(e.type === "stdout" ? e.data.toString() : e.type);
    assert.deepEqual(seen, ["abc", "end"]);
  }
  assert.equal(
    (await envd.client.list(soon())).some((p) => p.pid === process.pid),
    false,
  );
  const late = [];
  for await (const e of await envd.client.connect({ pid: process.pid }, soon())) late.push(e.type);
  assert.deepEqual(late, ["end"]);
  await assert.rejects(sandbox.commands.connect(999_999), NotFoundError);
});

test("input goes where it is allowed and is refused elsewhere", async () => {
  const handle = await sandbox.commands.run("cat", { background: true, stdin: true });
  await sandbox.commands.sendStdin(handle.pid, "hello");
  await sandbox.commands.closeStdin(handle.pid);
  assert.equal((await handle.wait()).stdout, "hello");
  const deaf = await sandbox.commands.run("sleep 1000", { background: true, stdin: false });
  await assert.rejects(sandbox.commands.sendStdin(deaf.pid, "x"), /error writing to stdin/);
  await deaf.kill();
});

test("the time-out of the start is a deadline of the process", async () => {
  const begun = await sandbox.commands.run("sleep 1000", { background: true, timeoutMs: 300 });
  await assert.rejects(begun.wait(), TimeoutError);
  await eventually(async () => ((await sandbox.commands.list()).some((p) => p.pid === begun.pid) ? undefined : true));
});

test("a process outlives the client that started it, and its output is drained with nobody there", async () => {
  const done = `${envd.dir}/done`;
  const handle = await sandbox.commands.run(`head -c 3000000 /dev/zero; touch ${done}; exec sleep 1000`, {
    background: true,
    timeoutMs: 0,
  });
  await handle.disconnect();
  await eventually(async () => ((await sandbox.files.exists(done)) ? true : undefined));
  const again = await sandbox.commands.connect(handle.pid);
  await again.kill();
  await assert.rejects(again.wait(), CommandExitError);
});

test("a background child that holds the pipes does not hold up the end of the command", async () => {
  const result = await sandbox.commands.run("sleep 1000 & echo $!");
  assert.match(result.stdout, /^\d+\n$/);
  await sandbox.commands.run(`kill ${result.stdout.trim()}`);
});

test("everything a command wrote arrives before its end, whatever its size", async () => {
  const result = await sandbox.commands.run("head -c 5000000 /dev/zero | tr '\\0' x; printf end");
  assert.equal(result.stdout.length, 5_000_003);
  assert.ok(result.stdout.endsWith("xend"));
});

test("a hundred commands at once all end", async () => {
  const results = await Promise.all(
    Array.from({ length: 100 }, (_, i) => envd.client.exec({ cmd: "/bin/sh", args: ["-c", `echo ${i}`] }, soon())),
  );
  assert.deepEqual(
    results.map((r) => r.stdout),
    Array.from({ length: 100 }, (_, i) => `${i}\n`),
  );
});

test("a terminal has the asked size, can be resized, and ends like a shell", async () => {
  let text = "";
  const terminal = await sandbox.pty.create({
    cols: 91,
    rows: 33,
    timeoutMs: 0,
    onData: (d) => void (text += new TextDecoder().decode(d)),
  });
  const type = (s: string): Promise<void> => sandbox.pty.sendInput(terminal.pid, new TextEncoder().encode(s));
  await type("stty size; echo TERM=$TERM\n");
  await eventually(() => (/33 91[^]*TERM=xterm-256color/.test(text) ? true : undefined));
  await sandbox.pty.resize(terminal.pid, { cols: 100, rows: 40 });
  await type("stty size\n");
  await eventually(() => (text.includes("40 100") ? true : undefined));
  await type("exit 5\n");
  await assert.rejects(terminal.wait(), (e) => e instanceof CommandExitError && e.exitCode === 5);
});

test("input that nobody reads is given up with the request, and the process can still be reached", async () => {
  const deaf = await envd.client.start({ cmd: "sleep", args: ["1000"], stdin: true }, soon());
  const gone = new AbortController();
  const big = envd.client.sendInput(deaf.pid, { stdin: Buffer.alloc(1 << 20) }, gone.signal);
  gone.abort(new DOMException("enough", "AbortError"));
  await assert.rejects(big, { code: "CANCELLED" });
  await envd.client.signal(deaf.pid, "SIGKILL", soon());
});

test("pipe input to a terminal and terminal input to a pipe are refused", async () => {
  const terminal = await sandbox.pty.create({ cols: 80, rows: 24, onData: () => {} });
  await assert.rejects(sandbox.commands.sendStdin(terminal.pid, "x"), /error writing to stdin/);
  await assert.rejects(sandbox.commands.closeStdin(terminal.pid), /error closing stdin/);
  assert.equal(await sandbox.pty.kill(terminal.pid), true);
  const pipe = await envd.client.start({ cmd: "cat", stdin: true }, soon());
  await assert.rejects(envd.client.sendInput(pipe.pid, { pty: Buffer.from("x") }, soon()), /error writing to tty/);
  await envd.client.signal(pipe.pid, "SIGTERM", soon());
});
