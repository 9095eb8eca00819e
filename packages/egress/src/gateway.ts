import { connect, isIPv4, type Socket } from "node:net";
import { AenvError, type Logger, messageOf } from "@aenv/base";
import { addressSet, type EgressPolicy, namesAreOurs } from "@aenv/network";
import { answer, parseQuestion, RCODE, refusal, TYPE_A } from "./dns.ts";
import { Judge, type Subject } from "./judge.ts";
import { Names, Pins } from "./names.ts";
import { MAX_SNIFF, sniff } from "./sniff.ts";
import { socksConnect } from "./socks.ts";
import type { Transformer } from "./transform.ts";

/** How long a guest may take for its first word, and a server or proxy to answer. */
const WORD_MS = 15_000;
const DIAL_MS = 30_000;
/** A peer that is gone without a word is noticed after about ten of these. */
const KEEP_ALIVE_MS = 60_000;
/** Questions of one guest that are being answered at once. */
const MAX_QUESTIONS = 100;
/** Connections of one guest: each takes two descriptors, and guests share them. */
const MAX_CONNECTIONS = 512;
/** Refusals of one guest that are logged in a while; it can make as many as it likes. */
const LOGGED = { most: 20, everyMs: 60_000 } as const;

interface Guest {
  readonly address: string;
  judge: Judge;
  readonly pins: Pins;
  readonly connections: Set<Connection>;
  questions: number;
  /** Refusals since `loggedSince`. */
  refusals: number;
  loggedSince: number;
}

interface Connection {
  readonly socket: Socket;
  upstream?: Socket;
  /** From when it is judged. */
  subject?: Subject;
  /** The address is one of its name's. */
  own?: boolean;
  /** Both ends take care of each other. */
  joined?: true;
}

export interface GatewayOptions {
  names: Names;
  /** Without one there are no transforms. */
  transformer?: Transformer;
  logger: Logger;
  /** Milliseconds. */
  now: () => number;
}

/**
 * Judges connections of guests that their slots send here: who it is follows from the peer's address, where it goes from
 * the local one. Guests are hostile; everything here is bounded per guest by the connections its slot lets it have.
 */
export class EgressGateway {
  readonly #o: GatewayOptions;
  readonly #guests = new Map<string, Guest>();
  #denied: (ip: string) => boolean = () => true;

  constructor(options: GatewayOptions) {
    this.#o = options;
  }

  configure({ denied, dns }: { denied: readonly string[]; dns: readonly string[] }): void {
    this.#denied = addressSet(denied);
    this.#o.names.configure(dns, this.#denied);
  }

