import { type ChildProcessWithoutNullStreams, spawn } from "node:child_process";
import { once } from "node:events";
import { readFile } from "node:fs/promises";
import { createInterface } from "node:readline";
import { run } from "@aenv/host";
import { GATEWAY_IP, GUEST_IP, GUEST_MAC } from "../src/rules.ts";
import type { Slot } from "../src/types.ts";
import { decode, type Seen } from "./frames.ts";

/** A question that nobody answers fails the test by this; no assertion depends on its length. */
const PATIENCE_MS = 20_000;

export interface Heard {
  event: "tcp" | "udp";
  host: string;
  port: number;
  from: string;
  text?: string;
}

interface Answer {
  id: number;
  text?: string;
  error?: string;
}

const nsPath = (netns: string): string => `--net=/run/netns/${netns}`;

export const ip = (...args: string[]): Promise<unknown> => run("ip", args);
export const inNetns = async (netns: string, ...argv: string[]): Promise<string> =>
  (await run("nsenter", [nsPath(netns), ...argv])).stdout;

/** Connections that the netns tracks; `undefined` is the test's host. */
export async function tracked(netns?: string): Promise<number> {
  const path = "/proc/sys/net/netfilter/nf_conntrack_count";
  return Number(netns === undefined ? await readFile(path, "utf8") : await inNetns(netns, "cat", path));
}

/** Collects items and lets tests wait for one. */
export class Journal<T> {
  readonly all: T[] = [];
  readonly #waiting = new Set<() => void>();

  push(item: T): void {
    this.all.push(item);
    for (const w of this.#waiting) w();
  }

  until(what: string, fits: (item: T) => boolean): Promise<T> {
    return new Promise((resolve, reject) => {
      const look = (): void => {
        const found = this.all.find(fits);
        if (found === undefined) return;
        clearTimeout(timer);
        this.#waiting.delete(look);
        resolve(found);
      };
      const timer = setTimeout(() => reject(new Error(`never happened: ${what}`)), PATIENCE_MS);
      this.#waiting.add(look);
      look();
    });
  }
}

async function stop(child: ChildProcessWithoutNullStreams): Promise<void> {
  const gone = child.exitCode === null && child.signalCode === null ? once(child, "exit") : undefined;
  child.kill("SIGKILL");
  await gone;
}

/** A process in a netns that listens and asks. */
export class Agent {
  readonly heard = new Journal<Heard>();
  readonly #answers = new Journal<Answer>();
  readonly #child: ChildProcessWithoutNullStreams;
  #last = 0;

  constructor(netns?: string) {
    const argv = [process.execPath, `${import.meta.dirname}/agent.ts`];
    const [cmd = "", ...args] = netns === undefined ? argv : ["nsenter", nsPath(netns), ...argv];
    const env: NodeJS.ProcessEnv = { PATH: process.env["PATH"] };
    this.#child = spawn(cmd, args, { env });
    this.#child.stderr.pipe(process.stderr);
    createInterface({ input: this.#child.stdout }).on("line", (line) => {
      const o = JSON.parse(line) as Heard | Answer;
      if ("event" in o) this.heard.push(o);
      else this.#answers.push(o);
    });
  }

  async #tell(op: string, host: string, port: number): Promise<Answer> {
    const id = ++this.#last;
    this.#child.stdin.write(`${JSON.stringify({ id, op, host, port })}\n`);
    return await this.#answers.until(`${op} ${host}:${port}`, (a) => a.id === id);
  }

  /** Listens for TCP and UDP; greets each peer with `hello <its address>`. */
  async listen(host: string, port: number): Promise<void> {
    const { error } = await this.#tell("listen", host, port);
    if (error) throw new Error(`listen ${host}:${port}: ${error}`);
  }

  /** The greeting of the other side, or `error <errno>`. */
  async connect(host: string, port: number): Promise<string> {
    const a = await this.#tell("connect", host, port);
    return a.text ?? `error ${a.error}`;
  }

  /** What comes back over the connection that connect() opened last to there. */
  async echo(host: string, port: number): Promise<string> {
    const a = await this.#tell("echo", host, port);
    return a.text ?? `error ${a.error}`;
  }

