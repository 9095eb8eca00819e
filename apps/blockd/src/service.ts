import { randomUUID } from "node:crypto";
import { existsSync } from "node:fs";
import { availableParallelism } from "node:os";
import { join } from "node:path";
import { isDeepStrictEqual } from "node:util";
import { AenvError, KeyedMutex, type Logger, messageOf, randomName, sleep, TaskGroup } from "@aenv/base";
import {
  type CacheStats,
  type DiskSpec,
  importRaw,
  type LayerInfo,
  type LayerRef,
  type LoadPieces,
  mergeLayers,
  type PingInfo,
  readStub,
  RemoteLayers,
} from "@aenv/block";
import { procIdentity } from "@aenv/host";
import { LayerTable } from "./layers.ts";
import type { Sealed } from "./protocol.ts";
import { type DiskRecord, Records } from "./records.ts";
import { newestGeneration, removeUppers, settleSeal, upperFiles } from "./uppers.ts";
import { DiskWorker } from "./workers.ts";

const RECOVER_PAUSE_MS = 1000;
const RECOVER_WAIT_MS = 5000;

interface Restack {
  from: readonly LayerRef[];
  to: readonly LayerRef[];
  same: boolean;
}

/** A change that takes longer than this is not waited for by who asks what there is. */
const LIST_WAIT_MS = 10_000;

interface OpenDisk {
  record: DiskRecord;
  worker: DiskWorker;
}

export interface ServiceOptions {
  /** Folder of the disk records. */
  stateDir: string;
  /** Folder, on the file system of the disks' sockets, that only we can write. */
  socketDir: string;
  logger: Logger;
  /** Of layers that are in stores. */
  cache: { dir: string; bytes: number; loadMs?: number };
  workers?: number;
  onCrash: (e: Error) => void;
}

/** The control side of blockd: which disks there are, where they are, and every change to that. */
export class BlockService {
  readonly #options: ServiceOptions;
  readonly #records: Records;
  readonly #remote: RemoteLayers;
  readonly #layers: LayerTable;
  readonly #workers: DiskWorker[];
  readonly #disks = new Map<string, OpenDisk>();
  readonly #locks = new KeyedMutex();
  readonly #changing = new Set<Promise<unknown>>();
  readonly #epoch = randomUUID();
  readonly #tasks: TaskGroup;

  constructor(options: ServiceOptions) {
    this.#options = options;
    this.#records = new Records(options.stateDir);
    const count = options.workers ?? availableParallelism();
    const { logger, onCrash } = options;
    const remote = new RemoteLayers(options.cache, logger);
    this.#remote = remote;
    this.#layers = new LayerTable(remote);
    this.#tasks = new TaskGroup((task, e) => logger.error({ task, error: messageOf(e) }, "a task failed"));
    const load: LoadPieces = (blob, from, to) => remote.load(blob, from, to);
    this.#workers = Array.from({ length: count }, () => new DiskWorker(logger, load, onCrash));
  }

