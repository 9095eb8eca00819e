import { join } from "node:path";
import type { LayerId, MemoryId, RunId, SnapshotId } from "@aenv/base";

/** Every path and host-global name of a node's runs and artifacts. */
export class Paths {
  readonly home: string;
  readonly runRoot: string;
  readonly #instance: string;

  constructor(home: string, instance: string, runRoot: string) {
    this.home = home;
    this.runRoot = runRoot;
    this.#instance = instance;
  }

  get runDirs(): string {
    return join(this.runRoot, "r");
  }
  get dataDirs(): string {
    return join(this.home, "runs");
  }
  get snapshots(): string {
    return join(this.home, "snapshots");
  }
  get memory(): string {
    return join(this.home, "memory");
  }
  /** Kernels and initramfses. */
  get images(): string {
    return join(this.home, "images");
  }
  /** What is on its way to a store or from one; nothing in it outlives the server. */
  get exchange(): string {
    return join(this.home, "exchange");
  }
  get transfers(): string {
    return join(this.home, "transfers");
  }
  get layers(): string {
    return join(this.home, "layers");
  }

  /** Sockets of one run; on a tmpfs. */
  runDir(run: RunId): string {
    return join(this.runDirs, run);
  }
  diskSocket(run: RunId): string {
    return join(this.runDir(run), "disk.sock");
  }
  /** What of one run may grow: its upper, its console log, and the memory of one that was booted cold. */
  dataDir(run: RunId): string {
    return join(this.dataDirs, run);
  }
  upperDir(run: RunId): string {
    return join(this.dataDir(run), "upper");
  }
  bootMemory(run: RunId): string {
    return join(this.dataDir(run), "memory");
  }
  consoleLog(run: RunId): string {
    return join(this.dataDir(run), "console", "log");
  }
  get cgroupRoot(): string {
    return `aenv-${this.#instance}`;
  }
  cgroup(run: RunId): string {
    return `${this.cgroupRoot}/${run}`;
  }

  snapshotDir(id: SnapshotId): string {
    return join(this.snapshots, id);
  }
  manifest(id: SnapshotId): string {
    return join(this.snapshotDir(id), "manifest.json");
  }
  memoryDir(id: MemoryId): string {
    return join(this.memory, id);
  }
  layerDir(id: LayerId): string {
    return join(this.layers, id);
  }
  layerFile(id: LayerId): string {
    return join(this.layerDir(id), "data.lsmt");
  }
}
