import type { ReadStream } from "node:tty";

/** What ends a program that does not catch it, and what people and supervisors send. */
const ENDING = ["SIGINT", "SIGTERM", "SIGHUP", "SIGQUIT"] as const;

/** Takes over the signals that would end the process, until the disposal. */
export function onSignals(fn: (name: NodeJS.Signals) => void, names: readonly NodeJS.Signals[] = ENDING): Disposable {
  for (const name of names) process.on(name, fn);
  return {
    [Symbol.dispose]: () => {
      for (const name of names) process.off(name, fn);
    },
  };
}

/**
 * Keys are read one by one and unechoed, and Ctrl-C is a key. Undone on dispose, and at exit whatever happens before;
 * a signal that is not caught would leave the terminal so: take onSignals first.
 */
export function rawMode(stdin: ReadStream): Disposable {
  if (!stdin.isTTY) return { [Symbol.dispose]: () => {} };
  const restore = (): void => {
    process.off("exit", restore);
    if (stdin.isRaw) stdin.setRawMode(false);
  };
  process.on("exit", restore);
  stdin.setRawMode(true);
  return { [Symbol.dispose]: restore };
}
