/** A machine of the internet or a program in a guest: obeys JSON lines on stdin, answers and reports on stdout. */
import { createSocket } from "node:dgram";
import { Resolver } from "node:dns/promises";
import { createServer as createSecureServer, request } from "node:https";
import { connect, createServer, type Socket } from "node:net";
import { createInterface } from "node:readline";
import { messageOf } from "@aenv/base";
import { answer, parseQuestion, RCODE, TYPE_A } from "@aenv/egress/testing";

interface Command {
  id: number;
  op: string;
  host: string;
  port: number;
  text: string;
  records: Record<string, string[]>;
  login: string;
  cert: string;
  key: string;
  headers?: Record<string, string>;
  body?: string;
}

const tell = (o: object): boolean => process.stdout.write(`${JSON.stringify(o)}\n`);
const sockets = new Map<number, Socket>();
let records: Record<string, string[]> = {};

/** Resolves with what the other side says first, or `error <errno>`. */
const firstWords = (s: Socket): Promise<string> =>
  new Promise((resolve) => {
    s.once("data", (d) => resolve(d.toString("latin1")));
    s.once("end", () => resolve("error end"));
    s.once("error", (e: NodeJS.ErrnoException) => resolve(`error ${e.code ?? e.message}`));
  });

const acts: Record<string, (c: Command) => Promise<string> | string> = {
  /** Answers with the address of the asker and what it said first. */
  site: ({ host, port }) =>
    new Promise((resolve, reject) => {
      const server = createServer((s) => {
        s.on("error", () => {});
        s.once("data", (d) => {
          tell({ event: "said", host, port, from: s.remoteAddress, text: d.toString("latin1") });
          s.write(`site ${host}\n`);
          if (/^connection: close\r$/im.test(d.toString("latin1"))) s.end();
          s.on("data", (more) => s.write(`again ${more.toString("latin1")}`));
        });
      });
      server.once("error", reject);
      server.listen(port, host, () => resolve(""));
    }),
  dns: ({ host }) =>
    new Promise((resolve) => {
      const udp = createSocket("udp4");
      udp.on("message", (data, from) => {
        const q = parseQuestion(data);
        if (!q || "rcode" in q) return;
        tell({ event: "question", host, port: q.type, from: from.address, text: q.name });
        const found = records[q.name];
        const known = found && q.type === TYPE_A ? found : [];
        udp.send(answer(q, found ? RCODE.ok : RCODE.nxDomain, known, 5), from.port, from.address);
      });
      udp.bind(53, host, () => resolve(""));
    }),
  records: (c) => {
    records = c.records;
    return "";
  },
  /** An HTTPS site: answers with what it got, as JSON. */
  secure: ({ host, port, cert, key }) =>
    new Promise((resolve) => {
      const server = createSecureServer({ cert, key }, (req, res) => {
        void Array.fromAsync(req as AsyncIterable<Buffer>).then((parts) => {
          const body = Buffer.concat(parts).toString();
          res.setHeader("x-site", "yes");
          res.end(JSON.stringify({ method: req.method, url: req.url, headers: req.rawHeaders, body }));
        });
      });
      server.on("upgrade", (req, s) => {
        s.on("error", () => {});
        s.write(
          `HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: echo\r\n\r\n${String(req.headers["x-secret"])}`,
        );
        s.pipe(s);
      });
      server.listen(port, host, () => resolve(""));
    }),
  /** An HTTPS request to an address under a name; `cert` is the authority it trusts. The answer, or `error <code>`. */
  fetch: ({ host, port, text: name, cert, headers = {}, body = "" }) =>
    new Promise((resolve) => {
      const options = {
        host,
        port,
        servername: name,
        ca: cert,
        headers: { host: name, ...headers },
        method: body === "" ? "GET" : "POST",
      };
      const req = request({ ...options, path: "/x?y", agent: false }, (res) => {
        void Array.fromAsync(res as AsyncIterable<Buffer>).then((parts) =>
          resolve(`${res.statusCode} ${Buffer.concat(parts).toString()}`),
        );
      });
      req.on("upgrade", (res, s: Socket, head: Buffer) => {
        s.on("error", () => {});
        let got = head.toString();
        const look = (): void => {
          if (got.endsWith("ping")) resolve(`${res.statusCode} ${got}`);
        };
        s.on("data", (d: Buffer) => {
          got += d.toString();
          look();
        });
        s.write("ping");
        look();
      });
      req.on("error", (e: NodeJS.ErrnoException) => resolve(`error ${e.code}`));
      req.end(body);
    }),
  /** A SOCKS5 proxy; `login` is `user:password` or empty. */
  socks: ({ host, port, login }) =>
    new Promise((resolve) => {
      createServer((s) => {
        s.on("error", () => {});
        void proxy(s, host, port, login).catch(() => s.destroy());
      }).listen(port, host, () => resolve(""));
    }),
  /** Opens a connection and says something; the connection stays. */
  say: async ({ id, host, port, text }) => {
    const s = connect({ host, port });
    sockets.set(id, s);
    s.on("error", () => {});
    s.once("connect", () => s.write(Buffer.from(text, "latin1")));
    return await firstWords(s);
  },
  /** Says more on the connection of the command `port`. */
  more: async ({ port, text }) => {
    const s = sockets.get(port);
    if (!s || s.destroyed) return `error ${s?.errored ? ((s.errored as NodeJS.ErrnoException).code ?? "") : "closed"}`;
    const answered = firstWords(s);
    s.write(text);
    return await answered;
  },
  lookup: async ({ host, text }) => {
    const resolver = new Resolver({ timeout: 3000, tries: 2 });
    resolver.setServers([host]);
    const [type = "A", name = ""] = text.split(" ");
    try {
      return JSON.stringify(await resolver.resolve(name, type));
    } catch (e) {
      return `error ${(e as NodeJS.ErrnoException).code}`;
    }
  },
};

async function proxy(s: Socket, host: string, port: number, login: string): Promise<void> {
  const take = async (size: number): Promise<Buffer> => {
    for (;;) {
      const data = s.read(size) as Buffer | null;
      if (data) return data;
      if (s.destroyed || s.readableEnded) throw new Error("closed");
      await new Promise((r) => s.once("readable", r));
    }
  };
  const methods = await take((await take(2))[1] ?? 0);
  const method = login === "" ? 0 : 2;
  if (!methods.includes(method)) return void s.end(Buffer.from([5, 255]));
  s.write(Buffer.from([5, method]));
  if (method === 2) {
    const user = (await take((await take(2))[1] ?? 0)).toString();
    const password = (await take((await take(1))[0] ?? 0)).toString();
    const ok = `${user}:${password}` === login;
    s.write(Buffer.from([1, ok ? 0 : 1]));
    if (!ok) return void s.end();
  }
  const ask = await take(10);
  const to = { host: [...ask.subarray(4, 8)].join("."), port: ask.readUInt16BE(8) };
  tell({ event: "proxied", host, port, from: s.remoteAddress, text: `${to.host}:${to.port}` });
  const out = connect(to);
  out.on("error", () => s.destroy());
  out.once("connect", () => {
    s.write(Buffer.from([5, 0, 0, 1, 0, 0, 0, 0, 0, 0]));
    s.pipe(out).pipe(s);
  });
}

for await (const line of createInterface({ input: process.stdin })) {
  const command = JSON.parse(line) as Command;
  const act = acts[command.op];
  void Promise.resolve(act?.(command))
    .then((text) => tell({ id: command.id, text }))
    .catch((e: unknown) => tell({ id: command.id, error: messageOf(e) }));
}
process.exit(0);
