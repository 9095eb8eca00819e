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

/** The node that runs on this machine, as an outside client sees it. */
export class RunningNode implements Disposable {
  readonly home: string;
  readonly client: AenvClient;
  readonly #url: string;
  #spares = { hot: 0, prepared: 0 };

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

  /**
   * Resolves when no spare is being made and the template has some that run: no measurement runs beside the making of one.
   * Returns how many of those there are.
   */
  async poolFull(signal: AbortSignal): Promise<number> {
    const until = performance.now() + POOL_MS;
    let hot = 0;
    while (performance.now() < until) {
      const { pools } = await this.client.node(signal);
      const refilling = Object.entries(pools).some(([name, n]) => name.endsWith(".refilling") && n > 0);
      hot = pools[`${TEMPLATE}.hot`] ?? 0;
      if (!refilling && hot > 0) {
        this.#spares = { hot, prepared: pools[`${TEMPLATE}.prepared`] ?? 0 };
        return hot;
      }
      await sleep(20, signal);
    }
    throw new AenvError("DEADLINE", `the pool of ${TEMPLATE} has ${hot} spares after ${POOL_MS / 1000} s`);
  }

  async conditions(signal: AbortSignal): Promise<Conditions> {
    const info = await this.client.node(signal);
    return {
      vmm: `${info.vmm} ${info.vmmVersion}`,
      accel: info.accel,
      template: TEMPLATE,
      idleSpares: this.#spares.hot,
      waitingVmms: this.#spares.prepared,
    };
  }

  [Symbol.dispose](): void {
    this.client[Symbol.dispose]();
  }
}
