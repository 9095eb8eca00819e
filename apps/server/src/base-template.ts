import { readFile } from "node:fs/promises";
import { type Logger, messageOf, mib } from "@aenv/base";
import { damageOf, type Engine } from "@aenv/engine";
import { publishFile } from "@aenv/host";
import { BASE_NAME, type BaseManifest, baseMarker, readBaseManifest } from "@aenv/images";
import type { State } from "@aenv/state";

export interface BaseStatus {
  state: "absent" | "building" | "ready" | "failed";
  /** What the build does now. */
  step?: string;
  error?: string;
}

/**
 * Keeps the template `base` equal to what set-up left in the data folder: builds it when it is missing or was made from
 * another kernel, guest binary or root filesystem, and when its files are damaged. A failed build leaves the former
 * template in use.
 */
export class BaseTemplate {
  readonly #home: string;
  readonly #engine: Pick<Engine, "templates" | "importLayer" | "buildTemplate">;
  readonly #snapshots: Pick<State["snapshots"], "get">;
  readonly #logger: Logger;
  #status: BaseStatus = { state: "absent" };

  constructor(
    home: string,
    rooms: {
      engine: Pick<Engine, "templates" | "importLayer" | "buildTemplate">;
      snapshots: Pick<State["snapshots"], "get">;
    },
    logger: Logger,
  ) {
    this.#home = home;
    this.#engine = rooms.engine;
    this.#snapshots = rooms.snapshots;
    this.#logger = logger;
  }

  get status(): BaseStatus {
    return this.#status;
  }

  /** Run once at start, in the background. Never throws: the status tells. */
  async ensure(signal: AbortSignal): Promise<void> {
    try {
      const manifest = await readBaseManifest(this.#home);
      if (!manifest) return;
      if ((await this.#builtFrom()) === manifest.fingerprint && (await this.#intact())) {
        this.#status = { state: "ready" };
        return;
      }
      await this.#build(manifest, signal);
      this.#status = { state: "ready" };
    } catch (e) {
      if (signal.aborted) return;
      this.#status = { state: "failed", error: messageOf(e) };
      this.#logger.error({ err: e }, "the template base could not be built");
    }
  }

  async #intact(): Promise<boolean> {
    const template = this.#engine.templates.resolve(BASE_NAME);
    const snapshot = template && this.#snapshots.get(template.snapshotId);
    if (snapshot === undefined) return false;
    const damage = await damageOf(snapshot);
    if (damage) this.#logger.warn({ error: damage.message }, "the template base is damaged and built again");
    return damage === undefined;
  }

  async #builtFrom(): Promise<string | undefined> {
    const text = await readFile(baseMarker(this.#home), "utf8").catch(() => "{}");
    try {
      return (JSON.parse(text) as { fingerprint?: string }).fingerprint;
    } catch {
      return undefined;
    }
  }

  async #build(manifest: BaseManifest, signal: AbortSignal): Promise<void> {
    const started = performance.now();
    const step = (name: string): void => {
      this.#status = { state: "building", step: name };
    };
    step("import the disk");
    const baseLayer = await this.#engine.importLayer(manifest.disk, signal);
    await this.#engine.buildTemplate(
      {
        name: BASE_NAME,
        baseLayer,
        sizeBytes: mib(manifest.sizeBytes / 2 ** 20),
        machine: {
          vcpus: manifest.vcpus,
          memoryBytes: mib(manifest.memoryMB),
          kernel: manifest.kernel,
          initrd: manifest.initrd,
          cmdline: "quiet",
        },
        prime: manifest.prime,
        onStep: step,
      },
      signal,
    );
    await publishFile(baseMarker(this.#home), JSON.stringify({ fingerprint: manifest.fingerprint }));
    this.#logger.info({ ms: Math.round(performance.now() - started) }, "the template base was built");
  }
}
