import assert from "node:assert/strict";
import { createHash, randomBytes } from "node:crypto";
import { request } from "node:http";
import { test, type TestContext } from "node:test";
import type { EdgeLimits } from "./limits.ts";
import type { Asleep, EdgeError, Target } from "./target.ts";
import { bodyOf, event, fixture, type Fixture, httpGuest, ID, RawClient, rawGuest } from "./testing.ts";
import { isSigned } from "./signature.ts";

const LIMIT = { timeout: 20_000 };
const ENVD = { "E2b-Sandbox-Port": "49983" };

interface Sleeper {
  f: Fixture;
  /** How many requests asked for it to wake. */
  asked(): number;
  /** Resolves when so many wait. */
  waiting(n: number): Promise<void>;
  /** All who wait go on. */
  wakeUp(result?: Target | EdgeError): void;
}

/** A sandbox that is asleep until the test wakes it. */
async function sleeper(
  t: TestContext,
  guestPort: number,
  tokens: Pick<Asleep, "accessToken" | "requiredTrafficToken"> = {},
  limits: Partial<EdgeLimits> = {},
): Promise<Sleeper> {
  const f = await fixture(t, { limits });
  const target: Target = { run: "r1", host: "127.0.0.1", port: guestPort };
  const { promise, fire } = event<Target | EdgeError>();
  let asked = 0;
  let reached: { n: number; resolve: () => void } | undefined;
  f.setTarget(() => ({
    ...tokens,
    wake: (signal) => {
      if (++asked === reached?.n) reached.resolve();
      return Promise.race([
        promise,
        new Promise<never>((_, reject) => {
          signal.addEventListener("abort", () => reject(signal.reason as Error));
        }),
      ]);
    },
  }));
  return {
    f,
    asked: () => asked,
    waiting: (n) => new Promise((resolve) => (asked >= n ? resolve() : (reached = { n, resolve }))),
    wakeUp: (result = target) => fire(result),
  };
}

const ask = (f: Fixture, headers: Record<string, string> = {}, path = "/", init: RequestInit = {}): Promise<Response> =>
  fetch(f.origin + path, { ...init, headers: { "E2b-Sandbox-Id": ID, "E2b-Sandbox-Port": "3000", ...headers } });

test("requests for a sandbox that is asleep wait for it and are answered by it", LIMIT, async (t) => {
  const guest = await httpGuest(t, (req, res) => void res.end(`woken for ${req.url}`));
  const s = await sleeper(t, guest.port);
  const answers = [1, 2, 3].map(async (n) => (await ask(s.f, {}, `/${n}`)).text());
  await s.waiting(3);
  assert.deepEqual([s.f.edge.stats().waiting, s.f.edge.stats().active], [3, 0]);
  s.wakeUp();
  assert.deepEqual(await Promise.all(answers), ["woken for /1", "woken for /2", "woken for /3"]);
  assert.equal(s.f.edge.stats().waiting, 0);
});

for (const [how, length] of [
  ["of a known length", true],
  ["chunked", false],
] as const) {
  test(`a body ${how} that was sent meanwhile reaches the guest whole`, LIMIT, async (t) => {
    const guest = await httpGuest(t, async (req, res) => {
      res.end(
        createHash("sha256")
          .update(await bodyOf(req))
          .digest("hex"),
      );
    });
    const s = await sleeper(t, guest.port);
    // More than every buffer on the way holds: the rest has to be streamed after the waking.
    const body = randomBytes(24 << 20);
    const answer = new Promise<string>((resolve, reject) => {
      const headers = {
        "E2b-Sandbox-Id": ID,
        "E2b-Sandbox-Port": "3000",
        ...(length ? { "Content-Length": body.length } : {}),
      };
      const req = request({ host: "127.0.0.1", port: s.f.port, method: "POST", headers }, (res) => {
        res.setEncoding("utf8").on("data", resolve).on("error", reject);
      });
      req.on("error", reject);
      for (let at = 0; at < body.length; at += 1 << 20) req.write(body.subarray(at, at + (1 << 20)));
      req.end();
    });
    await s.waiting(1);
    s.wakeUp();
    assert.equal(await answer, createHash("sha256").update(body).digest("hex"));
  });
}

