import assert from "node:assert/strict";
import { mkdtemp, rm } from "node:fs/promises";
import { createServer, type Server, type Socket } from "node:net";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { type TestContext, test } from "node:test";
import { AenvError } from "@aenv/base";
import fc from "fast-check";
import { Qmp } from "./qmp.ts";
import { MAX_QMP_LINE_BYTES, QmpReader } from "./qmp-reader.ts";

const never = new AbortController().signal;

test("messages come out equal however the stream is cut", () => {
  const object = fc.dictionary(fc.string(), fc.jsonValue());
  fc.assert(
    fc.property(fc.array(object, { maxLength: 6 }), fc.infiniteStream(fc.integer({ min: 1, max: 9 })), (all, sizes) => {
      const wire = Buffer.from(all.map((o) => `${JSON.stringify(o)}\r\n`).join(""));
      const reader = new QmpReader();
      const seen: unknown[] = [];
      for (let at = 0; at < wire.length; ) {
        const size = sizes.next().value as number;
        seen.push(...reader.push(wire.subarray(at, at + size)));
        at += size;
      }
      // What JSON cannot hold apart (-0) is compared as JSON.
      assert.equal(JSON.stringify(seen), JSON.stringify(all.map((o) => JSON.parse(JSON.stringify(o)) as unknown)));
    }),
    { numRuns: 200 },
  );
});

test("fuzz: any bytes give messages or CORRUPT, never another error", () => {
  const piece = fc.oneof(
    fc.uint8Array({ maxLength: 64 }),
    fc.constantFrom("\n", "\r\n", "{}", '{"QMP":', "[1]\n", "null\n", '{"a":1}\n').map((s) => Buffer.from(s)),
  );
  fc.assert(
    fc.property(fc.array(piece, { maxLength: 40 }), (pieces) => {
      const reader = new QmpReader();
      try {
        for (const p of pieces) for (const m of reader.push(Buffer.from(p))) assert.equal(typeof m, "object");
      } catch (e) {
        assert.ok(e instanceof AenvError && e.code === "CORRUPT", String(e));
      }
    }),
    { numRuns: 2000 },
  );
});

test("an endless line is refused before it is held", () => {
  const reader = new QmpReader();
  const chunk = Buffer.alloc(64 * 1024, 0x20);
  let pushed = 0;
  assert.throws(
    () => {
      for (;;) {
        reader.push(chunk);
        pushed += chunk.length;
      }
    },
    (e: unknown) => e instanceof AenvError && e.code === "CORRUPT",
  );
  assert.ok(pushed <= MAX_QMP_LINE_BYTES);
});

/** A monitor that greets, answers the capabilities, and hands everything else to `serve`. */
async function monitor(t: TestContext, serve: (line: { execute: string; id: number }, s: Socket) => void) {
  const dir = await mkdtemp(join(tmpdir(), "aenv-qmp-"));
  const path = join(dir, "s");
  const sockets = new Set<Socket>();
  const server: Server = createServer((s) => {
    sockets.add(s);
    s.on("error", () => {});
    s.write('{"QMP": {"version": {}, "capabilities": ["oob"]}}\r\n');
    s.on("data", (d) => {
      for (const text of d.toString().trim().split("\n")) {
        const line = JSON.parse(text) as { execute: string; id: number };
        if (line.execute === "qmp_capabilities") s.write(`{"return": {}, "id": ${line.id}}\r\n`);
        else serve(line, s);
      }
    });
  });
  await new Promise<void>((resolve) => server.listen(path, resolve));
  t.after(async () => {
    for (const s of sockets) s.destroy();
    server.close();
    await rm(dir, { recursive: true });
  });
  return path;
}

test("answers find their commands in any order, and errors carry QEMU's words", async (t) => {
  const held: number[] = [];
  const path = await monitor(t, (line, s) => {
    if (line.execute === "bad")
      s.write(`{"error": {"class": "GenericError", "desc": "no such thing"}, "id": ${line.id}}\n`);
    else if (held.push(line.id) === 2)
      for (const id of held.toReversed()) s.write(`{"return": {"n": ${id}}, "id": ${id}}\n`);
  });
  const qmp = await Qmp.connect(path, never);
  const [a, b] = (await Promise.all([qmp.execute("x", {}, never), qmp.execute("y", {}, never)])) as { n: number }[];
  assert.deepEqual([a?.n, b?.n], held);
  await assert.rejects(qmp.execute("bad", {}, never), /no such thing/);
  qmp.close();
  await qmp.closed;
  await assert.rejects(qmp.execute("x", {}, never), /closed/);
});

test("a monitor that answers garbage, or hangs up, fails what waits", async (t) => {
  const path = await monitor(t, (line, s) => void (line.execute === "garbage" ? s.write("]]]\n") : s.destroy()));
  for (const command of ["garbage", "hangup"]) {
    const qmp = await Qmp.connect(path, never);
    await assert.rejects(
      qmp.execute(command, {}, never),
      (e: unknown) => e instanceof AenvError && e.code === "VMM_FAILED",
    );
    await qmp.closed;
  }
});

test("a caller that gives up does not disturb the next one", async (t) => {
  const path = await monitor(t, (line, s) => {
    if (line.execute === "quick")
      s.write(`{"return": "late", "id": ${line.id - 1}}\n{"return": "ok", "id": ${line.id}}\n`);
  });
  const qmp = await Qmp.connect(path, never);
  const gaveUp = new AbortController();
  const slow = qmp.execute("slow", {}, gaveUp.signal);
  gaveUp.abort();
  await assert.rejects(slow);
  assert.equal(await qmp.execute("quick", {}, never), "ok");
  qmp.close();
});

test("a monitor that does not greet is left when the caller gives up", async (t) => {
  const dir = await mkdtemp(join(tmpdir(), "aenv-qmp-"));
  const server = createServer(() => {});
  await new Promise<void>((resolve) => server.listen(join(dir, "s"), resolve));
  t.after(async () => {
    server.close();
    await rm(dir, { recursive: true, force: true });
  });
  await assert.rejects(Qmp.connect(join(dir, "s"), AbortSignal.timeout(20)));
});
