import assert from "node:assert/strict";
import { test } from "node:test";
import { CommandExitError, InvalidArgumentError, NotFoundError, TimeoutError } from "e2b";
import { eventually, sandboxFor } from "./node.ts";

const LIMIT = { timeout: 120_000 };

test("a command's output, exit code and error reach the SDK", LIMIT, async (t) => {
  const sandbox = await sandboxFor(t);
  const ok = await sandbox.commands.run("echo out; echo err >&2");
  assert.deepEqual([ok.exitCode, ok.stdout, ok.stderr], [0, "out\n", "err\n"]);
  await assert.rejects(
    sandbox.commands.run("echo partial; exit 7"),
    (e: unknown) => e instanceof CommandExitError && e.exitCode === 7 && e.stdout === "partial\n",
  );
});

test("commands run as user in its home, and as root when asked, with the environment given", LIMIT, async (t) => {
  const sandbox = await sandboxFor(t, { envs: { FROM_CREATE: "one", SHARED: "create" } });
  const plain = await sandbox.commands.run("id -un; pwd; echo $FROM_CREATE $SHARED", { envs: { SHARED: "command" } });
  assert.equal(plain.stdout, "user\n/home/user\none command\n");
  const root = await sandbox.commands.run("id -un; pwd; echo $E2B_SANDBOX_ID", { user: "root", cwd: "/etc" });
  assert.equal(root.stdout, `root\n/etc\n${sandbox.sandboxId}\n`);
  assert.equal((await sandbox.commands.run("sudo id -un")).stdout, "root\n");
});

test("an unknown user and a missing working directory are refused with their names", LIMIT, async (t) => {
  const sandbox = await sandboxFor(t);
  await assert.rejects(sandbox.commands.run("true", { user: "nobody-here" }), /invalid username: 'nobody-here'/);
  await assert.rejects(
    sandbox.commands.run("true", { cwd: "/no/such/folder" }),
    (e: unknown) => e instanceof InvalidArgumentError && e.message.includes("cwd '/no/such/folder' does not exist"),
  );
});

test("a background command streams, takes input to its end and can be connected to by pid", LIMIT, async (t) => {
  const sandbox = await sandboxFor(t);
  const handle = await sandbox.commands.run("cat; echo end", { background: true, stdin: true });
  const listed = await sandbox.commands.list();
  assert.ok(listed.some((p) => p.pid === handle.pid));
  const seen: string[] = [];
  const second = await sandbox.commands.connect(handle.pid, { onStdout: (s) => void seen.push(s) });
  await sandbox.commands.sendStdin(handle.pid, "hello\n");
  await eventually(async () => seen.join("").includes("hello"));
  await sandbox.commands.closeStdin(handle.pid);
  assert.equal((await handle.wait()).stdout, "hello\nend\n");
  assert.equal((await second.wait()).exitCode, 0);
});

test("kill ends a command with its signal, leaves no process and is false for an unknown pid", LIMIT, async (t) => {
  const sandbox = await sandboxFor(t);
  const handle = await sandbox.commands.run("sleep 1000", { background: true });
  assert.equal(await sandbox.commands.kill(handle.pid), true);
  await assert.rejects(
    handle.wait(),
    (e: unknown) => e instanceof CommandExitError && e.exitCode === -1 && e.error === "signal: killed",
  );
  await assert.rejects(sandbox.commands.run(`kill -0 ${handle.pid}`, { user: "root" }), CommandExitError);
  assert.equal(await sandbox.commands.kill(999_999), false);
  await assert.rejects(sandbox.commands.connect(999_999), (e: unknown) => e instanceof NotFoundError);
});

test("a command over its time limit is ended with a timeout", LIMIT, async (t) => {
  const sandbox = await sandboxFor(t);
  await assert.rejects(sandbox.commands.run("sleep 60", { timeoutMs: 500 }), (e: unknown) => e instanceof TimeoutError);
});

test("8 MiB of output arrive whole and in order", LIMIT, async (t) => {
  const sandbox = await sandboxFor(t);
  const result = await sandbox.commands.run("head -c 8388608 /dev/zero | tr '\\0' x; echo; echo done", {
    timeoutMs: 100_000,
  });
  assert.equal(result.stdout.length, 8_388_608 + "\ndone\n".length);
  assert.ok(result.stdout.endsWith("x\ndone\n"));
});

test("a pseudo-terminal has its size, takes input, resizes and ends", LIMIT, async (t) => {
  const sandbox = await sandboxFor(t);
  let screen = "";
  const decoder = new TextDecoder();
  const pty = await sandbox.pty.create({
    cols: 81,
    rows: 31,
    onData: (d) => void (screen += decoder.decode(d, { stream: true })),
  });
  const type = (line: string): Promise<void> => sandbox.pty.sendInput(pty.pid, new TextEncoder().encode(`${line}\n`));
  await type("stty size; tput cols");
  await eventually(async () => /31 81/.test(screen));
  await sandbox.pty.resize(pty.pid, { cols: 100, rows: 40 });
  await type("stty size");
  await eventually(async () => /40 100/.test(screen));
  await type("exit 3");
  await assert.rejects(pty.wait(), (e: unknown) => e instanceof CommandExitError && e.exitCode === 3);
});
