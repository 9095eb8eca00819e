/** What `npm run up` shows: the official SDK against the node just started. */
import { AenvError } from "@aenv/base";
import { Sandbox } from "e2b";
import { readKey, runningServer } from "./node.ts";

function expect(what: string, got: string, wanted: string): void {
  if (got !== wanted)
    throw new AenvError("INTERNAL", `${what}: expected ${JSON.stringify(wanted)}, got ${JSON.stringify(got)}`);
}

/** Creates a sandbox, runs Python, writes and reads a file, kills it. Returns a line about it. */
export async function demonstrate(home: string, say: (note: string) => void): Promise<string> {
  const server = runningServer(home);
  if (!server) throw new AenvError("UNAVAILABLE", "the server is not running");
  const url = `http://127.0.0.1:${server.port}`;
  const started = performance.now();
  say("create");
  const sandbox = await Sandbox.create({
    apiKey: await readKey(home),
    apiUrl: url,
    sandboxUrl: url,
    timeoutMs: 60_000,
  });
  const created = performance.now();
  try {
    say("run Python");
    const python = await sandbox.commands.run("python3 -c 'print(6 * 7)'");
    expect("Python in the sandbox", python.stdout, "42\n");
    say("write and read a file");
    await sandbox.files.write("hello.txt", "written by the SDK");
    expect("the file read back", await sandbox.files.read("hello.txt"), "written by the SDK");
    const uname = await sandbox.commands.run("uname -r");
    const total = performance.now() - started;
    return `created in ${(created - started).toFixed(0)} ms, Python, a file, kernel ${uname.stdout.trim()}: ${total.toFixed(0)} ms`;
  } finally {
    await sandbox.kill();
  }
}