  /**
   * Opens again every disk of an earlier process. One that fails is logged and left as it is; one whose store is slow or
   * away is not waited for long, and tried again in the background while its guest waits.
   */
  async recover(): Promise<void> {
    const { logger } = this.#options;
    await Promise.all(
      this.#records.load(logger).map(async (record) => {
        const { disk } = record.spec;
        try {
          const settled = settleSeal(record);
          if (!settled.layers.some(({ path }) => isStub(path))) return await this.#open(settled);
          const tried = this.#recoverLater(settled);
          await Promise.race([tried, sleep(RECOVER_WAIT_MS)]);
        } catch (e) {
          logger.error({ disk, error: messageOf(e) }, "disk could not be opened again");
        }
      }),
    );
    logger.info({ disks: this.#disks.size }, "disks are open");
  }

  /** Resolves after the first try. */
  #recoverLater(record: DiskRecord): Promise<void> {
    const { disk } = record.spec;
    const tried = Promise.withResolvers<void>();
    this.#tasks.spawn(`opening disk ${disk} again`, async (signal) => {
      for (;;) {
        try {
          // A disk that was closed meanwhile has no record any more.
          return await this.#locks.run(disk, async () => {
            if (this.#records.has(disk) && !this.#disks.has(disk)) await this.#open(record);
          });
        } catch (e) {
          this.#options.logger.warn({ disk, error: messageOf(e) }, "disk could not be opened again yet");
          if (!AenvError.from(e, "open").retry) throw e;
          tried.resolve();
          await sleep(RECOVER_PAUSE_MS, signal);
        } finally {
          tried.resolve();
        }
      }
    });
    return tried.promise;
  }

  ping(): PingInfo {
    const identity = procIdentity(process.pid);
    if (!identity) throw new AenvError("INTERNAL", "/proc is not readable");
    return { identity, epoch: this.#epoch, disks: this.#disks.size };
  }

  /** Of the cache; undefined while no layer of a store was used. */
  get cacheStats(): CacheStats | undefined {
    return this.#remote.stats;
  }

  /** As they are after what is under way now: its caller may be dead, and the next one would sweep what it leads to. */
  async list(): Promise<DiskSpec[]> {
    await Promise.race([Promise.allSettled(this.#changing), sleep(LIST_WAIT_MS)]);
    return [...this.#disks.values()].map(({ record }) => ({ ...record.spec, layers: record.layers }));
  }

  create(spec: DiskSpec): Promise<void> {
    return this.#change(spec.disk, async () => {
      const open = this.#disks.get(spec.disk);
      if (open) {
        if (isDeepStrictEqual(open.record.spec, spec)) return;
        throw new AenvError("CONFLICT", `disk ${spec.disk} is open with another specification`);
      }
      const generation = newestGeneration(spec.upperDir);
      const record: DiskRecord = { version: 1, spec, layers: spec.layers, generation, creating: true };
      this.#records.put(record);
      try {
        await this.#open(record);
      } catch (e) {
        this.#records.delete(spec.disk);
        throw e;
      }
    });
  }

  /** Other layers beneath a disk: one that nothing was written to yet, or layers that read the same. */
  restack(disk: string, { from, to: layers, same }: Restack): Promise<void> {
    return this.#change(disk, async () => {
      const open = this.#disks.get(disk);
      if (!open) throw new AenvError("NOT_FOUND", `disk ${disk} is not open`);
      const { record, worker } = open;
      if (isDeepStrictEqual(record.layers, layers)) return;
      if (!isDeepStrictEqual(record.layers, from))
        throw new AenvError("CONFLICT", `disk ${disk} stands on other layers than the caller thinks`);
      const next = { ...record, spec: { ...record.spec, layers: [...layers] }, layers: [...layers] };
      const stack = await this.#layers.acquire(layers);
      try {
        this.#records.put(next);
        await worker.call("restack", { disk, stack, written: same });
      } catch (e) {
        this.#records.put(record);
        this.#layers.release(layers);
        throw e;
      }
      open.record = next;
      this.#layers.release(record.layers);
    });
  }

  seal(disk: string, target: LayerRef): Promise<LayerInfo> {
    return this.#change(disk, async () => {
      const open = this.#disks.get(disk);
      if (!open) throw new AenvError("NOT_FOUND", `disk ${disk} is not open`);
      const { record, worker } = open;
      const done = isDeepStrictEqual(record.layers.at(-1), target) ? this.#layers.info(target.path) : undefined;
      if (done) return { ...target, ...done };
      if (this.#layers.isOpen(target.path) || existsSync(target.path)) {
        throw new AenvError("CONFLICT", `${target.path} exists already`);
      }
      const generation = record.generation + 1;
      this.#records.put({ ...record, sealing: target });
      let sealed: Sealed;
      try {
        const nextUpper = upperFiles(record.spec.upperDir, generation);
        sealed = await worker.call("seal", { disk, target, nextUpper });
      } catch (e) {
        this.#note(record);
        throw e;
      }
      this.#layers.pushed(record.layers, target, sealed);
      open.record = { ...record, layers: [...record.layers, target], generation };
      this.#note(open.record);
      await worker.call("thaw", { disk });
      return { ...target, bytes: sealed.bytes, extents: sealed.extents };
    });
  }

  close(disk: string, deleteUpper: boolean): Promise<void> {
    return this.#locks.run(disk, async () => {
      const open = this.#disks.get(disk);
      if (!open) {
        // A disk that could not be opened again has a record only.
        this.#records.delete(disk);
        return;
      }
      await open.worker.call("close", { disk });
      open.worker.disks--;
      this.#disks.delete(disk);
      this.#layers.release(open.record.layers);
      if (deleteUpper) removeUppers(open.record.spec.upperDir);
      this.#records.delete(disk);
    });
  }

  /** Given up, with nothing left, when the signal aborts. */
  merge(layers: readonly LayerRef[], target: LayerRef): Promise<LayerInfo> {
    return mergeLayers(
      layers.map((l) => l.path),
      target,
    );
  }

  importRaw(rawPath: string, target: LayerRef, signal: AbortSignal): Promise<LayerInfo> {
    return importRaw(rawPath, target, signal);
  }

  /** Answers what is in flight and closes; the disks come back with the next start. */
  async stop(): Promise<void> {
    await this.#tasks.close();
    await Promise.all(this.#workers.map((w) => w.end()));
    await this.#remote[Symbol.asyncDispose]();
  }

  async #change<T>(disk: string, fn: () => Promise<T>): Promise<T> {
    const change = this.#locks.run(disk, fn);
    this.#changing.add(change);
    try {
      return await change;
    } finally {
      this.#changing.delete(change);
    }
  }

  /** The record before it says enough for the next start to find out the same: a full disk must not stop a guest's. */
  #note(record: DiskRecord): void {
    try {
      this.#records.put(record);
    } catch (e) {
      this.#options.logger.warn(
        { disk: record.spec.disk, error: messageOf(e) },
        "disk record was not brought up to date",
      );
    }
  }

  async #open(record: DiskRecord): Promise<void> {
    const { spec, layers, generation } = record;
    const stack = await this.#layers.acquire(layers);
    const worker = this.#workers.reduce((a, b) => (b.disks < a.disks ? b : a));
    worker.disks++;
    try {
      await worker.call("open", {
        disk: spec.disk,
        sizeBytes: spec.sizeBytes,
        durability: spec.durability ?? "process",
        stack,
        upper: upperFiles(spec.upperDir, generation),
        mayCreate: record.creating,
        socket: {
          temp: join(this.#options.socketDir, randomName(8)),
          path: spec.socketPath,
          uid: spec.socketUid,
          gid: spec.socketGid,
        },
      });
    } catch (e) {
      worker.disks--;
      this.#layers.release(layers);
      throw e;
    }
    const ready = { ...record, creating: false };
    this.#note(ready);
    this.#disks.set(spec.disk, { record: ready, worker });
  }
}

function isStub(path: string): boolean {
  try {
    return readStub(path) !== undefined;
  } catch {
    return false;
  }
}
