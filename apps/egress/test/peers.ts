import { type ChildProcess, type ChildProcessWithoutNullStreams, spawn } from "node:child_process";
import { once } from "node:events";
import { createInterface } from "node:readline";
import { world } from "@aenv/network/testing";

export interface Event {
  event: "said" | "question" | "proxied";
  host: string;
  port: number;
  from: string;
  text: string;
}

/** A program in a network namespace (see peer.ts). */
export class Peer {
  readonly events = new world.Journal<Event>();
  readonly #answers = new world.Journal<{ id: number; text?: string; error?: string }>();
  readonly #child: ChildProcessWithoutNullStreams;
  /** Number of the last command; `more` names a connection by it. */
  last = 0;

  constructor(netns: string) {
    const argv = [`--net=/run/netns/${netns}`, process.execPath, `${import.meta.dirname}/peer.ts`];
    this.#child = spawn("nsenter", argv, { env: { PATH: process.env["PATH"] } });
    this.#child.stderr.pipe(process.stderr);
    createInterface({ input: this.#child.stdout }).on("line", (line) => {
      const o = JSON.parse(line) as Event | { id: number };
      if ("event" in o) this.events.push(o);
      else this.#answers.push(o);
    });
  }

  async do(op: string, args: object = {}): Promise<string> {
    const id = ++this.last;
    this.#child.stdin.write(`${JSON.stringify({ id, op, ...args })}\n`);
    const a = await this.#answers.until(`${op} ${JSON.stringify(args)}`, (x) => x.id === id);
    if (a.error !== undefined) throw new Error(`${op}: ${a.error}`);
    return a.text ?? "";
  }

  say(host: string, port: number, text: string): Promise<string> {
    return this.do("say", { host, port, text });
  }

  async stop(): Promise<void> {
    await end(this.#child);
  }
}

export async function end(child: ChildProcess, signal: NodeJS.Signals = "SIGKILL"): Promise<void> {
  const gone = child.exitCode === null && child.signalCode === null ? once(child, "exit") : undefined;
  child.kill(signal);
  await gone;
}

/** The egress daemon as the server starts it. */
export async function startGateway(
  socket: string,
  state: string,
  uid: number,
  authorities: string,
): Promise<ChildProcess> {
  const main = `${import.meta.dirname}/../src/main.ts`;
  const args = [main, "--socket", socket, "--state", state, "--uid", String(uid), "--log", `${state}.log`];
  return spawn(process.execPath, args, {
    stdio: ["ignore", "inherit", "inherit"],
    env: { ...process.env, NODE_EXTRA_CA_CERTS: authorities },
  });
}

/** The first message of a TLS client that asks for this name (RFC 8446, RFC 6066). */
export function clientHello(name: string | undefined): string {
  const sized = (size: 1 | 2 | 3, ...parts: Buffer[]): Buffer => {
    const body = Buffer.concat(parts);
    const head = Buffer.alloc(size);
    head.writeUIntBE(body.length, 0, size);
    return Buffer.concat([head, body]);
  };
  const sni =
    name === undefined
      ? []
      : [Buffer.from([0, 0]), sized(2, sized(2, Buffer.from([0]), sized(2, Buffer.from(name, "latin1"))))];
  const hello = Buffer.concat([
    Buffer.from([3, 3]),
    Buffer.alloc(32, 7),
    sized(1, Buffer.alloc(32, 9)),
    sized(2, Buffer.from([0x13, 0x01])),
    sized(1, Buffer.from([0])),
    sized(2, Buffer.from([0, 43]), sized(2, Buffer.from([2, 3, 4])), ...sni),
  ]);
  return Buffer.concat([Buffer.from([22, 3, 1]), sized(2, Buffer.from([1]), sized(3, hello))]).toString("latin1");
}

export const httpRequest = (host: string, target = "/"): string => `GET ${target} HTTP/1.1\r\nHost: ${host}\r\n\r\n`;
