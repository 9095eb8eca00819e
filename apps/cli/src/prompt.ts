import { AenvError } from "@aenv/base";
import { interruption, usageError } from "./exit.ts";
import { onSignals, rawMode } from "./tty.ts";

/** Asks on the terminal; anything but y or yes is no. Without a terminal it refuses, naming the option that answers. */
export async function confirm(question: string, option: string): Promise<boolean> {
  if (!process.stdin.isTTY || !process.stderr.isTTY)
    throw usageError("There is no terminal to ask on", `Give ${option} to go ahead.`);
  return /^y(es)?$/i.test(await ask(`${question} [y/N] `, (key) => key));
}

/** Reads one line without showing it. */
export async function askSecret(question: string): Promise<string> {
  return await ask(question, () => "");
}

/**
 * Reads one line; `echo` gives what is shown of a key. The terminal is raw and signals are caught before the question
 * appears: whoever answers at once, with Ctrl-C too, is understood.
 */
async function ask(question: string, echo: (key: string) => string): Promise<string> {
  const stdin = process.stdin;
  const line = Promise.withResolvers<string>();
  using _signals = onSignals((name) => line.reject(interruption(name)));
  using _raw = rawMode(stdin);
  let text = "";
  const onData = (chunk: Buffer): void => {
    for (const c of chunk.toString()) {
      if (c === "\r" || c === "\n" || c === CTRL_D) return line.resolve(text);
      if (c === CTRL_C) return line.reject(interruption("SIGINT"));
      if (c === BACKSPACE || c === CTRL_H) {
        const shown = echo(text.slice(-1));
        text = text.slice(0, -1);
        if (shown !== "") process.stderr.write("\b \b");
      } else if (c >= " ") {
        text += c;
        process.stderr.write(echo(c));
      }
    }
  };
  stdin.on("data", onData).once("end", () => line.resolve(text));
  process.stderr.write(question);
  try {
    return (await line.promise).trim();
  } finally {
    stdin.off("data", onData).pause();
    process.stderr.write("\n");
  }
}

const CTRL_C = "\u0003";
const CTRL_D = "\u0004";
const CTRL_H = "\b";
const BACKSPACE = "\u007f";

/** A secret or short text: everything until the end, at most 64 KiB. */
export async function readAll(stream: NodeJS.ReadableStream): Promise<string> {
  let text = "";
  for await (const chunk of stream) {
    text += chunk.toString();
    if (text.length > 65_536) throw new AenvError("TOO_LARGE", "That is more than a key");
  }
  return text;
}
