/** Snapshots that leave the node for a store and come to it from one. */
import { randomBytes } from "node:crypto";
import { chmod, chown, mkdir, rm, stat } from "node:fs/promises";
import { join } from "node:path";
import {
  AenvError,
  bytes,
  type LayerId,
  type MemoryId,
  newTemplateId,
  parseLayerId,
  parseMemoryId,
  parseSnapshotId,
} from "@aenv/base";
import {
  type PublishFile,
  openStore,
  readStub,
  type SnapshotManifest,
  type SnapshotRepository,
  storedAlready,
  type StoredBlob,
  writeStub,
} from "@aenv/block";
import { publishFile, syncPath } from "@aenv/host";
import {
  DEFAULT_TEAM,
  type LayerRecord,
  type MemoryFileRecord,
  SNAPSHOT_CAUSES,
  type SnapshotRecord,
} from "@aenv/state";
import { z } from "zod";
import type { Context } from "./context.ts";
import { checkDisk } from "./disk-reserve.ts";
import { flatOwner, hasMemory } from "./memory-stack.ts";
import type { TemplateStore } from "./templates.ts";
import type { TemplateView } from "./types.ts";

const TEMPLATE_NAME = /^[a-z0-9][a-z0-9._-]{0,62}$/;
const positive = z.number().int().positive();

/** What a snapshot is, in the manifest of a store. Ids are those of the node that made it. */
const movedSchema = z.object({
  v: z.literal(1),
  name: z.string().max(128),
  cause: z.enum(SNAPSHOT_CAUSES),
  machine: z.object({ vcpus: positive, memoryBytes: positive, cmdline: z.string().max(4096) }),
  diskBytes: positive,
  deviceCrc: z.number().int().optional(),
  memory: z
    .array(z.object({ id: z.string(), kind: z.enum(["flat", "delta"]), bytes: z.number().int().nonnegative() }))
    .max(512),
  layers: z.array(z.object({ id: z.string() })).max(255),
  defaults: z.object({
    user: z.string().max(256),
    workdir: z.string().max(4096),
    envVars: z.record(z.string(), z.string()),
  }),
  envdVersion: z.string().max(64),
  /** What the captured guest's agent still asks for. Its memory holds it, too. */
  token: z.string().max(256).optional(),
  createdAt: z.number().int(),
});
type Moved = z.infer<typeof movedSchema>;

export interface PublishedView {
  snapshotId: string;
  name: string;
  publishedAt: number;
  bytes: number;
}

export interface FetchOptions {
  /** The name of the template that the snapshot becomes; default: its own. */
  name?: string;
  /** Address of the repository's store: layers stay there and are read when they are needed. Without it all is fetched. */
  lazyFrom?: string;
  signal: AbortSignal;
  onProgress?: (done: number, total: number) => void;
}

export class Mover {
  readonly #ctx: Context;
  readonly #store: TemplateStore;

  constructor(ctx: Context, store: TemplateStore) {
    this.#ctx = ctx;
    this.#store = store;
  }

