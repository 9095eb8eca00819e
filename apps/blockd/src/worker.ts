/** A disk worker: serves its disks over NBD. The control thread tells it what to do; it keeps no state of its own. */
import { chmodSync, copyFileSync, existsSync, lchownSync, mkdirSync, renameSync, rmSync } from "node:fs";
import { rm } from "node:fs/promises";
import { dirname } from "node:path";
import { parentPort } from "node:worker_threads";
import { AenvError, errnoOf, type Logger, messageOf } from "@aenv/base";
import { Disk, openLayer, openRemoteSource, openSource, overlay, type Stack, Upper } from "@aenv/block";
import { BufferPool, NbdServer } from "@aenv/nbd";
import { fromWire } from "./protocol.ts";
import type {
  CallName,
  FromWorker,
  Loaded,
  OpenDisk,
  Sealed,
  SealDisk,
  SharedStack,
  ToWorker,
  WorkerCalls,
} from "./protocol.ts";

interface Served {
  spec: OpenDisk;
  disk: Disk;
  server: NbdServer;
  /** What `thaw` puts in place. */
  next?: { stack: Stack; upper: Upper };
}

const port = parentPort;
if (!port) throw new Error("this file is a worker of blockd");
const say = (message: FromWorker): void => port.postMessage(message);

const log =
  (level: "debug" | "info" | "warn" | "error") =>
  (fields: Record<string, unknown>, message: string): void =>
    say({ kind: "log", level, fields, message });
const logger: Logger = { debug: log("debug"), info: log("info"), warn: log("warn"), error: log("error") };

const pool = new BufferPool();
const disks = new Map<string, Served>();

const calls: { [K in CallName]: (args: WorkerCalls[K]["args"]) => Promise<WorkerCalls[K]["result"]> } = {
  open: openDisk,
  seal: sealDisk,
  thaw: thawDisk,
  restack: restackDisk,
  async close({ disk }) {
    const served = disks.get(disk);
    if (served) await closeDisk(served);
    return undefined;
  },
  async stop() {
    await Promise.all([...disks.values()].map(closeDisk));
    return undefined;
  },
};

port.on("message", (m: ToWorker) => (m.op === "loaded" || m.op === "loadFailed" ? loaded(m) : void answer(m)));

async function answer(m: Exclude<ToWorker, Loaded>): Promise<void> {
  try {
    const call = calls[m.op] as (args: unknown) => Promise<unknown>;
    say({ kind: "done", id: m.id, result: await call(m.args) });
  } catch (e) {
    const { code, message, hint, data } = AenvError.from(e, m.op);
    say({ kind: "failed", id: m.id, error: { code, message, hint, data } });
  }
}

function find(name: string): Served {
  const served = disks.get(name);
  if (!served) throw new AenvError("NOT_FOUND", `disk ${name} is not open`);
  return served;
}

function toStack(shared: SharedStack): Stack {
  const files = shared.files.map((f) => ("fd" in f ? openSource(f) : openRemoteSource(f, loadPieces)));
  return { map: shared.map, files };
}

const loads = new Map<number, PromiseWithResolvers<() => void>>();
let nextLoad = 1;

/** Asks the control thread, which owns the cache. */
function loadPieces(blob: number, from: number, to: number): Promise<() => void> {
  const load = nextLoad++;
  const waiting = Promise.withResolvers<() => void>();
  loads.set(load, waiting);
  say({ kind: "load", load, blob, from, to });
  return waiting.promise;
}

function loaded(m: Loaded): void {
  const waiting = loads.get(m.load);
  loads.delete(m.load);
  if (m.op === "loaded") waiting?.resolve(() => say({ kind: "release", load: m.load }));
  else waiting?.reject(fromWire(m.error));
}