  /** As connect() over UDP. */
  async ask(host: string, port: number): Promise<string> {
    const a = await this.#tell("ask", host, port);
    return a.text ?? `error ${a.error}`;
  }

  /** Sends a datagram to whom the listener there heard from last. */
  async push(host: string, port: number): Promise<void> {
    await this.#tell("push", host, port);
  }

  stop(): Promise<void> {
    return stop(this.#child);
  }
}

/** A guest on a slot's tap: a kernel of its own (a netns) and a hand on the wire. */
export class FakeGuest {
  readonly seen = new Journal<Seen>();
  readonly agent: Agent;
  readonly netns: string;
  readonly #pump: ChildProcessWithoutNullStreams;

  private constructor(netns: string, pump: ChildProcessWithoutNullStreams) {
    this.netns = netns;
    this.#pump = pump;
    this.agent = new Agent(netns);
  }

  static async plug(slot: Slot, netns: string): Promise<FakeGuest> {
    await ip("netns", "add", netns);
    const pump = spawn("perl", [`${import.meta.dirname}/pump.pl`, slot.netns, String(slot.uid), netns]);
    pump.stderr.pipe(process.stderr);
    const lines = createInterface({ input: pump.stdout });
    await once(lines, "line");
    const setup = [
      `link set eth0 address ${GUEST_MAC}`,
      `addr add ${GUEST_IP}/30 dev eth0`,
      "link set lo up",
      "link set eth0 up",
      `route add default via ${GATEWAY_IP}`,
    ];
    await run("ip", ["-n", netns, "-batch", "-"], { input: setup.join("\n") });
    const guest = new FakeGuest(netns, pump);
    lines.on("line", (hex) => guest.seen.push(decode(Buffer.from(hex, "hex"))));
    return guest;
  }

  /** Sends frames past the guest's kernel. */
  send(...frames: Buffer[]): void {
    this.#pump.stdin.write(frames.map((f) => `${f.toString("hex")}\n`).join(""));
  }

  /** The virtual machine is gone, with everything it had open. */
  async unplug(): Promise<void> {
    await Promise.all([stop(this.#pump), this.agent.stop()]);
    await ip("netns", "del", this.netns);
  }
}

/** Addresses that all live in the netns beyond the uplink. */
export const SITE = "93.184.216.34";
export const OTHER_SITE = "9.9.9.9";
export const RESOLVER = "10.255.255.53";
export const PRIVATE = ["10.1.2.3", "172.16.5.5", "192.168.77.1", "100.64.9.9", "169.254.169.254", "198.18.0.9"];
export const HOST_UPLINK = "192.168.7.2";
export const LAN = "172.18.0.2";
export const HOST_LAN = "172.18.0.1";

/** The test's host: an uplink to `outside` (internet and private hosts) and a second device to `lan`. */
export async function makeWorld(): Promise<{ outside: Agent; lan: Agent }> {
  const lines = [
    "netns add outside",
    "link add eth0 type veth peer name eth0 netns outside",
    `addr add ${HOST_UPLINK}/24 dev eth0`,
    "link set eth0 up",
    "route add default via 192.168.7.1",
    "netns add lan",
    "link add lan0 type veth peer name eth0 netns lan",
    `addr add ${HOST_LAN}/24 dev lan0`,
    "link set lan0 up",
  ];
  await run("ip", ["-batch", "-"], { input: lines.join("\n") });
  const outside = ["192.168.7.1/24 dev eth0", ...[SITE, OTHER_SITE, RESOLVER, ...PRIVATE].map((a) => `${a}/32 dev lo`)];
  await run("ip", ["-n", "outside", "-batch", "-"], {
    input: [...outside.map((a) => `addr add ${a}`), "link set lo up", "link set eth0 up"].join("\n"),
  });
  await run("ip", ["-n", "lan", "-batch", "-"], {
    input: [
      `addr add ${LAN}/24 dev eth0`,
      "link set lo up",
      "link set eth0 up",
      `route add default via ${HOST_LAN}`,
    ].join("\n"),
  });
  return { outside: new Agent("outside"), lan: new Agent("lan") };
}