  /** Puts the state of a template or kept snapshot into a repository. Again is fine. */
  async publish(
    repository: SnapshotRepository,
    nameOrId: string,
    o: Pick<FetchOptions, "signal" | "onProgress">,
  ): Promise<SnapshotManifest> {
    const { template, snapshot } = this.#store.source(nameOrId);
    using held = new DisposableStack();
    for (const { id } of [snapshot, ...snapshot.layers, ...snapshot.memory]) held.use(this.#store.hold(id));
    const { machine, memory, layers, defaults, diskBytes, deviceCrc, envdVersion, cause, createdAt } = snapshot;
    const token = this.#ctx.tokens.captured(snapshot);
    const record: Moved = {
      v: 1,
      ...(token === undefined ? {} : { token }),
      name: template.name,
      cause,
      machine: { vcpus: machine.vcpus, memoryBytes: machine.memoryBytes, cmdline: machine.cmdline },
      diskBytes,
      ...(deviceCrc === undefined ? {} : { deviceCrc }),
      memory: memory.map(({ id, kind, bytes: n }) => ({ id, kind, bytes: n })),
      layers: layers.map(({ id }) => ({ id })),
      defaults,
      envdVersion,
      createdAt,
    };
    const files: PublishFile[] = [
      { name: "kernel", path: machine.kernel, encoding: "plain" },
      { name: "initrd", path: machine.initrd, encoding: "plain" },
      ...(hasMemory(snapshot) ? [{ name: "device", path: snapshot.devicePath, encoding: "plain" } as const] : []),
      ...memory.map(
        (m) => ({ name: `memory/${m.id}`, path: m.path, encoding: m.kind === "flat" ? "sparse" : "zfile" }) as const,
      ),
    ];
    for (const l of layers) files.push(await layerFile(l, o.signal));
    return await withScratch(this.#ctx, (scratch) =>
      repository.publish({
        id: snapshot.id,
        record,
        files,
        scratch,
        signal: o.signal,
        ...(o.onProgress ? { onProgress: o.onProgress } : {}),
      }),
    );
  }

  /** What a manifest says; CORRUPT for one that is not of a node. */
  describe(m: SnapshotManifest): PublishedView {
    const { name } = parseMoved(m);
    return { snapshotId: m.id, name, publishedAt: m.publishedAt, bytes: m.blobs.reduce((n, b) => n + b.bytes, 0) };
  }

  /** Makes a template of this node out of a published snapshot. */
  async fetch(repository: SnapshotRepository, id: string, o: FetchOptions): Promise<TemplateView> {
    const { state } = this.#ctx;
    const manifest = await repository.get(id, o.signal);
    const moved = parseMoved(manifest);
    const name = this.#freeName(o.name ?? moved.name, o.name === undefined, manifest.id);
    checkDisk(this.#ctx, "fetching a snapshot");
    const snapshotId = parseSnapshotId(manifest.id);
    using held = new DisposableStack();
    for (const l of moved.layers) held.use(this.#store.hold(parseLayerId(l.id)));
    for (const f of moved.memory) held.use(this.#store.hold(parseMemoryId(f.id)));
    held.use(this.#store.hold(snapshotId));
    if (!state.snapshots.get(snapshotId)) {
      const fetcher = new Fetcher(this.#ctx, repository, manifest, o);
      const record = await fetcher.all(moved);
      o.signal.throwIfAborted();
      state.durable(() => {
        if (state.snapshots.get(snapshotId)) return;
        state.snapshots.add(record);
        if (moved.token !== undefined) this.#ctx.tokens.keepCaptured(snapshotId, moved.token);
      });
    }
    const now = this.#ctx.clock.now();
    const before = state.templates.byName(DEFAULT_TEAM, name);
    state.durable(() =>
      state.templates.put({
        id: before?.id ?? newTemplateId(),
        team: DEFAULT_TEAM,
        name,
        public: false,
        snapshot: snapshotId,
        createdAt: before?.createdAt ?? now,
        updatedAt: now,
        spawnCount: before?.spawnCount ?? 0,
        buildCount: 1,
      }),
    );
    return this.#store.view(this.#store.source(name).template);
  }

  /** A name that no other snapshot has. One that was not asked for gives way to the snapshot's id. */
  #freeName(wanted: string, mayChange: boolean, id: string): string {
    const taken = (name: string): boolean => {
      const found = this.#store.find(name);
      return found !== undefined && found.snapshot !== id;
    };
    const valid = TEMPLATE_NAME.test(wanted);
    if (valid && !taken(wanted)) return wanted;
    if (mayChange) return id;
    if (!valid)
      throw new AenvError("INVALID_ARGUMENT", `${JSON.stringify(wanted.slice(0, 100))} is not a name for a template`);
    throw new AenvError("CONFLICT", `this node has a template ${wanted} already`, {
      hint: "Choose another name, or delete that template.",
    });
  }
}

/** A folder for the time of `fn`. What a crash leaves of one goes at the next start. */
export async function withScratch<T>(ctx: Context, fn: (dir: string) => Promise<T>): Promise<T> {
  const dir = join(ctx.paths.exchange, randomBytes(8).toString("hex"));
  await mkdir(dir, { recursive: true, mode: 0o700 });
  try {
    return await fn(dir);
  } finally {
    await rm(dir, { recursive: true, force: true });
  }
}

async function layerFile(l: LayerRecord, signal: AbortSignal): Promise<PublishFile> {
  const name = `layer/${l.id}`;
  const stub = readStub(l.path);
  if (!stub) return { name, path: l.path, encoding: "zfile" };
  return { name, encoding: "zfile", encoded: storedAlready(stub, await openStore(stub.store), signal) };
}

/** The files of one snapshot, made here. Those that are here already, by id, are taken as they are. */
class Fetcher {
  readonly #ctx: Context;
  readonly #repository: SnapshotRepository;
  readonly #blobs: Map<string, StoredBlob>;
  readonly #id: string;
  readonly #options: FetchOptions;
  readonly #total: number;
  #done = 0;

  constructor(ctx: Context, repository: SnapshotRepository, manifest: SnapshotManifest, options: FetchOptions) {
    this.#ctx = ctx;
    this.#repository = repository;
    this.#id = manifest.id;
    this.#options = options;
    this.#blobs = new Map(manifest.blobs.map((b) => [b.name, b]));
    this.#total = manifest.blobs.reduce((n, b) => n + b.bytes, 0);
  }

  async all(moved: Moved): Promise<SnapshotRecord> {
    const { paths, clock } = this.#ctx;
    const id = parseSnapshotId(this.#id);
    const [kernel, initrd] = [await this.#shared("kernel"), await this.#shared("initrd")];
    const memory: MemoryFileRecord[] = [];
    for (const m of moved.memory) memory.push(await this.#memory(parseMemoryId(m.id), m));
    const layers: LayerRecord[] = [];
    for (const l of moved.layers) layers.push(await this.#layer(parseLayerId(l.id)));
    const devicePath = join(paths.snapshotDir(id), "device");
    await mkdir(paths.snapshotDir(id), { recursive: true, mode: 0o711 });
    if (memory.length > 0) {
      await this.#fetch("device", devicePath);
      await chmod(devicePath, 0o600);
    }
    const record: SnapshotRecord = {
      id,
      cause: moved.cause,
      machine: { ...moved.machine, memoryBytes: bytes(moved.machine.memoryBytes), kernel, initrd },
      devicePath,
      ...(moved.deviceCrc === undefined ? {} : { deviceCrc: moved.deviceCrc }),
      memory,
      diskBytes: bytes(moved.diskBytes),
      layers,
      defaults: moved.defaults,
      envdVersion: moved.envdVersion,
      createdAt: clock.now(),
    };
    await publishFile(paths.manifest(id), `${JSON.stringify({ v: 1, ...record }, undefined, 2)}\n`);
    for (const dir of [paths.snapshots, paths.layers, paths.memory]) await syncPath(dir);
    return record;
  }

  /** Kernel and initramfs, which many snapshots have the same. */
  async #shared(name: string): Promise<string> {
    const blob = this.#blob(name);
    const path = join(this.#ctx.paths.images, `fetched-${blob.sha256.slice(0, 32)}`);
    await mkdir(this.#ctx.paths.images, { recursive: true });
    const there = await stat(path).catch(() => undefined);
    if (there?.size === blob.contentBytes) this.#progress(blob);
    else {
      await this.#fetch(name, path);
      await chmod(path, 0o644);
    }
    return path;
  }

  async #memory(id: MemoryId, { kind, bytes: n }: Moved["memory"][number]): Promise<MemoryFileRecord> {
    const known = this.#ctx.state.memory.get(id);
    if (known) {
      this.#progress(this.#blob(`memory/${id}`));
      return known;
    }
    const dir = this.#ctx.paths.memoryDir(id);
    const path = join(dir, kind);
    await mkdir(dir, { recursive: true, mode: 0o711 });
    await this.#fetch(`memory/${id}`, path);
    if (kind === "flat") {
      const { uid, gid } = flatOwner(this.#ctx);
      await chown(path, uid, gid);
      await chmod(path, 0o440);
    } else await chmod(path, 0o600);
    return { id, path, kind, bytes: n, createdAt: this.#ctx.clock.now() };
  }

  async #layer(id: LayerId): Promise<LayerRecord> {
    const { state, paths, clock } = this.#ctx;
    const name = `layer/${id}`;
    const known = state.layers.get(id);
    if (known) {
      this.#progress(this.#blob(name));
      return known;
    }
    const path = paths.layerFile(id);
    await mkdir(paths.layerDir(id), { recursive: true, mode: 0o700 });
    const { lazyFrom } = this.#options;
    const blob = this.#blob(name);
    if (lazyFrom === undefined || blob.encoding !== "zfile") await this.#fetch(name, path);
    else {
      await writeStub(path, { store: lazyFrom, ...blob });
      this.#progress(blob);
    }
    await chmod(path, 0o600);
    return { id, path, bytes: (await stat(path)).size, createdAt: clock.now() };
  }

  async #fetch(name: string, path: string): Promise<void> {
    const blob = this.#blob(name);
    await this.#repository.fetch(blob, path, this.#options.signal);
    this.#progress(blob);
  }

  #progress(blob: StoredBlob): void {
    this.#done += blob.bytes;
    this.#options.onProgress?.(this.#done, this.#total);
  }

  #blob(name: string): StoredBlob {
    const blob = this.#blobs.get(name);
    if (blob) return blob;
    throw new AenvError("CORRUPT", `the published snapshot ${this.#id} has no ${name}`, {
      hint: "Publish it again.",
    });
  }
}

function parseMoved(m: SnapshotManifest): Moved {
  const parsed = movedSchema.safeParse(m.record);
  if (!parsed.success || !/^s[a-z0-9]{16}$/.test(m.id))
    throw new AenvError("CORRUPT", `the published snapshot ${m.id} is not one of a node`, { cause: parsed.error });
  return parsed.data;
}
