import { readFile } from "node:fs/promises";
import { join } from "node:path";
import { AenvError, sleep } from "@aenv/base";
import { AenvClient, type Sandbox } from "@aenv/client";
import { GuestClient } from "@aenv/guest";
import { aenvHome, isAlive, readServerFile } from "@aenv/host";
import type { Conditions } from "./conditions.ts";

const TEMPLATE = "base";
const ENVD_PORT = "49983";
/** How long the pool may take to fill: on a loaded machine under emulation, one spare takes seconds. */
const POOL_MS = 120_000;
/** A pool that has not changed for this long is full. */
const STEADY_MS = 2_000;

/** The node that runs on this machine, as an outside client sees it. */
export class RunningNode implements Disposable {
  readonly home: string;
  readonly client: AenvClient;
  readonly #url: string;
  #spares = 0;

  private constructor(home: string, url: string, apiKey: string) {
    this.home = home;
    this.#url = url;
    this.client = new AenvClient({ apiUrl: url, apiKey });
  }

  static async find(home = aenvHome()): Promise<RunningNode> {
    const server = readServerFile(home);
    if (!server || !isAlive(server)) {
      throw new AenvError("UNAVAILABLE", `no node runs with the data folder ${home}`, {
        hint: "Run npm run up first.",
      });
    }
    const { apiKey } = JSON.parse(await readFile(join(home, "auth.json"), "utf8")) as { apiKey: string };
    return new RunningNode(home, `http://127.0.0.1:${server.port}`, apiKey);
  }

  create(signal: AbortSignal, templateID = TEMPLATE): Promise<Sandbox> {
    return this.client.create({ templateID, timeout: 600 }, signal);
  }

  /** Kills them all, however the benchmark ended. */
  async killAll(ids: readonly string[]): Promise<void> {
    await Promise.all(ids.map((id) => this.client.kill(id, AbortSignal.timeout(60_000))));
  }

  /** Through the edge, like any client. */
  guest(sandbox: Sandbox): GuestClient {
    return new GuestClient({
      baseUrl: this.#url,
      headers: { "E2b-Sandbox-Id": sandbox.sandboxID, "E2b-Sandbox-Port": ENVD_PORT },
      ...(sandbox.envdAccessToken === undefined ? {} : { accessToken: sandbox.envdAccessToken }),
    });
  }

  async #hot(signal: AbortSignal): Promise<number> {
    return (await this.client.node(signal)).pools[`${TEMPLATE}.hot`] ?? 0;
  }

  /**
   * Resolves when the pool of idle spares is as full as it gets: no measurement runs beside the making of a spare.
   * Returns how many there are.
   */
  async poolFull(signal: AbortSignal): Promise<number> {
    const until = performance.now() + POOL_MS;
    let since = performance.now();
    let last = await this.#hot(signal);
    while (performance.now() < until) {
      if (this.#spares > 0 && last >= this.#spares) return last;
      if (this.#spares === 0 && last > 0 && performance.now() - since > STEADY_MS) return (this.#spares = last);
      await sleep(20, signal);
      const now = await this.#hot(signal);
      if (now !== last) since = performance.now();
      last = now;
    }
    throw new AenvError("DEADLINE", `the pool of ${TEMPLATE} has ${last} spares after ${POOL_MS / 1000} s`);
  }

  async conditions(signal: AbortSignal): Promise<Conditions> {
    const info = await this.client.node(signal);
    return { vmm: `${info.vmm} ${info.vmmVersion}`, accel: info.accel, template: TEMPLATE, idleSpares: this.#spares };
  }

  [Symbol.dispose](): void {
    this.client[Symbol.dispose]();
  }
}
