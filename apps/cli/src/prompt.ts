import { AenvError } from "@aenv/base";

/** Asks on the terminal; anything but y or yes is no. Without a terminal it refuses, naming the option that answers. */
export async function confirm(question: string, option: string): Promise<boolean> {
  if (!process.stdin.isTTY || !process.stderr.isTTY)
    throw new AenvError("INVALID_ARGUMENT", "There is no terminal to ask on", { hint: `Give ${option} to go ahead.` });
  const { createInterface } = await import("node:readline/promises");
  const lines = createInterface({ input: process.stdin, output: process.stderr });
  try {
    return /^y(es)?$/i.test((await lines.question(`${question} [y/N] `)).trim());
  } catch (e) {
    throw new AenvError("CANCELLED", "Interrupted", { cause: e, hint: "" });
  } finally {
    lines.close();
  }
}

/** Reads one line without showing it. */
export async function askSecret(question: string): Promise<string> {
  const stdin = process.stdin;
  process.stderr.write(question);
  stdin.setRawMode(true);
  try {
    let text = "";
    for await (const chunk of stdin as AsyncIterable<Buffer>)
      for (const c of chunk.toString()) {
        if (c === "\r" || c === "\n" || c === "\u0004") return text.trim();
        if (c === "\u0003") throw new AenvError("CANCELLED", "Interrupted", { hint: "" });
        text = c === "\u007f" ? text.slice(0, -1) : text + c;
      }
    return text.trim();
  } finally {
    stdin.setRawMode(false);
    process.stderr.write("\n");
  }
}

/** A secret or short text: everything until the end, at most 64 KiB. */
export async function readAll(stream: NodeJS.ReadableStream): Promise<string> {
  let text = "";
  for await (const chunk of stream) {
    text += chunk.toString();
    if (text.length > 65_536) throw new AenvError("TOO_LARGE", "That is more than a key");
  }
  return text;
}
