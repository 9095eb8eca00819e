/** What `npm run up` shows: the official SDK against the node just started. */
import { AenvError } from "@aenv/base";
import { Sandbox } from "e2b";
import { readKey, runningServer } from "./node.ts";

function expect(what: string, got: string, wanted: string): void {
  if (got !== wanted)
    throw new AenvError("INTERNAL", `${what}: expected ${JSON.stringify(wanted)}, got ${JSON.stringify(got)}`);
}

export interface Demonstration {
  /** For the line of the step. */
  summary: string;
  /** What the children of the fork answered, a line each. */
  children: string[];
}

/** A program that holds numbers in nothing but its memory, and answers the question that it finds. */
const PROGRAM = `
import os, random, time
numbers = [random.randrange(1_000_000) for _ in range(5000)]
answers = {
    "the smallest of its numbers": min, "the largest": max, "their sum": sum,
    "how many differ": lambda n: len(set(n)),
}
open("ready", "w").close()
while not os.path.exists("question"): time.sleep(0.01)
answer = answers[open("question").read()](numbers)
open("answer.tmp", "w").write(str(answer))
os.rename("answer.tmp", "answer")
`;
const QUESTIONS = ["the smallest of its numbers", "the largest", "their sum", "how many differ"];
const WAIT = "while [ ! -e ready ]; do sleep 0.01; done";
/** The question appears whole, and the answer is waited for. */
const ASK = `printf %s "$QUESTION" > question.tmp && mv question.tmp question; while [ ! -e answer ]; do sleep 0.01; done; cat answer`;

/**
 * Creates a sandbox, runs Python, writes and reads a file; then starts a program, forks the sandbox four ways and asks
 * the program something else in each child. All are killed.
 */
export async function demonstrate(home: string, say: (note: string) => void): Promise<Demonstration> {
  const server = runningServer(home);
  if (!server) throw new AenvError("UNAVAILABLE", "the server is not running");
  const url = `http://127.0.0.1:${server.port}`;
  const started = performance.now();
  const sandboxes: Sandbox[] = [];
  say("create");
  try {
    const sandbox = await Sandbox.create({
      apiKey: await readKey(home),
      apiUrl: url,
      sandboxUrl: url,
      timeoutMs: 300_000,
    });
    sandboxes.push(sandbox);
    const created = performance.now();
    say("run Python");
    expect("Python in the sandbox", (await sandbox.commands.run("python3 -c 'print(6 * 7)'")).stdout, "42\n");
    say("write and read a file");
    await sandbox.files.write("program.py", PROGRAM);
    expect("the file read back", await sandbox.files.read("program.py"), PROGRAM);
    const { pid } = await sandbox.commands.run("python3 program.py", { background: true, timeoutMs: 0 });
    await sandbox.commands.run(WAIT);
    say("fork it four ways");
    const from = performance.now();
    for (const child of await sandbox.fork({ count: QUESTIONS.length, timeoutMs: 300_000 })) {
      if (child instanceof Error) throw child;
      sandboxes.push(child);
    }
    const forked = performance.now() - from;
    say("ask each child something else");
    const children = await Promise.all(
      sandboxes.slice(1).map(async (child, i) => {
        const question = QUESTIONS[i] ?? "";
        const { stdout } = await child.commands.run(ASK, { envs: { QUESTION: question } });
        return `${child.sandboxId}  ${question.padEnd(28)} ${stdout.trim().padStart(12)}`;
      }),
    );
    if (new Set(children.map((c) => c.split(" ").at(-1))).size !== QUESTIONS.length)
      throw new AenvError("INTERNAL", `the children of the fork gave the same answers:\n${children.join("\n")}`);
    const ms = (n: number): string => `${n.toFixed(0)} ms`;
    const summary = `created in ${ms(created - started)}, Python, a file, a running program (pid ${pid}) forked four ways in ${ms(forked)}: ${ms(performance.now() - started)}`;
    return { summary, children };
  } finally {
    await Promise.all(sandboxes.map((s) => s.kill()));
  }
}
