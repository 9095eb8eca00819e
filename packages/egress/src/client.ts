import { connect, type Socket } from "node:net";
import { createInterface } from "node:readline";
import { AenvError, type Logger, messageOf, sleep } from "@aenv/base";
import type { EgressPolicy, Gateway } from "@aenv/network";
import type { Order, Place, Response } from "./control.ts";

const ANSWER_MS = 10_000;
const RETRY_MS = 100;

interface Waiting {
  resolve: (r: Response) => void;
  reject: (e: unknown) => void;
  timer: NodeJS.Timeout;
}

/**
 * The server's hand on the egress gateway. A gateway that was started again knows nothing and lets nothing through: it is
 * told everything anew as soon as it answers.
 */
export class GatewayClient implements Gateway {
  readonly #path: string;
  readonly #logger: Logger;
  readonly #policies = new Map<string, EgressPolicy>();
  readonly #waiting = new Map<number, Waiting>();
  #options: { denied: readonly string[]; dns: readonly string[] } | undefined;
  #socket: Socket | undefined;
  #place: Place | undefined;
  #last = 0;
  readonly #closed = new AbortController();

  private constructor(path: string, logger: Logger) {
    this.#path = path;
    this.#logger = logger;
  }

  /** UNAVAILABLE when it does not answer. */
  static async open(path: string, logger: Logger): Promise<GatewayClient> {
    const client = new GatewayClient(path, logger);
    await client.#connect();
    return client;
  }

  get place(): Place {
    if (!this.#place) throw new AenvError("UNAVAILABLE", "the egress gateway does not answer");
    return this.#place;
  }

  async configure(options: { denied: readonly string[]; dns: readonly string[] }): Promise<void> {
    this.#options = options;
    await this.#tell({ op: "configure", denied: [...options.denied], dns: [...options.dns] });
  }

  async setPolicy(hostIp: string, policy: EgressPolicy | undefined): Promise<void> {
    const before = this.#policies.get(hostIp);
    this.#keep(hostIp, policy);
    try {
      await this.#tell({ op: "policy", guest: hostIp, policy: policy ?? null });
    } catch (e) {
      // One that is gone has let go of everything.
      if (policy) this.#keep(hostIp, before);
      throw e;
    }
  }

  async retain(hostIps: readonly string[]): Promise<void> {
    const kept = new Set(hostIps);
    for (const ip of this.#policies.keys()) if (!kept.has(ip)) this.#policies.delete(ip);
    await this.#tell({ op: "retain", guests: [...hostIps] });
  }

  close(): void {
    this.#closed.abort();
    this.#socket?.destroy();
  }

  #keep(hostIp: string, policy: EgressPolicy | undefined): void {
    if (policy) this.#policies.set(hostIp, policy);
    else this.#policies.delete(hostIp);
  }

  async #connect(): Promise<void> {
    const socket = connect(this.#path);
    socket.on("error", () => {});
    await new Promise<void>((resolve, reject) => {
      socket.once("connect", resolve);
      socket.once("error", (e) =>
        reject(new AenvError("UNAVAILABLE", `the egress gateway does not answer: ${messageOf(e)}`, { cause: e })),
      );
    });
    socket.unref();
    this.#socket = socket;
    const lines = createInterface({ input: socket }).on("line", (line) => this.#hear(line));
    // It repeats the socket's.
    lines.on("error", () => {});
    socket.once("close", () => this.#lost(socket));
    const { tcpPort, dnsPort, uid } = await this.#tell({ op: "hello" });
    if (tcpPort === undefined || dnsPort === undefined || uid === undefined)
      throw new AenvError("INTERNAL", "the egress gateway says nothing of its place");
    this.#place = { tcpPort, dnsPort, uid };
  }

  #hear(line: string): void {
    const response = JSON.parse(line) as Response;
    const waiting = this.#waiting.get(response.id);
    if (!waiting) return;
    this.#waiting.delete(response.id);
    clearTimeout(waiting.timer);
    if (response.error === undefined) waiting.resolve(response);
    else waiting.reject(new AenvError("INTERNAL", `the egress gateway: ${response.error}`));
  }

  #lost(socket: Socket): void {
    if (this.#socket !== socket) return;
    this.#socket = undefined;
    for (const w of this.#waiting.values()) {
      clearTimeout(w.timer);
      w.reject(new AenvError("UNAVAILABLE", "the egress gateway went away"));
    }
    this.#waiting.clear();
    if (!this.#closed.signal.aborted) void this.#again();
  }

  /** Until the gateway is back and knows everything. */
  async #again(): Promise<void> {
    const { signal } = this.#closed;
    while (!signal.aborted) {
      try {
        await this.#connect();
        if (this.#options) await this.configure(this.#options);
        for (const [ip, policy] of this.#policies) await this.#tell({ op: "policy", guest: ip, policy });
        this.#logger.info({ guests: this.#policies.size }, "the egress gateway knows the rules again");
        return;
      } catch (e) {
        // What was lost on the way calls this function again itself.
        if (e instanceof AenvError && this.#socket) return;
        await sleep(RETRY_MS, signal).catch(() => {});
      }
    }
  }

  #tell(order: Order): Promise<Response> {
    const socket = this.#socket;
    if (!socket) return Promise.reject(new AenvError("UNAVAILABLE", "the egress gateway does not answer"));
    const id = ++this.#last;
    return new Promise((resolve, reject) => {
      const timer = setTimeout(() => {
        this.#waiting.delete(id);
        reject(new AenvError("DEADLINE", "the egress gateway did not answer in time"));
      }, ANSWER_MS);
      this.#waiting.set(id, { resolve, reject, timer });
      socket.write(`${JSON.stringify({ ...order, id })}\n`);
    });
  }
}
