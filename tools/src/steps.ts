/** Numbered steps with their times on the terminal; a failed step says what to do and ends the command. */
import { AenvError, messageOf } from "@aenv/base";

export interface Step {
  name: string;
  /** Returns what to print beside the time, such as a version or "already there". */
  run(say: (note: string) => void): Promise<string | undefined>;
  /** What to do when the step fails and its error has no hint of its own. */
  hint: string;
}

const seconds = (ms: number): string => `${(ms / 1000).toFixed(1)} s`;

/** Runs the steps in order. Returns false after the first that failed; its cause is already printed. */
export async function runSteps(steps: readonly Step[]): Promise<boolean> {
  const started = performance.now();
  const live = process.stdout.isTTY;
  for (const [i, step] of steps.entries()) {
    const head = `[${String(i + 1).padStart(2)}/${steps.length}] ${step.name.padEnd(34)}`;
    const from = performance.now();
    let shown = "";
    const show = (note: string): void => {
      if (live) process.stdout.write(`\r\x1b[K${head} ${note.slice(0, 60)}`);
      else if (note !== shown) process.stdout.write(`${head} ${note}\n`);
      shown = note;
    };
    if (live) show("…");
    const tick = setInterval(
      () => live && process.stdout.write(`\r\x1b[${head.length + 1}C${seconds(performance.now() - from)} `),
      1000,
    );
    try {
      const note = await step.run(show);
      process.stdout.write(
        `${live ? "\r\x1b[K" : ""}${head} ${seconds(performance.now() - from).padStart(7)}  ${note ?? ""}\n`,
      );
    } catch (e) {
      process.stdout.write(`${live ? "\r\x1b[K" : ""}${head} FAILED after ${seconds(performance.now() - from)}\n`);
      console.error(
        `\n${messageOf(e)}\n\nWhat to do: ${e instanceof AenvError && e.code !== "INTERNAL" ? e.hint : step.hint}`,
      );
      return false;
    } finally {
      clearInterval(tick);
    }
  }
  console.log(`done in ${seconds(performance.now() - started)}`);
  return true;
}
