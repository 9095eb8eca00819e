/** A template: a cold boot over a base layer, primed and captured. */
import { chmod, chown, open } from "node:fs/promises";
import { AenvError, deadline, messageOf, newTemplateId, randomName } from "@aenv/base";
import { run as runTool, syncDir } from "@aenv/host";
import { DEFAULT_TEAM, type LayerRecord, type SnapshotRecord, type TemplateRecord } from "@aenv/state";
import { capture, commitTarget, discardTarget, makeTarget, type MemoryStrategy } from "./capture.ts";
import type { Context } from "./context.ts";
import { initRun } from "./launch.ts";
import { Phases } from "./phases.ts";
import { VmRun } from "./run.ts";
import type { TemplateStore } from "./templates.ts";
import type { BuildTemplateOptions } from "./types.ts";

/** Kernel, init and agent under emulation on a busy machine; 2 s alone. */
const BOOT_DEADLINE_MS = 60_000;
const PRIME_DEADLINE_MS = 300_000;
const NAME = /^[a-z0-9][a-z0-9._-]{0,62}$/;

/** A first boot writes its memory straight into the file: it only has to be kept. */
function memoryAsIs(memoryGid: number): MemoryStrategy {
  return {
    whileStopped: () => Promise.resolve(),
    async afterwards(_run, target, signal) {
      await runTool("fallocate", ["--dig-holes", target.memoryPath], { signal });
      // Shared by every sandbox of the template: a VMM reads it by its group and nobody writes it.
      await chown(target.memoryPath, 0, memoryGid);
      await chmod(target.memoryPath, 0o440);
      await chown(target.dir, 0, 0);
      for (const path of [target.memoryPath, target.devicePath]) await syncFile(path);
      await syncDir(target.dir);
    },
  };
}

export async function buildTemplate(
  ctx: Context,
  store: TemplateStore,
  options: BuildTemplateOptions,
  parent: AbortSignal,
): Promise<{ template: TemplateRecord; snapshot: SnapshotRecord; replaced?: SnapshotRecord["id"] }> {
  if (!NAME.test(options.name))
    throw new AenvError(
      "INVALID_ARGUMENT",
      `a template name is of ${NAME.source}, not ${JSON.stringify(options.name)}`,
    );
  using _base = store.hold(options.baseLayer.id);
  const base = await baseRecord(ctx, options.baseLayer);
  const phases = new Phases(ctx.clock);
  const step = async <T>(name: string, text: string, fn: () => Promise<T>): Promise<T> => {
    options.onStep?.(text);
    return await phases.time(name, fn);
  };
  const run = await step("resources", "reserving network and disk", () =>
    VmRun.make(
      ctx,
      {
        purpose: "build",
        owner: options.name,
        snapshot: undefined,
        machine: options.machine,
        layers: [base],
        diskBytes: options.sizeBytes,
      },
      phases,
      parent,
    ),
  );
  await using cleanup = new AsyncDisposableStack();
  cleanup.defer(() => run.release());
  const target = await makeTarget(ctx, run);
  using _snapshot = store.hold(target.snapshot);
  using _layer = store.hold(target.layer);
  await using undo = new AsyncDisposableStack();
  undo.defer(() => discardTarget(ctx, run, target));

  const defaults: SnapshotRecord["defaults"] = {
    user: options.defaultUser ?? "user",
    workdir: options.defaultWorkdir ?? "",
    envVars: options.envVars ?? {},
  };
  await step("boot", "booting the template's virtual machine", async () => {
    const signal = deadline(BOOT_DEADLINE_MS, parent);
    // The VMM makes the memory file as its own user.
    await chown(target.dir, run.slot.uid, run.slot.gid);
    await ctx.step("boot:before");
    run.setVm(await ctx.driver.boot(run.spec({ file: target.memoryPath, mode: "create" }), signal));
    await ctx.step("boot:after");
    await untilReady(run, signal);
  });
  await step("init", "setting up the guest", () =>
    initRun(
      ctx,
      run,
      {
        sandboxId: `build${randomName(11)}`,
        templateId: options.name,
        envVars: {},
        accessToken: "",
        defaults,
        cause: "boot",
      },
      BOOT_DEADLINE_MS,
      parent,
    ),
  );
  await step("prime", "running the prime commands", () => prime(run, options.prime ?? [], parent));
  options.onStep?.("capturing");
  const snapshot = await capture(
    ctx,
    run,
    target,
    {
      memory: memoryAsIs(ctx.config.memoryGid),
      after: "kill",
      cause: "build",
      sandbox: undefined,
      parent: undefined,
      layers: [base],
      diskBytes: options.sizeBytes,
      defaults,
      envdVersion: ctx.config.envdVersion,
    },
    phases,
    parent,
  );
  const done = commit(ctx, run, snapshot, options);
  undo.move();
  ctx.logger.info({ template: done.template.id, name: options.name, phases: phases.phases }, "template built");
  return done;
}