test("who waits for 100 Continue gets it from the guest that woke", LIMIT, async (t) => {
  const guest = await httpGuest(t, async (req, res) => void res.end(`got ${(await bodyOf(req)).toString()}`));
  const s = await sleeper(t, guest.port);
  const client = new RawClient(
    s.f.port,
    `POST / HTTP/1.1\r\nHost: ${s.f.host(3000)}\r\nExpect: 100-continue\r\nContent-Length: 5\r\n\r\n`,
  );
  await s.waiting(1);
  assert.equal(client.text, "");
  s.wakeUp();
  await client.until("100 Continue");
  client.socket.write("hello");
  await client.until("got hello");
  client.socket.destroy();
});

test("a WebSocket waits, too, and what the client sent ahead is not lost", LIMIT, async (t) => {
  const port = await rawGuest(t, (socket) => {
    let seen = "";
    socket.on("data", (d: Buffer) => {
      seen += d.toString("latin1");
      const end = seen.indexOf("\r\n\r\n");
      if (end < 0) return;
      if (!seen.startsWith("UP")) {
        socket.write("HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: test\r\n\r\n");
        seen = `UP\r\n\r\n${seen.slice(end + 4)}`;
      }
      socket.write(`<${seen.slice(6)}>`);
    });
  });
  const s = await sleeper(t, port);
  const client = new RawClient(
    s.f.port,
    `GET / HTTP/1.1\r\nHost: ${s.f.host(3000)}\r\nConnection: Upgrade\r\nUpgrade: test\r\n\r\nahead `,
  );
  await s.waiting(1);
  client.socket.write("and later");
  s.wakeUp();
  await client.until("101 Switching");
  await client.until("ahead and later>");
  client.socket.destroy();
});

test(
  "only who has the token of envd wakes a sandbox by envd's port, and asking for its health never does",
  LIMIT,
  async (t) => {
    const guest = await httpGuest(t, (_req, res) => void res.end("in"));
    const s = await sleeper(t, guest.port, { accessToken: "secret" });
    s.wakeUp();
    for (const headers of [{}, { "X-Access-Token": "Secret" }, { "X-Access-Token": "secret1" }]) {
      const res = await ask(s.f, { ...ENVD, ...headers }, "/files?path=x");
      assert.equal(res.status, 403);
      const body = (await res.json()) as { code: number; sandboxId: string };
      assert.deepEqual([body.code, body.sandboxId], [403, ID]);
    }
    for (const path of ["/health", "//health?x"]) {
      const res = await ask(s.f, { ...ENVD, "X-Access-Token": "secret" }, path);
      assert.equal(res.status, 502);
      assert.deepEqual(await res.json(), { sandboxId: ID, message: "The sandbox was not found", code: 502 });
    }
    assert.equal(s.asked(), 0);
    assert.equal(await (await ask(s.f, { ...ENVD, "X-Access-Token": "secret" }, "/x")).text(), "in");
    // Its other ports are public, also for a path of that name.
    assert.equal(await (await ask(s.f, {}, "/health")).text(), "in");
    assert.equal(s.asked(), 2);
  },
);

test("the URL of a file that is signed wakes, one that is not does not", LIMIT, async (t) => {
  const guest = await httpGuest(t, (_req, res) => void res.end("file"));
  const s = await sleeper(t, guest.port, { accessToken: "secret" });
  s.wakeUp();
  const sign = (text: string): string =>
    encodeURIComponent(`v1_${createHash("sha256").update(text).digest("base64").replaceAll("=", "")}`);
  const good = `/files?path=a%20b&username=user&signature=${sign("a b:read:user:secret")}`;
  assert.equal((await ask(s.f, ENVD, good, { method: "POST" })).status, 403);
  assert.equal((await ask(s.f, ENVD, good.replace("a%20b", "c"))).status, 403);
  assert.equal((await ask(s.f, ENVD, good.replace("/files", "/envs"))).status, 403);
  assert.equal(s.asked(), 0);
  assert.equal((await ask(s.f, ENVD, good)).status, 200);

  const until = `path=x&signature_expiration=1000&signature=${sign("x:write::secret:1000")}`;
  assert.equal(isSigned("POST", `/files?${until}`, "secret", 1_000_999), true);
  assert.equal(isSigned("POST", `/files?${until}`, "secret", 1_001_000), false);
  assert.equal(isSigned("POST", `/files?${until}`, "other", 0), false);
  assert.equal(isSigned("DELETE", `/files?${until}`, "secret", 0), false);
  assert.equal(isSigned("GET", "/files", "secret", 0), false);
});

