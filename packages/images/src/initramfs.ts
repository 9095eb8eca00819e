import { glob, readFile } from "node:fs/promises";
import { basename, join } from "node:path";
import { AenvError } from "@aenv/base";
import { run } from "@aenv/host";
import { type CpioEntry, writeCpio } from "./cpio.ts";
import type { Kernel } from "./kernel.ts";

/** What init reads from /etc/aenv/guest.json. The addresses are the same in every VM, so a snapshot never needs new ones. */
export interface GuestConfig {
  address: string;
  gateway: string;
  dns: string[];
  root: string;
}

const WANTED = ["virtio_mmio", "virtio_blk", "virtio_net", "virtio_rng", "virtio_balloon", "overlay", "tcp_diag"];

const canonical = (name: string): string => name.replaceAll("-", "_");

async function readModule(path: string): Promise<Buffer> {
  const packed = await readFile(path);
  if (path.endsWith(".ko")) return packed;
  // Piping binary through run() would decode it: the tool writes base64 instead.
  const tool = path.endsWith(".xz") ? "xz" : "zstd";
  const { stdout } = await run("sh", ["-c", '"$1" -dc -- "$2" | base64 -w0', "sh", tool, path]);
  return Buffer.from(stdout, "base64");
}

/** The `depends=` line of a module's .modinfo section. */
export function moduleDepends(ko: Buffer): string[] {
  const at = ko.indexOf("\0depends=");
  if (at < 0) return [];
  const start = at + "\0depends=".length;
  const text = ko.toString("latin1", start, ko.indexOf(0, start));
  return text.split(",").filter(Boolean).map(canonical);
}

/** The wanted modules and what they depend on, dependencies first; what is built into the kernel is left out. */
async function loadModules(kernel: Kernel): Promise<{ name: string; data: Buffer }[]> {
  const paths = new Map<string, string>();
  for await (const file of glob("**/*.ko{,.xz,.zst}", { cwd: join(kernel.modulesDir, "kernel") })) {
    paths.set(canonical(basename(file).replace(/\.ko(\.\w+)?$/, "")), join(kernel.modulesDir, "kernel", file));
  }
  const builtin = new Set(
    (await readFile(join(kernel.modulesDir, "modules.builtin"), "utf8"))
      .split("\n")
      .map((l) => canonical(basename(l).replace(/\.ko$/, ""))),
  );
  const ordered = new Map<string, Buffer>();
  const visit = async (name: string): Promise<void> => {
    if (ordered.has(name) || builtin.has(name)) return;
    const path = paths.get(name);
    if (!path) throw new AenvError("UNAVAILABLE", `the guest kernel ${kernel.release} has no module ${name}`);
    const data = await readModule(path);
    for (const dep of moduleDepends(data)) await visit(dep);
    ordered.set(name, data);
  };
  for (const name of WANTED) await visit(name);
  return [...ordered].map(([name, data]) => ({ name, data }));
}

/** The initramfs of every guest: our static binary as /init, the virtio modules and one JSON file. */
export async function buildInitramfs(kernel: Kernel, guestBinary: string, config: GuestConfig): Promise<Buffer> {
  const modules = await loadModules(kernel);
  const json = JSON.stringify({ ...config, modules: modules.map((m) => `${m.name}.ko`) }, null, 2);
  const dirs = ["dev", "proc", "sys", "run", "tmp", "mnt", "etc", "etc/aenv", "lib", "lib/modules"];
  const entries: CpioEntry[] = [
    ...dirs.map((name): CpioEntry => ({ name, type: "dir", mode: 0o755 })),
    // The kernel opens /dev/console for init before anything is mounted.
    { name: "dev/console", type: "char", mode: 0o600, major: 5, minor: 1 },
    { name: "init", type: "file", mode: 0o755, data: await readFile(guestBinary) },
    { name: "etc/aenv/guest.json", type: "file", mode: 0o644, data: Buffer.from(json) },
    ...modules.map((m): CpioEntry => ({ name: `lib/modules/${m.name}.ko`, type: "file", mode: 0o644, data: m.data })),
  ];
  return writeCpio(entries);
}