  /** Connections that it denies, or that would go another way under it, are reset. */
  setPolicy(address: string, policy: EgressPolicy | undefined): void {
    const guest = this.#guests.get(address);
    if (!policy) {
      this.#guests.delete(address);
      for (const c of guest?.connections ?? []) cut(c);
      return;
    }
    const judge = new Judge(policy);
    if (!guest) {
      const pins = new Pins(this.#o.now);
      this.#guests.set(address, {
        address,
        judge,
        pins,
        connections: new Set(),
        questions: 0,
        refusals: 0,
        loggedSince: 0,
      });
      return;
    }
    const before = guest.judge;
    guest.judge = judge;
    for (const c of guest.connections) {
      if (c.subject && way(before, c) !== way(judge, c)) cut(c);
    }
  }

  retain(addresses: readonly string[]): void {
    const kept = new Set(addresses);
    for (const address of this.#guests.keys()) if (!kept.has(address)) this.setPolicy(address, undefined);
  }

  stats(): { guests: number; connections: number } {
    let connections = 0;
    for (const g of this.#guests.values()) connections += g.connections.size;
    return { guests: this.#guests.size, connections };
  }

  /** The answer to a guest's DNS message; undefined: none. */
  async ask(from: string, message: Buffer): Promise<Buffer | undefined> {
    const q = parseQuestion(message);
    if (!q) return undefined;
    if ("rcode" in q) return refusal(q.id, q.rcode);
    const guest = this.#guests.get(from);
    if (!guest || !namesAreOurs(guest.judge.policy)) return answer(q, RCODE.refused);
    // "No such name" lets programs fail at once; after a refusal they ask the next resolver, or wait.
    if (!guest.judge.mayAsk(q.name)) return answer(q, RCODE.nxDomain);
    // Other kinds than addresses could carry anything, and guests have no IPv6.
    if (q.type !== TYPE_A) return answer(q, RCODE.ok);
    if (guest.questions >= MAX_QUESTIONS) return answer(q, RCODE.servFail);
    guest.questions++;
    try {
      const found = await this.#o.names.resolve(q.name);
      if ("failure" in found)
        return answer(q, { none: RCODE.ok, unknown: RCODE.nxDomain, unavailable: RCODE.servFail }[found.failure]);
      guest.pins.add(q.name, found);
      return answer(q, RCODE.ok, found.addresses, found.ttl);
    } finally {
      guest.questions--;
    }
  }

  /** Takes over a connection that a guest thinks goes to `localAddress`; not read from yet. */
  async serve(socket: Socket): Promise<void> {
    socket.on("error", () => {});
    const { remoteAddress = "", localAddress: address = "", localPort: port = 0 } = socket;
    const guest = this.#guests.get(remoteAddress);
    if (!guest || this.#denied(address) || guest.connections.size >= MAX_CONNECTIONS)
      return void socket.resetAndDestroy();
    const c: Connection = { socket };
    guest.connections.add(c);
    socket.once("close", () => {
      guest.connections.delete(c);
      if (!c.joined) c.upstream?.destroy();
    });
    try {
      await this.#connect(guest, c, { address, port });
    } catch (e) {
      this.#o.logger.debug({ guest: remoteAddress, address, port, error: messageOf(e) }, "connection ended");
      cut(c);
    }
  }

  async #connect(guest: Guest, c: Connection, to: { address: string; port: number }): Promise<void> {
    const { socket } = c;
    let first: Buffer = Buffer.alloc(0);
    const subject: Subject = { ...to, kind: "other" };
    if (guest.judge.needsWord(to)) {
      const word = await firstWord(socket);
      first = word.data;
      if (word.said.kind !== "more") Object.assign(subject, word.said);
    }
    c.own = subject.name !== undefined && (await this.#gives(guest, subject.name, to.address));
    // From here on a change of the policy judges it.
    c.subject = subject;
    const { judge } = guest;
    const verdict = judge.verdict(subject, c.own);
    if (verdict === "refuse") {
      this.#noteRefusal(guest, subject);
      return cut(c);
    }
    if (verdict !== "relay") {
      const { authority } = judge.policy;
      const { transformer } = this.#o;
      if (!authority || !transformer || subject.name === undefined)
        throw new AenvError("INTERNAL", "a transform without an authority");
      socket.unshift(first);
      const dial = (): Promise<Socket> => this.#dial(judge.policy, to, c);
      return transformer.serve({ socket, name: subject.name, authority, transform: verdict.transform, dial });
    }
    const upstream = await this.#dial(judge.policy, to, c);
    if (first.length > 0) upstream.write(first);
    c.joined = true;
    join(socket, upstream);
  }

  #noteRefusal(guest: Guest, subject: Subject): void {
    const now = this.#o.now();
    if (now - guest.loggedSince > LOGGED.everyMs) {
      guest.loggedSince = now;
      guest.refusals = 0;
    }
    if (guest.refusals++ < LOGGED.most) this.#o.logger.info({ guest: guest.address, ...subject }, "refused");
  }

  /** Whether the address is the name's, as far as we told this guest or would tell it now. */
  async #gives(guest: Guest, name: string, address: string): Promise<boolean> {
    if (!guest.judge.mayAsk(name)) return false;
    if (guest.pins.has(name, address)) return true;
    const now = await this.#o.names.resolve(name);
    return "addresses" in now && now.addresses.includes(address);
  }

  async #dial(policy: EgressPolicy, to: { address: string; port: number }, c: Connection): Promise<Socket> {
    const { proxy } = policy;
    const hop = proxy ? { address: await this.#addressOf(proxy.host), port: proxy.port } : to;
    const upstream = connect({ host: hop.address, port: hop.port, allowHalfOpen: true, noDelay: true });
    c.upstream = upstream;
    // The guest gave up meanwhile.
    if (c.socket.destroyed) upstream.destroy();
    const timer = setTimeout(() => upstream.destroy(new Error("no answer in time")), DIAL_MS);
    try {
      await new Promise<void>((resolve, reject) => {
        upstream.once("connect", resolve).once("error", reject);
        upstream.once("close", () => reject(new Error("closed")));
      });
      if (proxy) await socksConnect(upstream, proxy, to);
    } finally {
      clearTimeout(timer);
    }
    return upstream;
  }

  async #addressOf(host: string): Promise<string> {
    const found = isIPv4(host) ? { addresses: [host] } : await this.#o.names.resolve(host);
    const address = "addresses" in found ? found.addresses[0] : undefined;
    if (address === undefined || this.#denied(address))
      throw new AenvError("UNAVAILABLE", `the proxy ${host} has no address that a sandbox may reach`);
    return address;
  }
}

/** How this judge lets the connection go; another way means another connection. */
function way(judge: Judge, c: Connection): string {
  const verdict = c.subject ? judge.verdict(c.subject, c.own === true) : "refuse";
  return verdict === "refuse" ? verdict : JSON.stringify([verdict, judge.policy.proxy]);
}

function cut(c: Connection): void {
  if (!c.socket.destroyed) c.socket.resetAndDestroy();
  if (c.upstream && !c.upstream.destroyed) c.upstream.resetAndDestroy();
}

async function firstWord(socket: Socket): Promise<{ data: Buffer; said: ReturnType<typeof sniff> }> {
  const parts: Buffer[] = [];
  let size = 0;
  const timer = setTimeout(() => socket.destroy(new Error("no first word in time")), WORD_MS);
  try {
    for (;;) {
      const part = socket.read() as Buffer | null;
      if (part) {
        parts.push(part);
        size += part.length;
        const data = Buffer.concat(parts);
        const said = sniff(data);
        if (said.kind !== "more" || size >= MAX_SNIFF) return { data, said };
        continue;
      }
      if (socket.destroyed || socket.readableEnded) throw new Error("closed before its first word");
      await new Promise<void>((resolve) => {
        const done = (): void => {
          for (const e of ["readable", "end", "close"]) socket.off(e, done);
          resolve();
        };
        for (const e of ["readable", "end", "close"]) socket.on(e, done);
      });
    }
  } finally {
    clearTimeout(timer);
  }
}

/** Both ways until both have ended; an end that is no clean one goes on as such. */
function join(a: Socket, b: Socket): void {
  for (const [from, to] of [
    [a, b],
    [b, a],
  ] as const) {
    from.setKeepAlive(true, KEEP_ALIVE_MS);
    from.on("error", () => {
      if (!to.destroyed) to.resetAndDestroy();
    });
    from.once("close", () => {
      if (!from.readableEnded && !to.destroyed) to.resetAndDestroy();
    });
    from.pipe(to);
  }
}
