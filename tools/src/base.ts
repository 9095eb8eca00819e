/**
 * The template `base` of a running node: waits until it is built, and has it built again where it is damaged.
 * `AENV_HOME=... node tools/src/base.ts` does only this.
 */
import { rm } from "node:fs/promises";
import { AenvError, sleep } from "@aenv/base";
import { aenvHome } from "@aenv/host";
import { BASE_NAME, baseMarker } from "@aenv/images";
import { readKey, runningServer, startServer, stopServer } from "./node.ts";

interface NodeStatus {
  accel?: string;
  /** Counts by "template.kind". */
  pools?: Record<string, number>;
  base?: { state: "absent" | "building" | "ready" | "failed"; step?: string; error?: string };
}

interface Report {
  checks: readonly { name: string; ok: boolean; detail: string }[];
}

/** A template is built by a cold boot, which takes seconds under emulation and may be slow on a busy machine. */
const BASE_TIMEOUT_MS = 180_000;

/** A node that cannot keep spares works all the same. */
const SPARE_WAIT_MS = 15_000;

/** Resolves when sandboxes of base can be made: builds it again, once, when its files are damaged. */
export async function ensureBase(home: string, say: (note: string) => void, signal: AbortSignal): Promise<string> {
  const done = await waitForBase(home, say, signal);
  return (await rebuildDamaged(home, say, signal)) ?? done;
}

/**
 * Builds base again when the doctor finds it damaged; what runs goes on. Returns undefined when it is whole. The server
 * is started again: its spares of the damaged template end, and it builds before it says ready.
 */
export async function rebuildDamaged(
  home: string,
  say: (note: string) => void,
  signal: AbortSignal,
): Promise<string | undefined> {
  const { checks } = (await ask(home, "/v1/doctor")) as Report;
  const damage = checks.find((c) => c.name === `template ${BASE_NAME} is whole` && !c.ok);
  const server = runningServer(home);
  if (damage === undefined || server === undefined) return undefined;
  say(`damaged, building it again: ${damage.detail}`);
  await rm(baseMarker(home), { force: true });
  await stopServer(server, "keep");
  await startServer(home, signal);
  return `${await waitForBase(home, say, signal)}; built again, for ${damage.detail}`;
}

async function waitForBase(home: string, say: (note: string) => void, signal: AbortSignal): Promise<string> {
  const until = performance.now() + BASE_TIMEOUT_MS;
  let spareUntil: number | undefined;
  while (performance.now() < until) {
    const status = (await ask(home, "/v1/node")) as NodeStatus;
    const base = status.base;
    if (base?.state === "ready") {
      const done = `ready (${status.accel ?? "unknown accelerator"})`;
      // The first create shall show what every later one is like.
      if (
        (status.pools?.[`${BASE_NAME}.hot`] ?? 0) > 0 ||
        performance.now() > (spareUntil ??= performance.now() + SPARE_WAIT_MS)
      )
        return done;
      say("warming the first spare");
    }
    if (base?.state === "failed")
      throw new AenvError("VMM_FAILED", `the template could not be built: ${base.error ?? "unknown"}`);
    if (base?.state !== "ready") say(base?.step ?? "…");
    await sleep(100, signal);
  }
  throw new AenvError("DEADLINE", `the template was not ready within ${BASE_TIMEOUT_MS / 1000} s`);
}

async function ask(home: string, path: string): Promise<unknown> {
  const server = runningServer(home);
  if (!server) throw new AenvError("UNAVAILABLE", "the server ended while it built the template");
  const answer = await fetch(`http://127.0.0.1:${server.port}${path}`, {
    headers: { "X-API-KEY": await readKey(home) },
    signal: AbortSignal.timeout(10_000),
  });
  if (!answer.ok) throw new AenvError("UNAVAILABLE", `GET ${path} answered ${answer.status}: ${await answer.text()}`);
  return await answer.json();
}

if (import.meta.main) {
  const say = (note: string): void => console.error(note);
  console.log(await ensureBase(aenvHome(), say, new AbortController().signal));
}