async function openDisk(spec: OpenDisk): Promise<undefined> {
  const { upper: files, sizeBytes, durability } = spec;
  mkdirSync(dirname(files.data), { recursive: true, mode: 0o700 });
  const create = spec.mayCreate && !existsSync(files.data);
  const upper = create ? Upper.create(files, sizeBytes, durability) : Upper.open(files, sizeBytes, durability);
  const disk = new Disk(sizeBytes, toStack(spec.stack), upper);
  const info = { name: "disk", description: `disk of ${spec.disk}`, size: sizeBytes, readOnly: false };
  const server = new NbdServer({ exports: [{ info, target: disk }], logger, pool });
  try {
    await listen(server, spec.socket);
  } catch (e) {
    await server.close();
    await disk.close();
    throw e;
  }
  disks.set(spec.disk, { spec, disk, server });
  return undefined;
}

/**
 * The socket appears under its name with owner and mode set, replacing a stale one. It is made in a folder that only we
 * can write, because its own folder belongs to the VM, which could put a link in its place.
 */
async function listen(server: NbdServer, socket: OpenDisk["socket"]): Promise<void> {
  rmSync(socket.temp, { force: true });
  await server.listen(socket.temp);
  try {
    chmodSync(socket.temp, 0o600);
    lchownSync(socket.temp, socket.uid, socket.gid);
    renameSync(socket.temp, socket.path);
  } catch (e) {
    rmSync(socket.temp, { force: true });
    throw AenvError.from(e, `placing socket ${socket.path}`);
  }
}

async function closeDisk(served: Served): Promise<void> {
  // A frozen disk would hold its clients' requests for ever.
  served.disk.thaw();
  await served.server.close();
  await served.disk.close();
  rmSync(served.spec.socket.path, { force: true });
  disks.delete(served.spec.disk);
}

async function sealDisk({ disk: name, target, nextUpper }: SealDisk): Promise<Sealed> {
  const served = find(name);
  const { disk, spec } = served;
  await disk.freeze();
  const old = disk.upper;
  let moved = false;
  let next: Upper | undefined;
  try {
    old.commit();
    old.seal();
    next = Upper.create(nextUpper, spec.sizeBytes, spec.durability);
    mkdirSync(dirname(target.path), { recursive: true });
    moveFile(old.files.data, target.path);
    moved = true;
    const layer = openLayer(target.path);
    const { stack, upperWarm: warm } = disk;
    const map = overlay(stack.map, layer.extents, stack.files.length);
    const file = { path: layer.path, fd: layer.fd, warm, form: layer.form };
    const source = openSource(file);
    served.next = { stack: { map, files: [...stack.files, source] }, upper: next };
    return { bytes: layer.bytes, extents: layer.extents.count, file, layerMap: layer.extents, map };
  } catch (e) {
    if (moved) renameSync(target.path, old.files.data);
    next?.close();
    rmSync(nextUpper.data, { force: true });
    rmSync(nextUpper.index, { force: true });
    disk.thaw();
    throw e;
  }
}

async function thawDisk({ disk }: { disk: string }): Promise<undefined> {
  const served = find(disk);
  const old = served.disk.upper;
  if (!served.next) throw new AenvError("CONFLICT", `disk ${disk} is not frozen`);
  served.disk.replace(served.next.stack, served.next.upper);
  delete served.next;
  old.close();
  // A busy file system can take long over it, and a leftover is removed with the folder of the uppers.
  void rm(old.files.index, { force: true }).catch((e: unknown) => {
    logger.warn({ file: old.files.index, error: messageOf(e) }, "an old index was not removed");
  });
  return undefined;
}

async function restackDisk({ disk: name, stack, written }: WorkerCalls["restack"]["args"]): Promise<undefined> {
  const { disk } = find(name);
  await disk.freeze();
  const { upper } = disk;
  try {
    if (!written && upper.table.mapped > 0)
      throw new AenvError("CONFLICT", `disk ${name} was written to: its layers stay`);
    // What was acknowledged and not noted yet; `replace` begins anew.
    upper.commit();
    disk.replace(toStack(stack), upper);
  } catch (e) {
    disk.thaw();
    throw e;
  }
  return undefined;
}

/** Rename; across file systems a copy, where the old name is removed only once the copy is there. */
function moveFile(from: string, to: string): void {
  try {
    renameSync(from, to);
  } catch (e) {
    if (errnoOf(e) !== "EXDEV") throw e;
    const temp = `${to}.tmp`;
    copyFileSync(from, temp);
    renameSync(temp, to);
    rmSync(from);
  }
}
