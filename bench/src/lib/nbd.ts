/** A blockd of a benchmark's own, and fio's NBD client. */
import { join, resolve } from "node:path";
import { AenvError, bytes, sleep } from "@aenv/base";
import { BlockdClient, type LayerRef } from "@aenv/block";
import { run as exec } from "@aenv/host";
import type { Children } from "./children.ts";

const BLOCKD = resolve(import.meta.dirname, "../../../apps/blockd/src/main.ts");
export const MIB = 2 ** 20;
/** Not counted: connections and queues fill. */
export const RAMP_MS = 300;

/** What fio does for one figure. */
export interface Job {
  name: string;
  rw: "randread" | "randwrite" | "read" | "write";
  bs: string;
  depth: number;
  unit: "1/s" | "MiB/s";
}

export interface FioResult {
  rate: number;
  /** Milliseconds. */
  p50: number;
  p95: number;
  p99: number;
}

export const nbdUri = (socket: string, name: string): string => `nbd+unix:///${name}?socket=${socket}`;

/** One round of fio's NBD client. */
export async function fio(target: string, job: Job, roundMs: number, signal: AbortSignal): Promise<FioResult> {
  const args = ["--name=nbd", "--ioengine=nbd", `--uri=${target}`, `--rw=${job.rw}`, `--bs=${job.bs}`];
  args.push(`--iodepth=${job.depth}`, "--time_based", `--runtime=${roundMs}ms`, `--ramp_time=${RAMP_MS}ms`);
  args.push("--randrepeat=0");
  const { stdout } = await exec("fio", [...args, "--output-format=json", "--percentile_list=50:95:99"], {
    signal,
  });
  interface Side {
    iops: number;
    bw_bytes: number;
    clat_ns: { percentile: Record<string, number> };
  }
  const { jobs } = JSON.parse(stdout.slice(stdout.indexOf("{"))) as {
    jobs: { read: Side; write: Side; error: number }[];
  };
  const first = jobs[0];
  if (!first || first.error !== 0) throw new AenvError("INTERNAL", `fio failed: ${stdout.slice(0, 500)}`);
  const side = job.rw.endsWith("read") ? first.read : first.write;
  const at = (p: number): number => (side.clat_ns.percentile[`${p}.000000`] ?? Number.NaN) / 1e6;
  return { rate: job.unit === "1/s" ? side.iops : side.bw_bytes / MIB, p50: at(50), p95: at(95), p99: at(99) };
}

/** Ends with the children it was started among. */
export class BenchBlockd implements AsyncDisposable {
  readonly #dir: string;
  readonly #client: BlockdClient;

  private constructor(dir: string, client: BlockdClient) {
    this.#dir = dir;
    this.#client = client;
  }

  static async start(
    children: Children,
    dir: string,
    signal: AbortSignal,
    more: readonly string[] = [],
  ): Promise<BenchBlockd> {
    const control = join(dir, "blockd.sock");
    const args = ["--socket", control, "--state", join(dir, "state"), "--log", join(dir, "blockd.log"), ...more];
    children.start(process.execPath, [BLOCKD, ...args]);
    const client = new BlockdClient(control);
    for (let i = 0; ; i++) {
      const up = await client.ping(signal).then(
        () => true,
        () => false,
      );
      if (up) return new BenchBlockd(dir, client);
      if (i === 200) throw new AenvError("UNAVAILABLE", "blockd did not start");
      await sleep(25, signal);
    }
  }

  /** Opens a disk and returns its URI. */
  async disk(name: string, layers: LayerRef[], size: number): Promise<string> {
    const socketPath = join(this.#dir, `${name}.sock`);
    const upperDir = join(this.#dir, name);
    const owner = { socketUid: 0, socketGid: 0 };
    await this.#client.createDisk({ disk: name, layers, sizeBytes: bytes(size), upperDir, socketPath, ...owner });
    return nbdUri(socketPath, "disk");
  }

  /** Milliseconds to seal what was written to a disk. */
  async seal(name: string, target: LayerRef): Promise<number> {
    const started = performance.now();
    await this.#client.sealDisk(name, target);
    return performance.now() - started;
  }

  async close(name: string): Promise<void> {
    await this.#client.closeDisk(name, { deleteUpper: true });
  }

  async [Symbol.asyncDispose](): Promise<void> {
    this.#client.close();
    await Promise.resolve();
  }
}
