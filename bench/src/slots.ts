/** Network slots: made in a batch of 64, taken from the pool, and reset for the next owner. */
import { randomBytes } from "node:crypto";
import { silentLogger } from "@aenv/base";
import { Network, type Slot } from "@aenv/network";
import { type BenchOptions, type BenchOutcome, series } from "./lib/series.ts";

const BATCH = 64;

async function timed(fn: () => Promise<unknown>): Promise<number> {
  const started = performance.now();
  await fn();
  return performance.now() - started;
}

export async function run(options: BenchOptions): Promise<BenchOutcome> {
  const { brief, signal } = options;
  const made: number[] = [];
  const taken: number[] = [];
  const reset: number[] = [];
  const policy: number[] = [];
  const batchReset: number[] = [];
  for (let round = 0; round < (brief ? 1 : 5); round++) {
    options.log(`round ${round + 1}`);
    const network = await Network.open({
      instance: randomBytes(2).toString("hex"),
      limit: BATCH,
      dns: [],
      logger: silentLogger,
    });
    try {
      made.push(await timed(() => network.ensure(BATCH, signal)));
      const slots: Slot[] = [];
      while (network.free > 0) taken.push(await timed(async () => slots.push(await network.acquire(signal))));
      for (const slot of slots.splice(0, 16)) {
        policy.push(await timed(() => network.setPolicy(slot, { allowInternet: false })));
        reset.push(await timed(() => network.release(slot)));
      }
      batchReset.push(await timed(() => Promise.all(slots.map((s) => network.release(s)))));
    } finally {
      await network.destroy();
    }
  }
  return {
    results: [
      series(`${BATCH} new slots`, "ms", made),
      series("take a ready slot", "ms", taken),
      series("change a slot's policy", "ms", policy),
      series("reset one slot alone", "ms", reset),
      series(
        `reset ${BATCH - 16} slots at once, per slot`,
        "ms",
        batchReset.map((ms) => ms / (BATCH - 16)),
      ),
    ],
  };
}
