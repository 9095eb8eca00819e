import { readFile } from "node:fs/promises";
import { join } from "node:path";
import { type Logger, messageOf, mib } from "@aenv/base";
import type { Engine } from "@aenv/engine";
import { publishFile } from "@aenv/host";
import { type BaseManifest, readBaseManifest } from "@aenv/images";

export interface BaseStatus {
  state: "absent" | "building" | "ready" | "failed";
  /** What the build does now. */
  step?: string;
  error?: string;
}

const NAME = "base";

/**
 * Keeps the template `base` equal to what set-up left in the data folder: builds it when it is missing or was made from
 * another kernel, guest binary or root filesystem. A failed build leaves the former template in use.
 */
export class BaseTemplate {
  readonly #home: string;
  readonly #engine: Pick<Engine, "templates" | "importLayer" | "buildTemplate">;
  readonly #logger: Logger;
  #status: BaseStatus = { state: "absent" };

  constructor(home: string, engine: Pick<Engine, "templates" | "importLayer" | "buildTemplate">, logger: Logger) {
    this.#home = home;
    this.#engine = engine;
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
      if (this.#engine.templates.exists(NAME) && (await this.#builtFrom()) === manifest.fingerprint) {
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

  get #marker(): string {
    return join(this.#home, "images/base-built.json");
  }

  async #builtFrom(): Promise<string | undefined> {
    const text = await readFile(this.#marker, "utf8").catch(() => "{}");
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
        name: NAME,
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
    await publishFile(this.#marker, JSON.stringify({ fingerprint: manifest.fingerprint }));
    this.#logger.info({ ms: Math.round(performance.now() - started) }, "the template base was built");
  }
}
