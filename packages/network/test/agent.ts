/** A host or guest program in some netns: obeys JSON lines on stdin, answers and reports on stdout. Ends with its stdin. */
import { createSocket } from "node:dgram";
import { connect, createServer, type Socket } from "node:net";
import { createInterface } from "node:readline";

interface Command {
  id: number;
  op: "listen" | "connect" | "echo" | "ask" | "push";
  host: string;
  port: number;
}

const say = (o: object): boolean => process.stdout.write(`${JSON.stringify(o)}\n`);

/** The latest connection to each host and port. */
const open = new Map<string, Socket>();

/** Why a connection ended; a reset may come before anybody asks. */
const ends = new WeakMap<Socket, string>();

/** How to reach the latest peer of each UDP listener. */
const push = new Map<string, (done: () => void) => void>();

function obey({ id, op, host, port }: Command): void {
  const fail = (e: Error): boolean => say({ id, error: (e as NodeJS.ErrnoException).code ?? e.message });
  if (op === "listen") {
    const tcp = createServer((s) => {
      say({ event: "tcp", host, port, from: s.remoteAddress });
      s.on("error", () => {});
      s.write(`hello ${s.remoteAddress}\n`);
      s.pipe(s);
    });
    const udp = createSocket("udp4");
    udp.on("message", (data, from) => {
      say({ event: "udp", host, port, from: from.address, text: data.toString() });
      push.set(`${host}:${port}`, (done) => udp.send("more", from.port, from.address, done));
      udp.send(`hello ${from.address}\n`, from.port, from.address);
    });
    tcp.on("error", fail);
    udp.on("error", fail);
    tcp.listen(port, host, () => udp.bind(port, host, () => say({ id })));
  } else if (op === "connect") {
    const s = connect({ host, port });
    open.set(`${host}:${port}`, s);
    s.once("data", (d) => say({ id, text: d.toString().trim() }));
    s.on("error", (e: NodeJS.ErrnoException) => {
      ends.set(s, e.code ?? e.message);
      fail(e);
    });
  } else if (op === "echo") {
    const s = open.get(`${host}:${port}`);
    if (!s || s.destroyed) return void say({ id, error: (s && ends.get(s)) ?? "closed" });
    const onData = (d: Buffer): void => {
      s.off("error", onError);
      say({ id, text: d.toString().trim() });
    };
    const onError = (e: Error): void => {
      s.off("data", onData);
      fail(e);
    };
    s.once("data", onData);
    s.once("error", onError);
    s.write("still here?\n");
  } else if (op === "push") {
    push.get(`${host}:${port}`)?.(() => say({ id }));
  } else {
    const udp = createSocket("udp4");
    udp.once("message", (d) => {
      say({ id, text: d.toString().trim() });
      udp.close();
    });
    udp.on("error", fail);
    udp.send("question", port, host);
  }
}

for await (const line of createInterface({ input: process.stdin })) obey(JSON.parse(line) as Command);
process.exit(0);
