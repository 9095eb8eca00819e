import { readFileSync } from "node:fs";
import { availableParallelism, loadavg, release, totalmem } from "node:os";
import { messageOf } from "@aenv/base";
import { run } from "@aenv/host";

export type Conditions = Record<string, string | number>;

/** The first line that a tool prints, or why there is none. */
export async function versionOf(cmd: string, args: readonly string[]): Promise<string> {
  try {
    // nginx prints its version to standard error.
    const { stdout, stderr } = await run(cmd, args);
    return (stdout || stderr).split("\n")[0]?.trim() ?? "";
  } catch (e) {
    return `none (${messageOf(e)})`;
  }
}

function cpuModel(): string {
  return /^model name\s*:\s*(.*)$/m.exec(readFileSync("/proc/cpuinfo", "utf8"))?.[1] ?? "unknown";
}

/** What every benchmark states. Load is taken before the run: a busy machine makes the numbers worthless, so it must show. */
export async function commonConditions(): Promise<Conditions> {
  const [qemu, commit] = await Promise.all([
    versionOf("qemu-system-x86_64", ["--version"]),
    versionOf("git", ["-C", import.meta.dirname, "describe", "--always", "--dirty"]),
  ]);
  return {
    date: new Date().toISOString(),
    commit,
    cores: availableParallelism(),
    cpu: cpuModel(),
    memoryGiB: Math.round(totalmem() / 2 ** 30),
    kernel: release(),
    node: process.version,
    qemu: qemu.replace(/^QEMU emulator version /, ""),
    loadBefore: loadavg()
      .map((n) => n.toFixed(2))
      .join(" "),
  };
}
