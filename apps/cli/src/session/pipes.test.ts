import assert from "node:assert/strict";
import { test } from "node:test";
import type { GuestClient, GuestProcess } from "@aenv/guest";
import { runPipes } from "./pipes.ts";

/** A guest whose program starts when it is told to and ends by the first signal. */
function lateGuest() {
  const started = Promise.withResolvers<void>();
  const ended = Promise.withResolvers<void>();
  const signals: string[] = [];
  const guest = {
    start: async (_spec: unknown, signal: AbortSignal): Promise<GuestProcess> => {
      const gaveUp = new Promise<never>((_, reject) =>
        signal.addEventListener("abort", () => reject(signal.reason as Error)),
      );
      await Promise.race([started.promise, gaveUp]);
      return Object.assign(
        (async function* () {
          await ended.promise;
          yield { type: "end" as const, exitCode: -1, status: "signal: interrupt" };
        })(),
        { pid: 7 },
      ) as unknown as GuestProcess;
    },
    exec: (spec: { args: string[] }) => {
      signals.push(spec.args[1] ?? "");
      ended.resolve();
      return Promise.resolve({ exitCode: 0 });
    },
  } as unknown as GuestClient;
  return { guest, signals, start: started.resolve };
}

const session = { spec: { cmd: "x" }, stdin: undefined, output: () => Promise.resolve() };

test("a signal that comes while the program is started reaches it", async () => {
  const { guest, signals, start } = lateGuest();
  const running = runPipes(guest, session, () => {});
  process.emit("SIGINT", "SIGINT");
  start();
  assert.equal((await running).code, 130);
  assert.match(signals[0] ?? "", /kill -INT -- -7/);
  assert.equal(process.listenerCount("SIGINT"), 0);
});

test("a second signal gives up on a program that does not start", async () => {
  const { guest, signals } = lateGuest();
  const running = runPipes(guest, session, () => {});
  process.emit("SIGINT", "SIGINT");
  process.emit("SIGTERM", "SIGTERM");
  await assert.rejects(running, { code: "CANCELLED", data: { signal: "SIGTERM" } });
  assert.deepEqual(signals, []);
  assert.equal(process.listenerCount("SIGTERM"), 0);
});