/** What the guest printed last is what explains a boot that came to nothing. */
async function untilReady(run: VmRun, signal: AbortSignal): Promise<void> {
  const died = diedSignal(run);
  try {
    await run.guest.waitReady(AbortSignal.any([signal, died]));
  } catch (e) {
    throw new AenvError("GUEST_FAILED", `the guest did not come up: ${messageOf(e)}`, {
      cause: e,
      data: { console: await run.consoleTail() },
      hint: "What its console said last is in the server log.",
    });
  }
}

async function prime(run: VmRun, commands: readonly (readonly string[])[], parent: AbortSignal): Promise<void> {
  const signal = AbortSignal.any([deadline(PRIME_DEADLINE_MS, parent), diedSignal(run)]);
  // Everything is on the disk before the capture: a launched guest starts with nothing to write back.
  for (const [cmd = "", ...args] of [...commands, ["/bin/sync"]]) {
    const result = await run.guest.exec({ cmd, args, user: "root" }, signal);
    if (result.exitCode !== 0)
      throw new AenvError("INVALID_ARGUMENT", `prime command ${cmd} ended with ${result.exitCode}`, {
        data: { stderr: result.stderr.slice(-2000), stdout: result.stdout.slice(-2000) },
        hint: "Correct the command or the image.",
      });
  }
}

/** Aborts when the VM of the run ends. */
function diedSignal(run: VmRun): AbortSignal {
  const died = new AbortController();
  void run.vm.exited.then((exit) =>
    died.abort(new AenvError("GUEST_FAILED", `the virtual machine ended: ${exit.cause}: ${exit.detail}`)),
  );
  return died.signal;
}

/** The last step: before it the template does not exist, after it it is whole. */
function commit(
  ctx: Context,
  run: VmRun,
  snapshot: SnapshotRecord,
  options: BuildTemplateOptions,
): { template: TemplateRecord; snapshot: SnapshotRecord; replaced?: SnapshotRecord["id"] } {
  const { state, clock } = ctx;
  return state.durable(() => {
    const team = options.team ?? DEFAULT_TEAM;
    const before = state.templates.byName(team, options.name);
    const now = clock.now();
    const template: TemplateRecord = {
      id: before?.id ?? newTemplateId(),
      team,
      name: options.name,
      public: true,
      createdAt: before?.createdAt ?? now,
      spawnCount: before?.spawnCount ?? 0,
      updatedAt: now,
      snapshot: snapshot.id,
      buildCount: (before?.buildCount ?? 0) + 1,
    };
    commitTarget(ctx, run, snapshot);
    state.templates.put(template);
    return { template, snapshot, ...(before === undefined ? {} : { replaced: before.snapshot }) };
  });
}

/** The layer a template stands on, recorded so that it has an owner. */
async function baseRecord(ctx: Context, layer: BuildTemplateOptions["baseLayer"]): Promise<LayerRecord> {
  const known = ctx.state.layers.get(layer.id);
  if (known) return known;
  const bytes = await fileBytes(layer.path);
  const record: LayerRecord = { id: layer.id, path: layer.path, bytes, createdAt: ctx.clock.now() };
  ctx.state.durable(() => ctx.state.layers.add(record));
  return record;
}

async function fileBytes(path: string): Promise<number> {
  const file = await open(path, "r");
  try {
    return (await file.stat()).size;
  } finally {
    await file.close();
  }
}

async function syncFile(path: string): Promise<void> {
  const file = await open(path, "r");
  try {
    await file.sync();
  } finally {
    await file.close();
  }
}
