import { type Transport } from "./transport.ts";
import { Empty, type ProcessEvent, ProcessMessage, toEvent } from "./messages.ts";

/** A running process of a guest and its events. Leaving the loop early leaves the process running. */
export interface GuestProcess extends AsyncIterable<ProcessEvent> {
  readonly pid: number;
}

export async function* events(
  transport: Transport,
  method: "Start" | "Connect",
  message: unknown,
  headers: Record<string, string>,
  signal: AbortSignal,
): AsyncGenerator<ProcessEvent, void, void> {
  const stream = transport.stream(`process.Process/${method}`, message, ProcessMessage, headers, signal);
  for await (const m of stream) {
    const event = toEvent(m);
    if (event) yield event;
  }
}

/** Calls on a running process. `pid` is the one of its start event. */
export class ProcessCalls {
  readonly #t: Transport;

  constructor(transport: Transport) {
    this.#t = transport;
  }

  async sendInput(pid: number, input: { stdin: Buffer } | { pty: Buffer }, signal: AbortSignal): Promise<void> {
    const message =
      "stdin" in input ? { stdin: input.stdin.toString("base64") } : { pty: input.pty.toString("base64") };
    await this.#t.call("process.Process/SendInput", { process: { pid }, input: message }, Empty, signal);
  }

  async closeStdin(pid: number, signal: AbortSignal): Promise<void> {
    await this.#t.call("process.Process/CloseStdin", { process: { pid } }, Empty, signal);
  }

  async signal(pid: number, name: "SIGKILL" | "SIGTERM", signal: AbortSignal): Promise<void> {
    await this.#t.call("process.Process/SendSignal", { process: { pid }, signal: `SIGNAL_${name}` }, Empty, signal);
  }

  async resize(pid: number, size: { cols: number; rows: number }, signal: AbortSignal): Promise<void> {
    await this.#t.call("process.Process/Update", { process: { pid }, pty: { size } }, Empty, signal);
  }
}
