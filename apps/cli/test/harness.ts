import { type ChildProcess, execFileSync, spawn } from "node:child_process";
import { once } from "node:events";
import { mkdtempSync, rmSync } from "node:fs";
import { tmpdir } from "node:os";
import { join, resolve } from "node:path";
import { createInterface } from "node:readline";

export const ROOT = resolve(import.meta.dirname, "../../..");
const NODE = join(ROOT, "node_modules/.bin/node");
export const AENV = join(ROOT, "bin/aenv");

/** An empty folder that is gone after the test. */
export function temporaryFolder(): { path: string } & Disposable {
  const path = mkdtempSync(join(tmpdir(), "aenv-cli-"));
  return { path, [Symbol.dispose]: () => rmSync(path, { recursive: true, force: true }) };
}

export async function stop(child: ChildProcess): Promise<void> {
  if (child.exitCode !== null || child.signalCode !== null) return;
  const gone = once(child, "exit");
  child.kill("SIGTERM");
  await gone;
}

async function firstLine(stream: NodeJS.ReadableStream, shape: RegExp): Promise<string> {
  for await (const line of createInterface({ input: stream })) if (shape.test(line)) return line;
  throw new Error("the program ended before it said that it is ready");
}

export interface Result {
  code: number | null;
  signal: NodeJS.Signals | null;
  stdout: string;
  stderr: string;
}

export interface RunOptions {
  input?: string | Buffer;
  env?: Record<string, string>;
  cwd?: string;
}

/** An aenv command line as a user of this host would run it: own home, nothing inherited but PATH. */
export class Cli implements Disposable {
  readonly home = temporaryFolder();
  readonly env: Record<string, string>;

  constructor(env: Record<string, string>) {
    this.env = {
      PATH: `${join(ROOT, "bin")}:${process.env["PATH"] ?? ""}`,
      HOME: this.home.path,
      AENV_HOME: join(this.home.path, "node"),
      ...env,
    };
  }

  spawn(args: readonly string[], options: { env?: Record<string, string>; cwd?: string } = {}): ChildProcess {
    return spawn(AENV, args, {
      env: { ...this.env, ...options.env },
      stdio: ["pipe", "pipe", "pipe"],
      ...(options.cwd === undefined ? {} : { cwd: options.cwd }),
    });
  }

  async run(args: readonly string[], options: RunOptions = {}): Promise<Result> {
    const child = this.spawn(args, options);
    child.stdin?.on("error", () => {});
    child.stdin?.end(options.input);
    return await finished(child);
  }

  /** stdout of a command that must succeed. */
  async ok(args: readonly string[], options: RunOptions = {}): Promise<string> {
    const r = await this.run(args, options);
    if (r.code !== 0) throw new Error(`aenv ${args.join(" ")} ended with ${r.code}: ${r.stderr}`);
    return r.stdout;
  }

  [Symbol.dispose](): void {
    this.home[Symbol.dispose]();
  }
}

export async function finished(child: ChildProcess): Promise<Result> {
  let stdout = "";
  let stderr = "";
  child.stdout?.on("data", (d: Buffer) => (stdout += d.toString()));
  child.stderr?.on("data", (d: Buffer) => (stderr += d.toString()));
  const [code, signal] = (await once(child, "close")) as [number | null, NodeJS.Signals | null];
  return { code, signal, stdout, stderr };
}

