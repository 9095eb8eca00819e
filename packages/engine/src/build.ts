/** A template: a cold boot over a base layer, primed and captured. */
import { chmod, chown, open, stat } from "node:fs/promises";
import { AenvError, deadline, newTemplateId, randomName } from "@aenv/base";
import { run as runTool, syncPath } from "@aenv/host";
import { DEFAULT_TEAM, type LayerRecord, type SnapshotRecord, type TemplateRecord } from "@aenv/state";
import { capture, type CaptureTarget, discardTarget, makeTarget, type MemoryStrategy } from "./capture.ts";
import type { Context } from "./context.ts";
import { checkDisk } from "./disk-reserve.ts";
import { BOOT_DEADLINE_MS, diedSignal, initRun, untilReady } from "./launch.ts";
import { Phases } from "./phases.ts";
import { VmRun } from "./run.ts";
import type { TemplateStore } from "./templates.ts";
import type { BuildTemplateOptions } from "./types.ts";

const PRIME_DEADLINE_MS = 300_000;
const NAME = /^[a-z0-9][a-z0-9._-]{0,62}$/;

/** A first boot writes its memory straight into the file: it only has to be kept. */
function memoryAsIs(ctx: Context, target: CaptureTarget): MemoryStrategy {
  return {
    kind: "flat",
    prepare: async () => {},
    whileStopped: async () => {},
    async afterwards(_durable, signal) {
      await runTool("fallocate", ["--dig-holes", target.memoryPath], { signal });
      // Shared by every sandbox of the template: a VMM reads it by its group and nobody writes it.
      await chown(target.memoryPath, 0, ctx.config.memoryGid);
      await chmod(target.memoryPath, 0o440);
      await chown(target.memoryDir, 0, 0);
      for (const path of [target.memoryPath, target.devicePath]) await syncFile(path);
      for (const dir of [target.dir, target.memoryDir]) await syncPath(dir);
      const { blocks } = await stat(target.memoryPath);
      return [
        {
          id: target.memory,
          path: target.memoryPath,
          kind: "flat",
          bytes: blocks * STAT_BLOCK_BYTES,
          createdAt: ctx.clock.now(),
        },
      ];
    },
    release: () => {},
    discard: async () => {},
  };
}
/** Of st_blocks, whatever the file system's own is. */
const STAT_BLOCK_BYTES = 512;

export interface Built {
  template: TemplateRecord;
  replaced?: SnapshotRecord["id"];
}

export async function buildTemplate(
  ctx: Context,
  store: TemplateStore,
  options: BuildTemplateOptions,
  parent: AbortSignal,
): Promise<Built> {
  if (!NAME.test(options.name))
    throw new AenvError(
      "INVALID_ARGUMENT",
      `a template name is of ${NAME.source}, not ${JSON.stringify(options.name)}`,
    );
  checkDisk(ctx, "no template is built");
  using _base = store.hold(options.baseLayer.id);
  store.used(options.baseLayer.id);
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
  const target = { ...(await makeTarget(ctx, run, "flat")), runEnds: true };
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
    await chown(target.memoryDir, run.slot.uid, run.slot.gid);
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
  let done: Built | undefined;
  await capture(
    ctx,
    run,
    {
      memory: memoryAsIs(ctx, target),
      after: "kill",
      builds: true,
      cause: "build",
      sandbox: undefined,
      diskBytes: options.sizeBytes,
      defaults,
      envdVersion: ctx.config.envdVersion,
      durable: true,
      commit: (snapshot) => (done = commitTemplate(ctx, snapshot, options)),
    },
    phases,
    parent,
    target,
  );
  if (!done) throw new AenvError("INTERNAL", "a capture ended without a commit");
  undo.move();
  ctx.logger.info({ template: done.template.id, name: options.name, phases: phases.phases }, "template built");
  return done;
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

/** The last step: before it the template does not exist, after it it is whole. */
/** Part of the capture's transaction. */
function commitTemplate(ctx: Context, snapshot: SnapshotRecord, options: BuildTemplateOptions): Built {
  const { state, clock } = ctx;
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
  state.templates.put(template);
  return { template, ...(before === undefined ? {} : { replaced: before.snapshot }) };
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
