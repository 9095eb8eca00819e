import { execFile } from "node:child_process";
import { createHash } from "node:crypto";
import { existsSync } from "node:fs";
import { mkdir, readFile, rename } from "node:fs/promises";
import { join, resolve } from "node:path";
import { promisify } from "node:util";
import { publishFile } from "@aenv/host";
import { buildInitramfs, fetchKernel } from "@aenv/images";
import type { ProbeGuest } from "@aenv/vmm-qemu";

const root = resolve(import.meta.dirname, "../../..");
const cache = process.env["AENV_TEST_CACHE"] ?? join(root, ".cache");
const source = resolve(import.meta.dirname, "../guest");

/** The test guest (test/vmm/guest/main.go) with Debian's cloud kernel; built once per version of its source. */
let building: Promise<ProbeGuest> | undefined;
export function testGuest(): Promise<ProbeGuest> {
  building ??= build();
  return building;
}

async function build(): Promise<ProbeGuest> {
  const kernel = await fetchKernel(join(cache, "images"), new AbortController().signal);
  const key = createHash("sha256")
    .update(await readFile(join(source, "main.go")))
    .update(kernel.release)
    .digest("hex")
    .slice(0, 16);
  const dir = join(cache, "test-vmm");
  const initrd = join(dir, `initramfs-${key}`);
  if (!existsSync(initrd)) {
    await mkdir(dir, { recursive: true });
    const binary = join(dir, `guest-${key}`);
    const env = { ...process.env, CGO_ENABLED: "0", GOFLAGS: "", PATH: `${process.env["PATH"]}:/usr/local/go/bin` };
    const fresh = `${binary}.${process.pid}`;
    await promisify(execFile)("go", ["build", "-trimpath", "-ldflags=-s -w", "-o", fresh, "."], { cwd: source, env });
    await rename(fresh, binary);
    const config = { address: "169.254.0.21/30", gateway: "169.254.0.22", dns: [], root: "/dev/vda" };
    await publishFile(initrd, await buildInitramfs(kernel, binary, config));
  }
  return { kernel: kernel.bzImage, initrd };
}

const BLOCK_BYTES = 4 * 1024 * 1024;
const STEP = 0x9e3779b97f4a7c15n;

/** The checksum that a guest with intact memory prints at a tick. */
export function tickSum(tick: number): string {
  const block = Buffer.alloc(BLOCK_BYTES);
  const base = BigInt(tick) * STEP;
  for (let i = 0; i < BLOCK_BYTES; i += 512) block.writeBigUInt64LE(BigInt.asUintN(64, base + BigInt(i)), i);
  return createHash("sha256").update(block).digest("hex");
}

/** Complete ticks of a console. */
export function ticks(console: string): { tick: number; sum: string }[] {
  return [...console.matchAll(/^TICK (\d+) ([0-9a-f]{64})\r?$/gm)].map((m) => ({
    tick: Number(m[1]),
    sum: m[2] ?? "",
  }));
}
