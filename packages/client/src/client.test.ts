import assert from "node:assert/strict";
import { once } from "node:events";
import { createServer, type IncomingMessage, type ServerResponse } from "node:http";
import type { AddressInfo } from "node:net";
import test from "node:test";
import { AenvError } from "@aenv/base";
import { parseMetadataFilter } from "@aenv/contract";
import fc from "fast-check";
import { AenvClient } from "./client.ts";

type Answer = (req: IncomingMessage & { text: string }, res: ServerResponse) => void;

/** A server whose answers are given one after another; the last one repeats. */
async function node(...answers: Answer[]): Promise<{ client: AenvClient; seen: string[] } & AsyncDisposable> {
  const seen: string[] = [];
  const server = createServer((req, res) => {
    const parts: Buffer[] = [];
    req.on("data", (d: Buffer) => parts.push(d));
    req.on("end", () => {
      const answer = answers[Math.min(seen.length, answers.length - 1)];
      seen.push(`${req.method} ${req.url}`);
      answer?.(Object.assign(req, { text: Buffer.concat(parts).toString() }), res);
    });
  });
  server.listen(0, "127.0.0.1");
  await once(server, "listening");
  const apiUrl = `http://127.0.0.1:${(server.address() as AddressInfo).port}`;
  const client = new AenvClient({ apiUrl, apiKey: "e2b_00", timeoutMs: 5000 });
  return {
    client,
    seen,
    async [Symbol.asyncDispose]() {
      client[Symbol.dispose]();
      server.closeAllConnections();
      server.close();
      await once(server, "close");
    },
  };
}

const json =
  (status: number, body: unknown, headers: Record<string, string> = {}): Answer =>
  (_req, res) => {
    res.writeHead(status, { "content-type": "application/json", ...headers }).end(JSON.stringify(body));
  };
const failsWith = (code: string, text: RegExp) => (e: unknown) =>
  e instanceof AenvError && e.code === code && text.test(e.message);

test("the server's error name wins over the status, and its hint is not said twice", async () => {
  await using n = await node(
    json(503, {
      code: 503,
      message: "no slot is free. Kill sandboxes or raise the limit of network slots.",
      error_code: "SLOT_EXHAUSTED",
    }),
  );
  await assert.rejects(n.client.get("iabc"), (e) => {
    assert.ok(e instanceof AenvError);
    assert.deepEqual([e.code, e.message], ["SLOT_EXHAUSTED", "no slot is free."]);
    return true;
  });
});

test("a status without a body, or with one that is no JSON, still becomes an error of the table", async () => {
  for (const [status, code] of [
    [401, "UNAUTHENTICATED"],
    [404, "NOT_FOUND"],
    [418, "INTERNAL"],
    [507, "NO_SPACE"],
  ] as const) {
    await using n = await node((_req, res) => res.writeHead(status).end("<html>"));
    await assert.rejects(n.client.get("iabc"), failsWith(code, new RegExp(String(status))));
  }
});

test("429 with Retry-After is tried again, and given up after the third time", async () => {
  const busy = json(429, { code: 429, message: "busy" }, { "retry-after": "0" });
  {
    await using n = await node(busy, busy, json(200, []));
    assert.deepEqual(await n.client.templates(), []);
    assert.equal(n.seen.length, 3);
  }
  await using n = await node(busy);
  await assert.rejects(n.client.templates(), failsWith("RATE_LIMITED", /busy/));
  assert.equal(n.seen.length, 4);
});

test("what the server says not to repeat is not repeated, nor a change that may have happened", async () => {
  const no = json(503, { code: 503, message: "no" }, { "retry-after": "0", "should-retry": "false" });
  await using n = await node(no);
  await assert.rejects(n.client.templates(), failsWith("UNAVAILABLE", /no/));
  assert.equal(n.seen.length, 1);
  await using m = await node(json(503, { code: 503, message: "no" }, { "retry-after": "0" }));
  await assert.rejects(m.client.setTimeout("iabc", 5), failsWith("UNAVAILABLE", /no/));
  assert.equal(m.seen.length, 1);
});

test("a create that is sent again carries the same idempotency key", async () => {
  const keys: (string | string[] | undefined)[] = [];
  const remember =
    (answer: Answer): Answer =>
    (req, res) => {
      keys.push(req.headers["idempotency-key"]);
      answer(req, res);
    };
  await using n = await node(
    remember(json(503, { code: 503, message: "starting" }, { "retry-after": "0" })),
    remember(json(201, { sandboxID: "iabc", templateID: "t", envdVersion: "1" })),
  );
  assert.equal((await n.client.create({ templateID: "base" })).sandboxID, "iabc");
  assert.equal(new Set(keys).size, 1);
  assert.match(String(keys[0]), /^[a-z0-9-]{36}$/);
});

test("a list goes on to its last page", async () => {
  await using n = await node(
    json(200, [{ sandboxID: "a" }], { "x-next-token": "two" }),
    json(200, [{ sandboxID: "b" }]),
  );
  const ids: string[] = [];
  for await (const s of n.client.list({ state: ["running", "paused"], pageSize: 1 })) ids.push(s.sandboxID);
  assert.deepEqual(ids, ["a", "b"]);
  assert.deepEqual(n.seen, [
    "GET /v2/sandboxes?state=running%2Cpaused&limit=1",
    "GET /v2/sandboxes?state=running%2Cpaused&limit=1&nextToken=two",
  ]);
});

test("a server that gives the same page for ever does not hold us", async () => {
  await using n = await node(json(200, [{ sandboxID: "a" }], { "x-next-token": "same" }));
  let count = 0;
  for await (const _ of n.client.list()) count++;
  assert.equal(count, 2);
});

