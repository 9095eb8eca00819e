import assert from "node:assert/strict";
import { once } from "node:events";
import { createServer, type IncomingMessage, type ServerResponse } from "node:http";
import type { AddressInfo } from "node:net";
import { test, type TestContext } from "node:test";
import { type Clock, newSandboxId, newSnapshotId, newTemplateId, type SandboxId, silentLogger } from "@aenv/base";
import { LIFECYCLE_TYPES, type LifecycleEvent } from "@aenv/contract";
import { DEFAULT_TEAM, LIFECYCLE, State, type WebhookRecord } from "@aenv/state";
import { signatureOf, WebhookSender } from "./sender.ts";

const LIMIT = { timeout: 30_000 };
const SECRET = "a secret of the receiver";

/** Time passes when the test says so; timers of the sender never fire by themselves. */
class HandClock implements Clock {
  ms = 1_000_000;
  now = (): number => this.ms;
  mono = (): number => this.ms;
  after = (): (() => void) => () => {};
}

interface Bed {
  state: State;
  clock: HandClock;
  sender: WebhookSender;
  sandbox: SandboxId;
  happen(message: string, fields?: Record<string, unknown>): void;
  hook(url: string, events?: readonly string[]): WebhookRecord;
}

function bed(t: TestContext): Bed {
  const clock = new HandClock();
  const state = State.open(":memory:", clock);
  const sandbox = newSandboxId("tst");
  state.sandboxes.insert({
    id: sandbox,
    team: DEFAULT_TEAM,
    template: newTemplateId(),
    snapshot: newSnapshotId(),
    state: "running",
    startedAt: 1,
    endAt: 2,
    metadata: { owner: "me" },
    envVars: { SECRET: "not for webhooks" },
    secure: true,
    onTimeout: "kill",
    pauseMemory: true,
    autoResume: false,
    interrupted: false,
    timeoutMs: 1,
    allowInternetAccess: null,
    allowPublicTraffic: true,
  });
  const sender = new WebhookSender({ state, clock, logger: silentLogger });
  t.after(async () => {
    await sender[Symbol.asyncDispose]();
    state.close();
  });
  return {
    state,
    clock,
    sender,
    sandbox,
    happen: (message, fields = {}) =>
      state.tx(() => state.events.add(sandbox, { timestamp: clock.now(), level: "info", message, fields })),
    hook: (url, events = LIFECYCLE_TYPES) =>
      state.webhooks.create(DEFAULT_TEAM, {
        name: "test",
        url,
        enabled: true,
        events,
        secret: SECRET,
        told: state.events.latest(),
      }),
  };
}

interface Delivery {
  event: LifecycleEvent;
  body: string;
  headers: IncomingMessage["headers"];
}

interface Receiver {
  url: string;
  all: Delivery[];
  /** Resolves when so many deliveries were made. */
  count(n: number): Promise<void>;
}

async function receiver(t: TestContext, answer: (n: number, res: ServerResponse) => void): Promise<Receiver> {
  const all: Delivery[] = [];
  const waiters: { n: number; resolve: () => void }[] = [];
  const server = createServer((req, res) => {
    let body = "";
    req.setEncoding("utf8").on("data", (d: string) => (body += d));
    req.on("end", () => {
      all.push({ event: JSON.parse(body) as LifecycleEvent, body, headers: req.headers });
      answer(all.length, res);
      for (const w of waiters) if (all.length >= w.n) w.resolve();
    });
  }).listen(0, "127.0.0.1");
  await once(server, "listening");
  t.after(() => {
    server.closeAllConnections();
    server.close();
  });
  return {
    url: `http://127.0.0.1:${(server.address() as AddressInfo).port}/hook`,
    all,
    count: (n) => new Promise((resolve) => (all.length >= n ? resolve() : waiters.push({ n, resolve }))),
  };
}

const ok = (_n: number, res: ServerResponse): void => void res.writeHead(204).end();

/** Looks again and again until it is so: a delivery that runs keeps its webhook from the next one. */
async function until(b: Bed, done: () => boolean): Promise<void> {
  while (!done()) {
    b.sender.look();
    await new Promise((resolve) => setImmediate(resolve));
  }
}