test("a browser's question before a call of envd is answered without waking", LIMIT, async (t) => {
  const guest = await httpGuest(t, (_req, res) => void res.end("in"));
  const s = await sleeper(t, guest.port, { accessToken: "secret" });
  s.wakeUp();
  const question = {
    Origin: "https://app.example",
    "Access-Control-Request-Method": "POST",
    "Access-Control-Request-Headers": "x-access-token",
  };
  const res = await ask(s.f, { ...ENVD, ...question }, "/process.Process/List", { method: "OPTIONS" });
  assert.equal(res.status, 204);
  assert.equal(res.headers.get("access-control-allow-origin"), "*");
  assert.equal(res.headers.get("access-control-allow-headers"), "x-access-token");
  assert.match(res.headers.get("access-control-allow-methods") ?? "", /POST/);
  assert.equal(s.asked(), 0);
  // Any other OPTIONS is a request like others.
  assert.equal((await ask(s.f, ENVD, "/", { method: "OPTIONS" })).status, 403);
});

test("private traffic needs its token before it wakes", LIMIT, async (t) => {
  const guest = await httpGuest(t, (_req, res) => void res.end("in"));
  const s = await sleeper(t, guest.port, { requiredTrafficToken: "secret" });
  s.wakeUp({ run: "r1", host: "127.0.0.1", port: guest.port, requiredTrafficToken: "secret" });
  assert.equal((await ask(s.f)).status, 403);
  assert.equal((await ask(s.f, { "E2b-Traffic-Access-Token": "wrong!" })).status, 403);
  assert.equal(s.asked(), 0);
  assert.equal((await ask(s.f, { "E2b-Traffic-Access-Token": "secret" })).status, 200);
});

test(
  "those who wait are bounded: for one sandbox by its connections, for all together by the edge",
  LIMIT,
  async (t) => {
    const guest = await httpGuest(t, (_req, res) => void res.end("ok"));
    const s = await sleeper(t, guest.port, {}, { connectionsPerSandbox: 2, waiting: 3 });
    const two = [ask(s.f), ask(s.f)];
    await s.waiting(2);
    assert.equal((await ask(s.f)).status, 429);
    const other = ask(s.f, { "E2b-Sandbox-Id": "iother" });
    await s.waiting(3);
    const more = await ask(s.f, { "E2b-Sandbox-Id": "ithird" });
    assert.deepEqual([more.status, more.headers.get("retry-after")], [503, "1"]);
    s.wakeUp();
    for (const answer of [...two, other]) assert.equal((await answer).status, 200);
    assert.equal((await ask(s.f)).status, 200);
  },
);

test("a client that leaves ends its wait, and only its", LIMIT, async (t) => {
  const guest = await httpGuest(t, (_req, res) => void res.end("ok"));
  const s = await sleeper(t, guest.port);
  const client = new RawClient(s.f.port, `GET / HTTP/1.1\r\nHost: ${s.f.host(3000)}\r\n\r\n`);
  await s.waiting(1);
  const stays = ask(s.f);
  await s.waiting(2);
  client.socket.destroy();
  while (s.f.edge.stats().waiting > 1) await new Promise((resolve) => setImmediate(resolve));
  s.wakeUp();
  assert.equal((await stays).status, 200);
});

test("a sandbox that does not wake in time, or at all, is told as such", LIMIT, async (t) => {
  const s = await sleeper(t, 1, {}, { wakeMs: 20 });
  const late = await ask(s.f);
  assert.equal(late.status, 503);
  assert.match(((await late.json()) as { message: string }).message, /did not wake/);
  s.wakeUp({ error: "not_found" });
  assert.equal((await ask(s.f)).status, 502);
  assert.equal(s.f.edge.stats().waiting, 0);
});

test("closing the edge answers those who wait", LIMIT, async (t) => {
  const s = await sleeper(t, 1);
  const answer = ask(s.f);
  await s.waiting(1);
  await s.f.edge.close();
  assert.equal((await answer).status, 503);
});