test("any label filter arrives at the server as it was meant", async () => {
  await using n = await node(json(200, []));
  await fc.assert(
    fc.asyncProperty(
      fc.dictionary(fc.string({ unit: "grapheme", minLength: 1 }), fc.string({ unit: "grapheme" }), { maxKeys: 4 }),
      async (labels) => {
        // oxlint-disable-next-line no-unused-vars -- the list is read for its request
        for await (const _ of n.client.list({ metadata: labels }));
        const query = new URL(`http://x${n.seen.at(-1)?.split(" ")[1]}`).searchParams.get("metadata") ?? "";
        assert.deepEqual(parseMetadataFilter(query), new Map(Object.entries(labels)));
      },
    ),
    { numRuns: 60 },
  );
});

test("ids and names cannot leave their place in the path", async () => {
  await using n = await node(json(404, { code: 404, message: "none" }));
  assert.equal(await n.client.kill("../v1/doctor?x#y"), false);
  assert.deepEqual(n.seen, ["DELETE /sandboxes/..%2Fv1%2Fdoctor%3Fx%23y"]);
});

test("an answer of another shape is refused with what to look at", async () => {
  await using n = await node(json(200, { hello: "world" }));
  await assert.rejects(n.client.templates(), failsWith("INTERNAL", /unexpected shape/));
  await assert.rejects(n.client.get("iabc"), failsWith("INTERNAL", /unexpected shape/));
});

test("a server that never answers ends with DEADLINE, an abort with its reason", async () => {
  await using n = await node(() => {});
  using slow = new AenvClient({ apiUrl: n.client.apiUrl, timeoutMs: 50 });
  await assert.rejects(slow.templates(), failsWith("DEADLINE", /did not answer in 0\.05 s/));
  const stop = new AbortController();
  const waiting = n.client.templates(stop.signal);
  stop.abort(new AenvError("CANCELLED", "enough"));
  await assert.rejects(waiting, failsWith("CANCELLED", /enough/));
});

test("a pause of what is paused already is false, other refusals are thrown", async () => {
  await using n = await node(
    (_req, res) => res.writeHead(204).end(),
    json(409, { code: 409, message: "it is paused already.", error_code: "CONFLICT" }),
    json(404, { code: 404, message: "none", error_code: "NOT_FOUND" }),
  );
  assert.equal(await n.client.pause("iabc"), true);
  assert.equal(await n.client.pause("iabc", { memory: false }), false);
  await assert.rejects(n.client.pause("iabc"), failsWith("NOT_FOUND", /none/));
});

test("a busy node is asked again for a pause, but a fork, which may have happened, is sent once", async () => {
  const busy = json(503, { code: 503, message: "busy" }, { "retry-after": "0", "should-retry": "true" });
  await using n = await node(busy, (_req, res) => res.writeHead(204).end());
  assert.equal(await n.client.pause("iabc"), true);
  await using m = await node(busy);
  for (const once of [m.client.fork("iabc"), m.client.snapshot("iabc"), m.client.rewind("iabc", "c")])
    await assert.rejects(once, failsWith("UNAVAILABLE", /busy/));
  assert.equal(m.seen.length, 3);
});

test("children of a fork come in order, each a sandbox or an error of the table", async () => {
  const bodies: string[] = [];
  await using n = await node((req, res) => {
    bodies.push(req.text);
    const error = { code: 503, message: "no slot is free.", error_code: "SLOT_EXHAUSTED" };
    json(201, [{ sandbox: { sandboxID: "a" } }, { error }, {}])(req, res);
  });
  const [a, b, c] = await n.client.fork("iabc", { count: 3, atomic: false });
  assert.deepEqual(a, { sandbox: { sandboxID: "a" } });
  for (const [child, code, text] of [
    [b, "SLOT_EXHAUSTED", /no slot/],
    [c, "INTERNAL", /child/],
  ] as const)
    assert.ok(child && "error" in child && failsWith(code, text)(child.error));
  assert.deepEqual(
    bodies.map((t) => JSON.parse(t) as unknown),
    [{ count: 3, atomic: false }],
  );
});

test("snapshots go on to their last page, and their ids keep to one part of the path", async () => {
  await using n = await node(
    json(200, [{ snapshotID: "a" }], { "x-next-token": "two" }),
    json(200, [{ snapshotID: "b" }]),
    (_req, res) => res.writeHead(204).end(),
    json(404, { code: 404, message: "none" }),
  );
  const ids: string[] = [];
  for await (const s of n.client.snapshots({ sandboxID: "iabc", pageSize: 1 })) ids.push(s.snapshotID);
  assert.deepEqual(ids, ["a", "b"]);
  assert.equal(await n.client.deleteSnapshot("team/name:v1"), true);
  assert.equal(await n.client.deleteSnapshot("team/name:v1"), false);
  assert.deepEqual(n.seen, [
    "GET /snapshots?sandboxID=iabc&limit=1",
    "GET /snapshots?sandboxID=iabc&limit=1&nextToken=two",
    "DELETE /templates/team%2Fname%3Av1",
    "DELETE /templates/team%2Fname%3Av1",
  ]);
});

test("checkpoints, rewind and lineage are refused where the answer has another shape", async () => {
  await using n = await node(json(200, { hello: "world" }));
  const calls = [
    n.client.checkpoint("iabc"),
    n.client.checkpoints("iabc"),
    n.client.rewind("iabc", "c", { timeout: 5 }),
    n.client.lineage("iabc"),
    n.client.snapshot("iabc", { name: "n" }),
    n.client.fork("iabc"),
  ];
  for (const c of calls) await assert.rejects(c, failsWith("INTERNAL", /unexpected shape/));
});