/** The real server's API over an engine without machines. */
export async function startApi(
  env: Record<string, string> = {},
): Promise<{ apiUrl: string; apiKey: string } & AsyncDisposable> {
  const child = spawn(NODE, [join(ROOT, "apps/server/test/fake-server.ts")], {
    env: { ...process.env, ...env },
    stdio: ["ignore", "pipe", "inherit"],
  });
  const { apiUrl, apiKey } = JSON.parse(await firstLine(child.stdout, /^\{/)) as { apiUrl: string; apiKey: string };
  return { apiUrl, apiKey, [Symbol.asyncDispose]: () => stop(child) };
}

/** The real agent of a sandbox, on this host. */
export async function startAgent(): Promise<{ url: string; child: ChildProcess } & AsyncDisposable> {
  execFileSync(NODE, [join(ROOT, "tools/src/build-guest.ts")], { stdio: ["ignore", "ignore", "inherit"] });
  const binary = join(ROOT, ".cache/guest/aenv-guest");
  const child = spawn(binary, ["envd", "--addr", "127.0.0.1:0"], { stdio: ["ignore", "ignore", "pipe"] });
  const line = await firstLine(child.stderr, /listening on/);
  child.stderr.resume();
  return { url: `http://${line.split(" ").at(-1)}`, child, [Symbol.asyncDispose]: () => stop(child) };
}

/** A sandbox as far as the command line can tell: the API's record, and an agent that answers. */
export async function startSandbox(): Promise<{ cli: Cli; id: string; agent: ChildProcess } & AsyncDisposable> {
  await using undo = new AsyncDisposableStack();
  const api = undo.use(await startApi());
  const agent = undo.use(await startAgent());
  const cli = undo.use(new Cli({ AENV_API_URL: api.apiUrl, AENV_API_KEY: api.apiKey, AENV_SANDBOX_URL: agent.url }));
  const id = (await cli.ok(["start", "-d", "--timeout", "1h"])).trim();
  const owned = undo.move();
  return { cli, id, agent: agent.child, [Symbol.asyncDispose]: () => owned.disposeAsync() };
}

/** aenv on a terminal of its own. */
export class Terminal implements AsyncDisposable {
  readonly #child: ChildProcess;
  readonly #waiters = new Set<() => void>();
  output = "";
  end: { exit: number; restored: boolean } | undefined;

  constructor(cli: Cli, args: readonly string[], size: readonly [cols: number, rows: number] = [80, 24]) {
    this.#child = spawn(
      "python3",
      [join(import.meta.dirname, "on_terminal.py"), String(size[0]), String(size[1]), AENV, ...args],
      {
        env: { ...cli.env, TERM: "xterm" },
        stdio: ["pipe", "pipe", "inherit"],
      },
    );
    createInterface({ input: this.#child.stdout ?? process.stdin }).on("line", (line) => {
      const said = JSON.parse(line) as { out: string } | { exit: number; restored: boolean };
      if ("out" in said) this.output += said.out;
      else this.end = said;
      for (const wake of this.#waiters) wake();
    });
    this.#child.once("exit", () => {
      for (const wake of this.#waiters) wake();
    });
  }

  #say(step: unknown): void {
    this.#child.stdin?.write(`${JSON.stringify(step)}\n`);
  }

  send(text: string): void {
    this.#say({ send: text });
  }

  resize(cols: number, rows: number): void {
    this.#say({ resize: [cols, rows] });
  }

  signal(name: NodeJS.Signals): void {
    this.#say({ signal: name });
  }

  async #until(done: () => boolean): Promise<void> {
    while (!done()) {
      if (this.#child.exitCode !== null && !done()) throw new Error(`the terminal ended; it showed: ${this.output}`);
      await new Promise<void>((resolve) => {
        const wake = (): void => {
          this.#waiters.delete(wake);
          resolve();
        };
        this.#waiters.add(wake);
      });
    }
  }

  async shows(text: string | RegExp): Promise<void> {
    await this.#until(() => (typeof text === "string" ? this.output.includes(text) : text.test(this.output)));
  }

  async ended(): Promise<{ exit: number; restored: boolean }> {
    await this.#until(() => this.end !== undefined);
    if (this.end === undefined) throw new Error("unreachable");
    return this.end;
  }

  async [Symbol.asyncDispose](): Promise<void> {
    if (this.#child.exitCode !== null) return;
    const gone = once(this.#child, "exit");
    if (this.end === undefined) this.signal("SIGKILL");
    await gone;
  }
}
