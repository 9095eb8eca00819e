import { randomBytes } from "node:crypto";
import { AenvError, newSandboxId } from "@aenv/base";
import type { SandboxRecord, SnapshotRecord } from "@aenv/state";
import type { Context } from "./context.ts";
import { checkRoom, type Creator, type Registry } from "./create.ts";
import { Phases } from "./phases.ts";
import { checkDisk } from "./disk-reserve.ts";
import type { Sandbox } from "./sandbox.ts";
import { takeState } from "./take.ts";
import type { TemplateStore } from "./templates.ts";
import type { ForkOptions, ForkResult } from "./types.ts";

/** One capture, then children of it; the source goes on before the first of them is launched. Results in their order. */
export async function fork(
  ctx: Context,
  rooms: { store: TemplateStore; creator: Creator; registry: Registry },
  sandbox: Sandbox,
  { count, timeoutMs, atomic = false }: ForkOptions,
  caller: AbortSignal,
): Promise<ForkResult[]> {
  const { maxForks } = ctx.config;
  if (!Number.isInteger(count) || count < 1 || count > maxForks)
    throw new AenvError("INVALID_ARGUMENT", `a fork makes 1 to ${maxForks} children, not ${count}`);
  checkRoom(ctx, rooms.registry, count);
  checkDisk(ctx, "no sandbox is forked");
  const phases = new Phases(ctx.clock);
  const options = { cause: "fork", memory: true, durable: false } as const;
  const snapshot = await takeState(ctx, sandbox, options, caller, phases);
  using _held = rooms.store.hold(snapshot.id);
  const others = new AbortController();
  const signal = AbortSignal.any([caller, others.signal]);
  const launches = new Latch(count);
  const results = await Promise.all(
    Array.from({ length: count }, async (_, index): Promise<ForkResult> => {
      using launched = launches.one();
      try {
        const view = await rooms.creator.bring(
          {
            record: childOf(ctx, sandbox.record, snapshot, timeoutMs),
            source: { template: sandbox.template, snapshot },
            cause: "fork",
            fork: { index, seed: newSeed() },
            spares: false,
            timeoutMs,
            // A guest that takes its identity keeps a processor busy, which its siblings need to get there at all.
            launched: async () => {
              launched[Symbol.dispose]();
              await launches.all;
            },
          },
          signal,
        );
        return { view };
      } catch (e) {
        if (atomic && !others.signal.aborted)
          others.abort(new AenvError("CANCELLED", "another child of the fork failed", { cause: e }));
        return { error: AenvError.from(e, `fork sandbox ${sandbox.id}`) };
      }
    }),
  );
  ctx.config.onOperation?.(phases.timing("fork", sandbox.id));
  if (caller.aborted) {
    // Nobody learns of the children that are there.
    await Promise.all(results.map((r) => undo(rooms.registry, r)));
    throw AenvError.from(caller.reason, `fork sandbox ${sandbox.id}`);
  }
  if (!atomic || results.every((r) => "view" in r)) return results;
  return await Promise.all(results.map((r) => undo(rooms.registry, r)));
}

/** Resolves when each of `count` has been disposed. */
class Latch {
  readonly #all = Promise.withResolvers<void>();
  #left: number;

  constructor(count: number) {
    this.#left = count;
  }

  get all(): Promise<void> {
    return this.#all.promise;
  }

  one(): Disposable {
    let open = true;
    return {
      [Symbol.dispose]: () => {
        if (open && --this.#left === 0) this.#all.resolve();
        open = false;
      },
    };
  }
}

async function undo(registry: Registry, result: ForkResult): Promise<ForkResult> {
  if ("error" in result) return result;
  await registry.live.get(result.view.sandboxId)?.kill("fork-failed");
  return { error: new AenvError("CANCELLED", "another child of the fork failed: all of them were ended") };
}

/** A sandbox of its own with everything that its source was given. */
function childOf(ctx: Context, source: SandboxRecord, snapshot: SnapshotRecord, timeoutMs: number): SandboxRecord {
  const now = ctx.clock.now();
  const { run: _run, endedAt: _endedAt, cause: _cause, ...rest } = source;
  return {
    ...rest,
    id: newSandboxId(ctx.config.node),
    snapshot: snapshot.id,
    state: "creating",
    interrupted: false,
    startedAt: now,
    endAt: now + timeoutMs,
    timeoutMs,
  };
}

/** 63 random bits: fits every signed integer that a program may parse it into. */
function newSeed(): string {
  return (randomBytes(8).readBigUInt64BE() >> 1n).toString();
}