test("events reach a webhook in order, signed, with their sandbox, and none of its secrets", LIMIT, async (t) => {
  const b = bed(t);
  const r = await receiver(t, ok);
  b.happen(LIFECYCLE.created, { run: "rold" });
  const hook = b.hook(r.url);
  b.happen("last lines of its console", { console: "not for webhooks" });
  b.happen(LIFECYCLE.paused, { snapshot: "s1" });
  b.happen(LIFECYCLE.resumed, { run: "rnew" });
  b.happen(LIFECYCLE.died, { cause: "vmm-exit" });
  await until(b, () => r.all.length === 3);
  assert.deepEqual(
    r.all.map((d) => d.event.type.split(".").at(-1)),
    ["paused", "resumed", "killed"],
  );
  for (const { event, body, headers } of r.all) {
    assert.equal(headers["e2b-signature"], signatureOf(SECRET, body));
    assert.equal(headers["e2b-signature-version"], "v1");
    assert.equal(headers["e2b-webhook-id"], hook.id);
    assert.equal(event.sandboxId, b.sandbox);
    assert.deepEqual(event.eventData["sandbox_metadata"], { owner: "me" });
    assert.doesNotMatch(body, /not for webhooks/);
  }
  assert.equal(new Set(r.all.map((d) => d.headers["e2b-delivery-id"])).size, 3);
  assert.equal(r.all[1]?.event.sandboxExecutionId, "rnew");
  assert.equal(r.all[2]?.event.eventData["cause"], "vmm-exit");
});

test("what a webhook did not ask for is passed over, and one that is off is told of nothing", LIMIT, async (t) => {
  const b = bed(t);
  const [some, off] = [await receiver(t, ok), await receiver(t, ok)];
  b.hook(some.url, ["sandbox.lifecycle.killed"]);
  b.state.webhooks.change(DEFAULT_TEAM, b.hook(off.url).id, { enabled: false });
  b.happen(LIFECYCLE.created);
  b.happen(LIFECYCLE.killed);
  await until(b, () => some.all.length === 1 && b.state.webhooks.enabled()[0]?.told === b.state.events.latest());
  assert.equal(some.all[0]?.event.type, "sandbox.lifecycle.killed");
  assert.equal(off.all.length, 0);
});

test(
  "a delivery that fails is made again later and later, the same event, and holds up nobody else",
  LIMIT,
  async (t) => {
    const b = bed(t);
    const bad = await receiver(t, (n, res) => {
      if (n === 1) res.destroy();
      else res.writeHead(n < 4 ? 500 : 200).end();
    });
    const good = await receiver(t, ok);
    const [badHook] = [b.hook(bad.url), b.hook(good.url)];
    b.happen(LIFECYCLE.created);
    b.happen(LIFECYCLE.killed);
    await until(b, () => good.all.length === 2 && bad.all.length === 1);
    const waits: number[] = [];
    for (let n = 2; n <= 4; n++) {
      const from = b.clock.ms;
      while (bad.all.length < n) {
        b.clock.ms += 100;
        b.sender.look();
        await new Promise((resolve) => setTimeout(resolve, 1));
      }
      waits.push(b.clock.ms - from);
    }
    await until(b, () => bad.all.length === 5);
    assert.ok((waits[0] as number) >= 1000, String(waits));
    assert.equal(new Set(bad.all.slice(0, 4).map((d) => d.event.id)).size, 1);
    assert.equal(bad.all[4]?.event.type, "sandbox.lifecycle.killed");
    await until(b, () => b.state.webhooks.get(DEFAULT_TEAM, badHook.id)?.told === b.state.events.latest());
  },
);

test("an event that nobody takes for an hour is given up; the next one comes", LIMIT, async (t) => {
  const b = bed(t);
  let open = false;
  const r = await receiver(t, (_n, res) => void res.writeHead(open ? 200 : 503).end());
  b.hook(r.url);
  b.happen(LIFECYCLE.created);
  const first = b.state.events.latest();
  b.happen(LIFECYCLE.killed);
  await until(b, () => {
    b.clock.ms += 60_000;
    return b.state.webhooks.enabled()[0]?.told === first;
  });
  assert.ok(r.all.length > 5, `${r.all.length} attempts within an hour`);
  open = true;
  await until(b, () => {
    b.clock.ms += 1000;
    return b.state.webhooks.enabled()[0]?.told === b.state.events.latest();
  });
  assert.equal(r.all.at(-1)?.event.type, "sandbox.lifecycle.killed");
});

test("a sender that starts anew goes on where the last one stopped", LIMIT, async (t) => {
  const b = bed(t);
  const r = await receiver(t, ok);
  b.hook(r.url);
  b.happen(LIFECYCLE.created);
  await until(b, () => b.state.webhooks.enabled()[0]?.told === b.state.events.latest());
  await b.sender[Symbol.asyncDispose]();
  b.happen(LIFECYCLE.killed);
  const next = new WebhookSender({ state: b.state, clock: b.clock, logger: silentLogger });
  t.after(() => next[Symbol.asyncDispose]());
  await r.count(2);
  assert.deepEqual(
    r.all.map((d) => d.event.type),
    ["sandbox.lifecycle.created", "sandbox.lifecycle.killed"],
  );
});
